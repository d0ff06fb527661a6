"""`neuclip download`: turn a URL table into webdataset shards with a manifest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs.plan import counted
from jobs.recipe_option import DOWNLOAD, RecipePath

if TYPE_CHECKING:
    from data_prep.fetching.shard_writer import Outcomes
    from pipeline.data.shards.manifest_format import Manifest


@click.command(name="download")
@click.option(
    "--recipe", type=RecipePath(DOWNLOAD), help="YAML with settings, or a name: cc3m; see jobs/recipes/download/."
)
@click.option("--plan-only", is_flag=True, help="Check the source and lay out the URL list; fetch nothing.")
@click.option("--retry-failed", is_flag=True, help="Retry only URLs that failed for a temporary reason.")
@click.argument("overrides", nargs=-1, metavar="[section.key=value]...")
def command(recipe: str | None, plan_only: bool, retry_failed: bool, overrides: tuple[str, ...]) -> None:
    """Turn a URL table into webdataset shards with a manifest.

    Minimal example: neuclip download output=data/mine source.table=urls.parquet

    Run it again to continue after any interruption. Loopback and private addresses are refused unless named in
    guard.allow_addresses.

    Sections: source, subset, image, guard, fetch, monitor. `--plan-only` writes only the plan. All settings and their
    defaults are in data_prep/download_config.py; those of a download are stored in OUTPUT/download.yaml.
    """
    from data_prep.dataset.ingest_report import write_report
    from data_prep.download_config import DownloadConfig
    from data_prep.ingest import PartDone, download, prepare
    from pipeline.config import merge, parse, parse_overrides, read_yaml

    config = parse(DownloadConfig, merge(read_yaml(recipe) if recipe else {}, parse_overrides(overrides)))
    if plan_only:
        _, plan = prepare(config, on_note=_note)
        click.echo(
            f"{plan.rows:,} of {plan.seen:,} rows in {counted(plan.shards, 'shard')}; digest {plan.digest[:16]}."
        )
        return
    try:
        with download_progress() as show:
            manifest = download(config, retry_failed=retry_failed, on_progress=show, on_note=_note)
    except PartDone as done:
        click.echo(str(done))
        return
    click.echo(summary(manifest, Path(config.output)))
    click.echo(f"Report: {write_report(config.output)}")


def summary(manifest: Manifest, folder: Path) -> str:
    """Summary of a finished download, as lines for the terminal."""
    from data_prep.reasons import is_transient

    head = (
        f"{manifest.n:,} of {manifest.attempted:,} URLs gave a sample ({manifest.n / manifest.attempted:.1%}), "
        f"{counted(len(manifest.shards), 'shard')}, {manifest.bytes / 1e6:,.1f} MB in {folder}"
    )
    lines = [head]
    failures = Counter(manifest.failures)
    for reason, count in failures.most_common():
        passing = "  may pass: --retry-failed" if is_transient(reason) else ""
        lines.append(f"  {reason:<22}{count:>12,}  {count / manifest.attempted:>6.2%}{passing}")
    if transparent := manifest.facts.get("counts", {}).get("transparent"):
        lines.append(f"Images with transparent pixels, put on a background: {transparent:,}.")
    return "\n".join(lines)


def _note(text: str) -> None:
    click.echo(f"Note: {text}", err=True)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[..., None]]:
    """A bar on a terminal, otherwise a line every ten seconds; yields what shows (done, total, detail="")."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console, printed = Console(stderr=True), time.monotonic()
    plain = not console.is_terminal
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[detail]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=plain, transient=True) as bar:
        task = bar.add_task(what, total=None, detail="")

        def show(done: int, total: int, detail: str = "") -> None:
            nonlocal printed
            bar.update(task, completed=done, total=total, detail=detail)
            if plain and time.monotonic() - printed >= 10:
                printed = time.monotonic()
                click.echo(f"{done:,} of {total:,} {what}  {detail}".rstrip(), err=True)

        yield show


@contextmanager
def download_progress() -> Iterator[Callable[[int, Outcomes], None]]:
    """A `progress_bar` with the share of samples, the most frequent failure and the rate of a download."""
    from data_prep.fetching.shard_writer import SUCCESS

    began = time.monotonic()
    with progress_bar("URLs") as show:

        def show_outcomes(total: int, outcomes: Outcomes) -> None:
            attempted, seconds = outcomes.total(), time.monotonic() - began
            worst = (outcomes - Counter({SUCCESS: attempted})).most_common(1)
            detail = f"{outcomes[SUCCESS] / attempted:.1%} good" if attempted else "starting"
            detail += f"  most failed: {worst[0][0]}" if worst else ""
            detail += f"  {attempted / seconds:,.0f}/s" if attempted and seconds > 1 else ""
            show(attempted, total, detail)

        yield show_outcomes


if __name__ == "__main__":
    from jobs.cli import run

    run(command, prog_name="python -m jobs.download")
