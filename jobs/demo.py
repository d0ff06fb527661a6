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
    run = load_recipe(RECIPE, [f"output={output}", f"data.sources={data / 'shards'}", *overrides])
    scenes = ScenesConfig(pairs=pairs, held_out=held_out, retrieval_pairs=held_out)
    keep_or_clear(scenes, data, Path(output))
    stages = Stages(Path(output))
    with stages.timed("corpus and ingestion"):
        ingest(scenes, data)
    with stages.timed("evaluation sets"):
        make_suite(scenes, data / "suite")
    with stages.timed("training"):
        code = train(run)
    if code:
        return code
    with stages.timed("evaluation"):
        evaluate(run.output, data / "suite")
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


def ingest(scenes: Any, data: Path) -> None:
    """Serve the corpus on 127.0.0.1 and download it like any other URL table; continues what was interrupted."""
    from data_prep.dataset.ingest_report import write_report as write_ingestion_report
    from data_prep.ingest import download
    from data_prep.scenes import serve_scenes, write_url_table
    from data_prep.settings.download_config import DownloadConfig
    from jobs.download import ProgressBar, summary
    from pipeline.config import merge, parse, read_yaml
    from pipeline.data.shards.manifest_format import MANIFEST_NAME, load_manifest

    shards, table, port_file = data / "shards", data / "urls.parquet", data / "port"
    if (shards / MANIFEST_NAME).exists():
        click.echo(f"Ingestion: done already. {summary(load_manifest(shards), shards)}")
        return
    data.mkdir(parents=True, exist_ok=True)
    # The URLs of an interrupted run name its port: take the same one again.
    port = int(port_file.read_text()) if port_file.exists() else 0
    with serve_scenes(scenes, port=port) as base:
        if not table.exists():
            port_file.write_text(base.rpartition(":")[2])
            click.echo(f"Ingestion: {scenes.pairs:,} URLs on {base}, a server that misbehaves like the web.")
            write_url_table(scenes, base, table, processes=2)
        given = {"output": str(shards), "source": {"table": str(table)}}
        with ProgressBar() as progress:
            manifest = download(parse(DownloadConfig, merge(read_yaml(INGESTION), given)), on_progress=progress)
    click.echo(summary(manifest, shards))
    click.echo(f"What was fetched and what was not: {write_ingestion_report(shards)}")


def make_suite(scenes: Any, folder: Path) -> None:
    """The held-out tasks, in the layout of the real benchmark."""
    from data_prep.scenes import write_suite

    if (folder / "suite.json").exists():
        return
    tasks = write_suite(scenes, folder)
    click.echo(f"Evaluation sets: {', '.join(tasks)}")


def train(run: Any) -> int:
    """Train, or continue, or say that it is done."""
    from pipeline.checkpoint.layout import finished_checkpoints, step_of
    from pipeline.training.run import train as train_run

    done = finished_checkpoints(Path(run.output))
    if done and step_of(done[-1]) >= run.total_steps:
        click.echo(f"Training: done already ({run.total_steps} steps).")
        return 0
    click.echo(f"Training: {run.total_steps} steps of {run.batch_size} pairs, {run.objective.name}, {run.model.arch}.")
    return train_run(run, resume="latest")


def evaluate(run: str, suite: Path) -> None:
    """Score every checkpoint that the run kept."""
    from pipeline.checkpoint.layout import finished_checkpoints
    from pipeline.evaluation import evaluate as evaluate_run

    checkpoints = [str(path) for path in finished_checkpoints(Path(run))]
    evaluations = evaluate_run(checkpoints, suite=suite)
    latest = evaluations[-1]
    click.echo(f"Evaluation of {Path(latest.model.source).name}:")
    for task, result in latest.results.items():
        click.echo(f"  {task:<24} {result.score:7.1%}   {result.main_metric} (chance {result.chance:.1%})")
    failures = {task: text for found in evaluations for task, text in found.failures.items()}
    if failures:
        from pipeline.errors import UserError

        raise UserError("Not every task could be scored. " + " ".join(f"{k}: {text}" for k, text in failures.items()))


def write_report(run: str) -> Path:
    """The page that a person wants to look at."""
    from pipeline.report import write_report as write

    return write([run])


class Stages:
    """Seconds that each stage took, in RUN/stages.json; a stage that was found done keeps its first time."""

    def __init__(self, run: Path) -> None:
        self._path = run / "stages.json"
        self._seconds: dict[str, float] = {}
        run.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._seconds = json.loads(self._path.read_text(encoding="utf-8"))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            # An interrupted stage adds up; one that is skipped because it is done adds next to nothing.
            self._seconds[name] = round(self._seconds.get(name, 0.0) + time.perf_counter() - start, 2)
            write_json(self._path, self._seconds)


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="neuclip demo")
