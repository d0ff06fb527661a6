"""`neuclip score MODEL --data SHARDS`: score every image-text pair of a dataset by how well it fits."""

from __future__ import annotations

import shlex
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from jobs.recipe_option import FiniteRange

PAGE_NAME = "worst.html"
SHOWN_CUT = 0.1
PROGRESS_SECONDS = 30.0


@click.command(name="score", epilog="With several ranks: torchrun --nproc-per-node 8 -m jobs.score MODEL ...")
@click.argument("model")
@click.option("--data", "folder", required=True, type=click.Path(exists=True), help="Folder with manifest.json.")
@click.option("--output", required=True, type=click.Path(file_okay=False), help="Folder of the scores.")
@click.option("--caption", default="txt", show_default=True, help="A member's suffix, or json:FIELD.")
@click.option("--reference", type=click.IntRange(min=2), default=8192, show_default=True,
              help="Pairs of randomly chosen shards that stand for the whole dataset.")  # fmt: skip
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--workers", type=click.IntRange(min=0), default=2, show_default=True, help="Decoding threads per rank.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--allow-outside", is_flag=True, help="Read shards outside of DATA that its manifest names.")
@click.option("--list-worst", nargs=2, type=(FiniteRange(0, 1), click.Path()), metavar="SHARE FILE",
              help="Write the names of the worst share, for `neuclip verify --remove`.")  # fmt: skip
def command(
    model: str,
    folder: str,
    output: str,
    caption: str,
    device: str,
    list_worst: tuple[float, str] | None,
    allow_outside: bool,
    **how: Any,
) -> None:
    """Score every pair of a dataset: how much better it fits than chance over the whole dataset, under a trained model.

    MODEL is a run, a checkpoint, an exported folder, or ARCH:PRETRAINED. OUTPUT/scores.parquet has one row per sample:
    its id, key and uid, the cosine, the log-normalizers of image and text, and the score. Samples that cannot be read
    have a `problem` instead. OUTPUT/worst.html shows the pairs to look at before the worst are removed. Run it again to
    continue a stopped job.
    """
    from pipeline.data.shards.manifest_format import check_keys, load_manifest
    from pipeline.data.shards.tar_reader import CaptionField
    from pipeline.run_files import check_model

    check_model(model)
    manifest = load_manifest(folder, allow_outside=allow_outside)
    # After what refuses a wrong path: these imports take seconds.
    from pipeline.analysis import pair_scores as scores
    from pipeline.data.shards.check_shards import check_caption
    from pipeline.distributed.start import start_world
    from pipeline.files import check_writable, write_text
    from pipeline.pictures.pixels import colour_name

    field = CaptionField.parse(caption, option="--caption")
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about odd metadata of images
    check_caption(manifest, caption, name="--caption")
    place = Path(output)
    if list_worst:
        check_writable(list_worst[1])
        check_keys(manifest, manifest.shards)
    table, page = place / scores.TABLE_NAME, place / PAGE_NAME
    with start_world(device=device) as world:
        tell = click.echo if world.is_main else (lambda message: None)
        scorer = scores.make_scorer(model, manifest, caption=field, world=world, **how)
        m = len(scorer.reference[0])
        tell(f"Scoring {manifest.n:,} pairs against {m:,} of random shards at tau = {scorer.tau:.4f}.")
        scores.start_output(place / scores.FACTS_NAME, scorer.facts, what="scores")
        world.barrier()
        scores.score_shards(scorer, output=place, world=world, on_shard=shard_progress(tell))
        world.barrier()
        if not world.is_main:
            return
        counts = scores.join_parts(manifest, place, scorer.facts)
        tell(f"{counts['scored']:,} of {counts['pairs']:,} pairs have scores: {table}")
        for problem, number in sorted(counts["problems"].items(), key=lambda item: -item[1]):
            tell(f"  {number:,} without a score: {problem}")
        if counts["transparent"]:
            colour = colour_name(scorer.model.architecture.background)
            tell(f"  {counts['transparent']:,} have pictures with transparency, which were scored on {colour}.")
        if counts["single_colour"]:
            tell(f"  {counts['single_colour']:,} have pictures of a single colour.")
        share = list_worst[0] if list_worst else SHOWN_CUT
        scores.write_contact_sheet(page, table, manifest, caption=field, share=share)
        tell(f"Look at the worst pairs, and those around the cut at {share:.0%}: {page}")
        if list_worst:
            worst = scores.worst_keys(table, share)
            write_text(list_worst[1], "".join(f"{key}\n" for key in worst))
            tell(f"{len(worst):,} names are in {list_worst[1]}; to remove these samples from the shards:")
            tell(f"  neuclip verify {shlex.quote(str(folder))} --remove {shlex.quote(str(list_worst[1]))}")


def shard_progress(tell: Callable[[str], None]) -> Callable[[int, int], None]:
    """Report finished shards of this rank, at most one line in half a minute."""
    last = time.monotonic()

    def on_shard(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_SECONDS:
            tell(f"{done:,} of {total:,} shards of this rank are done.")
            last = time.monotonic()

    return on_shard


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="neuclip score")
