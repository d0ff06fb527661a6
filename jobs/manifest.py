"""`neuclip manifest`: take webdataset shards that exist already into training."""

from __future__ import annotations

import click


@click.command()
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--shards", multiple=True, metavar="PATTERN", help="URLs, `pipe:` commands or paths instead; see above.")
@click.option("--caption", default="txt", show_default=True, help="Where captions are, as in data.caption: json:FIELD.")
@click.option("--leave-out", is_flag=True, help="Go on without shards that are damaged or empty.")
@click.option("--replace", is_flag=True, help="Write a manifest that is there anew.")
@click.option("--threads", default=8, show_default=True, type=click.IntRange(min=1), help="Shards read at a time.")
def command(folder: str, shards: tuple[str, ...], caption: str, leave_out: bool, replace: bool, threads: int) -> None:
    """Read webdataset shards once and write FOLDER/manifest.json, with which `data.sources=FOLDER` trains on them.

    All .tar files below FOLDER are taken, or what --shards names: 's3://bucket/laion/{00000..41407}.tar', or
    'pipe:aws s3 cp s3://bucket/{00000..41407}.tar -'. Their samples keep their places: ids are positions in this order.
    Interrupted, the same command goes on where it was.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from pipeline.config import parse
    from pipeline.data.data_config import DataConfig
    from pipeline.data.shards.caption_field import CaptionField
    from pipeline.data.shards.make_manifest import adopt
    from pipeline.errors import UserError

    try:
        field = CaptionField.parse(caption)
    except ValueError as error:
        raise UserError(f"--caption {error}.") from error
    columns = (TextColumn("reading shards"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        adoption = adopt(
            folder, shards, caption=field, leave_out=leave_out, replace=replace, threads=threads, on_shard=show
        )
    manifest = adoption.manifest
    size = sum(shard.bytes for shard in manifest.shards)
    click.echo(f"{len(manifest.shards):,} shards, {manifest.n:,} samples, {size / 1e6:,.1f} MB: {folder}/manifest.json")
    for name, problem in adoption.left_out.items():
        click.echo(f"  left out: {name} {problem}")
    for reason, count in adoption.unusable.most_common():
        click.echo(f"  {count:,} samples ({count / manifest.n:.1%}): {reason}")
    bad, limit = adoption.unusable.total() / manifest.n, parse(DataConfig, {"sources": folder}).corrupt_limit
    if bad > limit:
        click.echo(
            f"Training ends at such a share: fix the shards, or set data.corrupt_limit (now {limit:g}) above {bad:.2g}."
        )
    elif bad:
        click.echo("Training puts others in the place of these.")
    where = "" if caption == "txt" else f" data.caption={caption}"
    click.echo(f"Train with data.sources={folder}{where}")


if __name__ == "__main__":
    from jobs.cli import run

    run(command, prog_name="python -m jobs.manifest")
