"""`neuclip pairs`: convert your own image-text pairs to shards with a manifest."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from jobs.plan import counted
from pipeline.cores import usable_cores

FROM_SCRATCH = 100_000
"""Pairs from which on training from scratch is suggested: a rule of thumb, see docs/own-data.md."""
RECIPES_BATCH = 256
"""`batch_size` of the recipes `own` and `finetune`."""


@click.command(name="pairs")
@click.argument("source")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder of the shards.")
@click.option("--image", metavar="COLUMN", help="Column of the image, or suffix of its member in a tar [detected].")
@click.option(
    "--caption",
    metavar="COLUMN",
    multiple=True,
    help="Column, file suffix or JSON field of the caption; several: the first that has one [detected].",
)
@click.option(
    "--caption-template",
    metavar="TEXT",
    multiple=True,
    help="Caption of images in folders of classes, such as 'a photo of a {class}'; {parent} is the folder above it; "
    "several: several captions.",
)
@click.option(
    "--captions",
    type=click.Choice(["several", "one"]),
    default="several",
    show_default=True,
    help='What a list in a caption\'s text, such as ["a", "b"], and a .txt file of several lines are.',
)
@click.option(
    "--images",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder that image paths are relative to [the table's].",
)
@click.option("--header", metavar="A,B,...", help="Column names of a table without a header line.")
@click.option("--split", help="Split of a dataset [the only one, or train].")
@click.option("--subset", help="Configuration of a dataset on the hub.")
@click.option("--revision", help="Commit or branch of a dataset on the hub.")
@click.option("--allow-outside", is_flag=True, help="Take images that a table names outside of their folder.")
@click.option("--size", type=click.IntRange(min=16), help="Downscale larger images to this shorter side, in pixels.")
@click.option("--shard-size", type=click.IntRange(min=1), help="Rows per shard [1/32 of all, between 100 and 10,000].")
@click.option("--processes", type=click.IntRange(min=1), help="Number of converting processes [one per core].")
def command(source: str, output: Path, captions: str, header: str | None, processes: int | None, **named: Any) -> None:
    """Convert SOURCE to shards with a manifest; then train with data.sources=OUTPUT.

    SOURCE is a CSV, TSV, JSONL or JSON table of image files, or a folder with one; a folder of images with .txt or
    .json files beside them, or in folders of classes (--caption-template); COCO's captions_*.json; parquet files; a
    folder written by datasets.save_to_disk; webdataset tars; or the name of a dataset on the Hugging Face hub. For a
    table of URLs use `neuclip download`.

    After an interruption, the same command continues. OUTPUT/dropped.tsv lists every row that was dropped.
    """
    from data_prep.pairs.make_shards import DROPPED_NAME, make_shards
    from data_prep.pairs.pair import PairOptions
    from jobs.download import progress_bar
    from pipeline.pictures import UNSUPPORTED

    columns = tuple(name.strip() for name in header.split(",")) if header else ()
    one = "one" if captions == "one" else None
    # The other options have the names of its fields.
    options = PairOptions(captions=one, header=columns, processes=processes or usable_cores(), **named)
    with progress_bar("rows") as show:
        outcome = make_shards(source, output, options, on_rows=show, on_note=click.echo)
    manifest = outcome.manifest
    if not outcome.converted:
        click.echo("Nothing has changed since the last time, and nothing was left to do.")
    click.echo(
        f"{manifest.n:,} of {manifest.attempted:,} rows gave a sample: "
        f"{counted(len(manifest.shards), 'shard')}, {manifest.bytes / 1e6:,.1f} MB in {output}"
    )
    for reason, count in Counter(manifest.failures).most_common():
        rows = [(place, detail) for place, name, detail in outcome.dropped if name == reason]
        shown = ", ".join(place for place, _ in rows) + (", ..." if count > len(rows) else "")
        why = f" ({rows[0][1]})" if rows and reason == UNSUPPORTED else ""
        click.echo(f"  dropped {count:>8,}  {reason}: {shown}{why}")
    if manifest.failures:
        click.echo(f"  every dropped row: {output / DROPPED_NAME}")
    click.echo(f"  to look at them: neuclip report {shlex.quote(str(output))}")
    _show_counts(manifest.facts["counts"], manifest.n)
    field = ""
    if several := manifest.facts["counts"]["several_captions"]:
        field = " data.caption=json:captions"
        click.echo(f"Samples with several captions: {several:,}; one of them is drawn each time.")
    recipe = "own" if manifest.n >= FROM_SCRATCH else "finetune"
    source = shlex.quote(f"data.sources={output}")
    click.echo(f"Train with: neuclip train --recipe {recipe} {source}{field}{small_batch(manifest.n)} output=runs/mine")
    if recipe == "finetune":
        click.echo(
            f"It starts from a published model. Fewer than {FROM_SCRATCH:,} pairs teach little from scratch, which is "
            "--recipe own."
        )


def _show_counts(counts: Mapping[str, int], samples: int) -> None:
    """What in captions and images may be other than the user expects."""
    captions, distinct, long = (counts[name] for name in ("captions", "distinct_captions", "long_captions"))
    click.echo(f"Captions: {captions:,}, of which {distinct:,} are distinct.")
    if (equal := captions - distinct) > captions / 20:
        click.echo(
            f"  {equal / captions:.0%} repeat another: in a batch, equal captions are each other's negatives, which "
            "objective.mask_equal=true leaves out."
        )
    if long:
        share = f"{long:,} ({long / captions:.1%})"
        click.echo(f"  {share} have more than 77 tokens, which training cuts (or set model.context_length).")
    if transparent := counts["transparent"]:
        click.echo(f"Images with transparency: {transparent:,}, put on white.")
    if plain := counts["single_colour"]:
        click.echo(f"Images of a single colour: {plain:,} of {samples:,}; `neuclip report` shows some of the data.")


def small_batch(samples: int) -> str:
    """Settings for a set of which the recipes' batches would leave much out of every epoch, or which fills none; with
    as many epochs as make 200 steps: fewer teach nothing at the learning rate of a fine-tune."""
    batch = max(2, 2 ** ((samples // 6).bit_length() - 1))
    if batch >= RECIPES_BATCH:
        return ""
    return f" batch_size={batch} epochs={-(-200 // max(1, samples // batch))}"


if __name__ == "__main__":
    from jobs.cli import run

    run(command, prog_name="python -m jobs.pairs")
