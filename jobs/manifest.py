"""`neuclip manifest`: write the manifest of existing webdataset shards, so that training can use them."""

from __future__ import annotations

import shlex
from collections import Counter

import click

from jobs.plan import contents


@click.command(name="manifest")
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--shards", multiple=True, metavar="PATTERN", help="URLs or paths of shards outside FOLDER.")
@click.option("--caption", default="txt", show_default=True, help="As data.caption: a suffix, or json:FIELD.")
@click.option("--leave-out", is_flag=True, help="Skip damaged and empty shards.")
@click.option("--replace", is_flag=True, help="Overwrite an existing manifest.")
@click.option("--threads", default=8, show_default=True, type=click.IntRange(min=1), help="Shards read in parallel.")
def command(folder: str, shards: tuple[str, ...], caption: str, leave_out: bool, replace: bool, threads: int) -> None:
    """Read webdataset shards once and write FOLDER/manifest.json, so that `data.sources=FOLDER` trains on them.

    Reads all .tar files below FOLDER, or those given by --shards, such as 's3://bucket/laion/{00000..41407}.tar'. The
    id of a sample is its position in this order. After an interruption, the same command continues where it stopped.
    """
    from jobs.download import progress_bar
    from pipeline.config import parse
    from pipeline.data.data_config import DataConfig
    from pipeline.data.shards.make_manifest import index_shards
    from pipeline.data.shards.tar_reader import CaptionField

    field = CaptionField.parse(caption, option="--caption")
    with progress_bar("shards") as show:
        manifest = index_shards(
            folder, shards, caption=field, leave_out=leave_out, replace=replace, threads=threads, on_shard=show
        )
    unusable = Counter(manifest.facts["unusable"])
    click.echo(
        f"{contents(manifest)}: {folder}/manifest.json (to look at them: neuclip report {shlex.quote(str(folder))})"
    )
    for name, problem in manifest.facts["left out"].items():
        click.echo(f"  left out: {name} {problem}")
    for reason, count in unusable.most_common():
        click.echo(f"  {count:,} samples ({count / manifest.n:.1%}): {reason}")
    for note, count in Counter(manifest.facts.get("notes", {})).most_common():
        click.echo(f"  {count:,} {note}")
    bad, limit = unusable.total() / manifest.n, parse(DataConfig, {"sources": folder}).corrupt_limit
    if bad > limit:
        advice = f"fix the shards, or set data.corrupt_limit (now {limit:g}) above {bad:.2g}."
        click.echo(f"Training stops at such a share: {advice}")
    elif bad:
        click.echo("Training replaces each of these by another sample.")
    settings = f"data.sources={folder}" + f" data.caption={caption}" * (caption != "txt")
    click.echo(f"Train with {settings}{' data.allow_outside=true' if manifest.shards.outside else ''}")


if __name__ == "__main__":
    from jobs.cli import run

    run(command, prog_name="python -m jobs.manifest")
