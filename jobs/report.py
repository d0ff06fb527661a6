"""`neuclip report`: a self-contained page about one run or one data set, or a comparison of several runs."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.errors import UserError


@click.command("report", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to write into [RUN, or comparison/ for several].",
)
@click.option("--caption", show_default="txt", help="Of a data set: a member's suffix, or json:FIELD.")
@click.option("--allow-outside", is_flag=True, help="Read shards outside of a data set that its manifest names.")
def command(runs: tuple[Path, ...], output: Path | None, caption: str | None, allow_outside: bool) -> None:
    """Write report.html and report.md of one RUN, or a comparison of several, or report.html of one data set.

    A RUN is a folder written by `neuclip train` or `neuclip demo`. The report lists what is missing. The HTML page
    needs no other files and no network. A comparison also writes its tables as markdown and CSV, with differences from
    the first RUN and their bootstrap confidence intervals.

    A data set is a folder with a manifest.json, of `neuclip download`, `pairs` or `manifest`. Its page shows samples,
    what was left out and why, sizes, captions and near duplicates.
    """
    from pipeline import report

    data = [folder for folder in runs if (folder / "manifest.json").is_file()]
    if not data:
        click.echo(report.write_report(runs, output=output))
        return
    from data_prep.dataset.ingest_report import write_report
    from pipeline.data.shards.check_shards import check_caption
    from pipeline.data.shards.manifest_format import load_manifest
    from pipeline.data.shards.tar_reader import CaptionField

    if len(runs) > 1:
        raise UserError(f"{data[0]} is a data set, not a run: report on data sets one by one.")
    field = CaptionField.parse(caption or "txt", option="--caption")
    if caption is not None:
        check_caption(load_manifest(data[0], allow_outside=allow_outside), caption, name="--caption")
    click.echo(write_report(data[0], output=output, caption=field, allow_outside=allow_outside))


if __name__ == "__main__":
    from jobs.cli import run

    run(command, prog_name="neuclip report")
