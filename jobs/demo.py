"""The main job, end to end, on the built-in corpus: URLs -> shards -> training -> evaluation -> report.

Every stage is the real one. What is done stays done: called again, the demo continues where it stopped; a
corpus of other settings, or drawn by another version of the code, is made anew.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from pipeline.files import write_json

RECIPE = Path(__file__).parent / "recipes" / "demo.yaml"
INGESTION = Path(__file__).parent / "recipes" / "download" / "scenes.yaml"


@click.command(name="demo")
@click.option("--output", default="runs/demo", show_default=True, help="The run's folder; data goes to OUTPUT-data.")
@click.option("--pairs", type=click.IntRange(min=1000), default=20_000, show_default=True, help="URLs in the table.")
@click.option("--held-out", type=click.IntRange(min=50), default=1_000, show_default=True, help="Images per task.")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
def command(output: str, pairs: int, held_out: int, overrides: tuple[str, ...]) -> int:
    """Make the built-in corpus, ingest, train, evaluate and report: about ten minutes on two cores.

    SECTION.KEY=VALUE changes the training recipe (jobs/recipes/demo.yaml).
    """
    from data_prep.scenes import ScenesConfig
    from pipeline.training.recipe import load_recipe

    data = Path(f"{output}-data")
    given = [f"output={output}", f"data.sources={data / 'shards'}", "telemetry.progress=brief"]
    run = load_recipe(RECIPE, [*given, *overrides])
    scenes = ScenesConfig(pairs=pairs, held_out=held_out, retrieval_pairs=held_out)
    click.echo(f"NeuCLIP demo: {pairs:,} URLs to a trained and evaluated model, in {output}\n")
    keep_or_clear(scenes, data, Path(output))
    stages = DemoStages(Path(output))
    with stages.timed("corpus and ingestion") as stage:
        stage.done(ingest(scenes, data))
    with stages.timed("evaluation sets") as stage:
        stage.done(make_suite(scenes, data / "suite"))
    with stages.timed("training") as stage:
        code, text = train(run)
        if code:
            return code
        stage.done(text)
    with stages.timed("evaluation") as stage:
        lines = evaluate(run.output, data / "suite")
        stage.done(f"{len(lines)} tasks at the last checkpoint")
    click.echo("\n".join(lines))
    report = write_report(output)
    click.echo(f"\nAll done. Open {report}")
    return 0


def keep_or_clear(scenes: Any, data: Path, run: Path) -> None:
    """Clear the data of another corpus (other settings, or another version of the code that draws it).

    What was trained on it is kept under another name: it is neither continued on this corpus nor lost.
    """
    from data_prep.scenes import corpus_digest
    from pipeline.data.shards.manifest_format import MANIFEST_NAME

    mark, digest = data / "corpus.sha256", corpus_digest(scenes, INGESTION)
    if mark.exists() and mark.read_text().strip() == digest:
        return
    made = [data / name for name in ("shards", "suite", "urls.parquet", "port")]
    if any(path.exists() for path in made):
        click.echo(f"Ingestion: {data} holds a corpus of other settings or another version: it is made anew.")
        manifest = data / "shards" / MANIFEST_NAME
        if run.exists():
            old = json.loads(manifest.read_text())["digest"] if manifest.exists() else uuid.uuid4().hex
            aside = run.with_name(f"{run.name}-corpus-{old[:8]}")
            if aside.exists():
                aside = run.with_name(f"{aside.name}-{uuid.uuid4().hex[:8]}")
            run.rename(aside)
            click.echo(f"Training: what was trained on it is now {aside}.")
        for path in made:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    data.mkdir(parents=True, exist_ok=True)
    mark.write_text(digest + "\n")


def ingest(scenes: Any, data: Path) -> str:
    """Serve the corpus on 127.0.0.1 and download it like any other URL table; continues what was interrupted.

    Returns:
        What came of it, in a line.
    """
    from data_prep.dataset.ingest_report import write_report as write_ingestion_report
    from data_prep.ingest import download
    from data_prep.scenes import serve_scenes, write_url_table
    from data_prep.settings.download_config import DownloadConfig
    from jobs.download import ProgressBar
    from pipeline.config import merge, parse, read_yaml
    from pipeline.data.shards.manifest_format import MANIFEST_NAME, load_manifest

    shards, table, port_file = data / "shards", data / "urls.parquet", data / "port"
    if (shards / MANIFEST_NAME).exists():
        return f"{_counted(load_manifest(shards))}, done already"
    data.mkdir(parents=True, exist_ok=True)
    # The URLs of an interrupted run name its port: take the same one again.
    port = int(port_file.read_text()) if port_file.exists() else 0
    with serve_scenes(scenes, port=port) as base:
        if not table.exists():
            port_file.write_text(base.rpartition(":")[2])
            click.echo(f"  {scenes.pairs:,} URLs on {base}, a server that misbehaves like the web")
            write_url_table(scenes, base, table, processes=2)
        given = {"output": str(shards), "source": {"table": str(table)}}
        with ProgressBar() as progress:
            manifest = download(parse(DownloadConfig, merge(read_yaml(INGESTION), given)), on_progress=progress)
    write_ingestion_report(shards)
    return _counted(manifest)


def _counted(manifest: Any) -> str:
    share, reasons = manifest.n / manifest.attempted, len(manifest.failures)
    return f"{manifest.n:,} of {manifest.attempted:,} URLs gave a sample ({share:.1%}), {reasons} reasons counted"


def make_suite(scenes: Any, folder: Path) -> str:
    """The held-out tasks, in the layout of the real benchmark. Returns: what was made, in a line."""
    from data_prep.scenes import write_suite

    if (folder / "suite.json").exists():
        return "done already"
    return f"{len(write_suite(scenes, folder))} held-out tasks"


def train(run: Any) -> tuple[int, str]:
    """Train, or continue, unless it is done. Returns: the exit code, and what was done in a line."""
    from pipeline.checkpoint.layout import finished_checkpoints, step_of
    from pipeline.training.run import train as train_run

    done = finished_checkpoints(Path(run.output))
    if done and step_of(done[-1]) >= run.total_steps:
        return 0, f"{run.total_steps:,} steps, done already"
    click.echo(
        "  The loss has no lower bound at 0: it turns negative as pairs align. Normalizer gap: difference, in nats,\n"
        "  between the log-normalizers that the method predicts and those of the batch."
    )
    code = train_run(run, resume="latest")
    return code, f"{run.total_steps:,} steps of {run.batch_size} pairs, {run.objective.name}, {run.model.arch}"


def evaluate(run: str, suite: Path) -> list[str]:
    """Score every checkpoint that the run kept. Returns: a line per task of the last one."""
    from pipeline.checkpoint.layout import finished_checkpoints
    from pipeline.evaluation import evaluate as evaluate_run

    checkpoints = [str(path) for path in finished_checkpoints(Path(run))]
    evaluations = evaluate_run(checkpoints, suite=suite)
    latest = evaluations[-1]
    lines = [
        f"  {task:<24} {result.score:7.1%}   {result.main_metric} (chance {result.chance:.1%})"
        for task, result in latest.results.items()
    ]
    failures = {task: text for found in evaluations for task, text in found.failures.items()}
    if failures:
        from pipeline.errors import UserError

        raise UserError("Not every task could be scored. " + " ".join(f"{k}: {text}" for k, text in failures.items()))
    return lines


def write_report(run: str) -> Path:
    """The page that a person wants to look at, and the scores in TensorBoard."""
    from pipeline.report import write_report as write
    from pipeline.report.tensorboard_scores import update_scores

    update_scores(run)
    return write([run])


class DemoStage:
    """A stage that is running; `done` says what came of it."""

    text = ""

    def done(self, text: str) -> None:
        self.text = text


class DemoStages:
    """Seconds that each stage took, in RUN/stages.json; a stage that was found done keeps its first time."""

    def __init__(self, run: Path) -> None:
        self._path = run / "stages.json"
        self._seconds: dict[str, float] = {}
        run.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._seconds = json.loads(self._path.read_text(encoding="utf-8"))

    @contextmanager
    def timed(self, name: str) -> Iterator[DemoStage]:
        """Time a stage; when it succeeds, one line says so with what came of it and the time it took."""
        from pipeline.report.charts import duration

        stage, start = DemoStage(), time.perf_counter()
        try:
            yield stage
            if stage.text:
                tick, took = click.style("✓", fg="green"), duration(time.perf_counter() - start)
                click.echo(f"{tick} {name.capitalize():<21} {stage.text}  [{took}]")
        finally:
            # An interrupted stage adds up; one that is skipped because it is done adds next to nothing.
            self._seconds[name] = round(self._seconds.get(name, 0.0) + time.perf_counter() - start, 2)
            write_json(self._path, self._seconds)


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="neuclip demo")
