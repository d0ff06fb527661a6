"""`neuclip report`: a self-contained page about one run, or a comparison of several runs."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("report", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Folder to write into [RUN, or comparison/ for several]."
)
@click.option("--tensorboard/--no-tensorboard", default=True, help="Add scores as scalars to RUN/tensorboard [yes].")
@click.option("--mixed", is_flag=True, help="Allow comparing runs evaluated with different settings or data.")
def command(runs: tuple[Path, ...], output: Path | None, tensorboard: bool, mixed: bool) -> None:
    """Write report.html and report.md of one RUN, or a comparison of several.

    A RUN is a folder written by `neuclip train` or `neuclip demo`. The report lists what is missing. The HTML page
    needs no other files and no network. A comparison also writes its tables as markdown, CSV and LaTeX, with
    differences from the first RUN and their bootstrap confidence intervals. If a run logs to TensorBoard, its scores
    are added there.
    """
    from pipeline.report import write_report

    click.echo(write_report(runs, output=output, mixed=mixed))
    if tensorboard:
        from pipeline.report.tensorboard_scores import update_scores

        for folder in runs:
            update_scores(folder)


if __name__ == "__main__":
    from jobs.cli import run

    run(command, prog_name="neuclip report")
