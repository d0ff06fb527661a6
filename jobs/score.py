"""`neuclip score MODEL --data SHARDS`: score every image-text pair of a dataset by how well it fits."""

from __future__ import annotations

import shlex
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import click

from jobs.known_settings import FiniteRange

PAGE_NAME = "worst.html"
SHOWN_CUT = 0.1
PROGRESS_SECONDS = 30.0


SHARE = FiniteRange(0, 1)


@click.command(name="score", epilog="With several ranks: torchrun --nproc-per-node 8 -m jobs.score MODEL ...")
@click.argument("model")
@click.option("--data", "folder", required=True, type=click.Path(exists=True), help="Folder with manifest.json.")
@click.option("--output", required=True, type=click.Path(file_okay=False), help="Folder of the scores.")
@click.option("--caption", default="txt", show_default=True, help="A member's suffix, or json:FIELD.")
@click.option(
    "--normalizers",
    type=click.Choice(["auto", "network", "sample"]),
    default="auto",
    show_default=True,
    help="Use the network that neuclip trained, or pairs of randomly chosen shards; auto: the network if there is one.",
)
@click.option("--reference", type=click.IntRange(min=2), default=8192, show_default=True, help="Pairs of that sample.")
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--workers", type=click.IntRange(min=0), default=2, show_default=True, help="Decoding threads per rank.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--allow-commands", is_flag=True, help="Run the commands that DATA's manifest names as shards.")
@click.option("--allow-outside", is_flag=True, help="Read shards outside of DATA that its manifest names.")
@click.option("--list-worst", nargs=2, type=(SHARE, click.Path()), metavar="SHARE FILE",
              help="Write the names of the worst share, for `neuclip verify --remove`.")  # fmt: skip
@click.option("--index-best", nargs=2, type=(SHARE, click.Path()), metavar="SHARE FILE",
              help="Write the uids of the best share as .npy, for `subset.index` of `neuclip download`.")  # fmt: skip
def command(
    model: str,
    folder: str,
    output: str,
    caption: str,
    normalizers: str,
    reference: int,
    batch_size: int,
    workers: int,
    device: str,
    allow_commands: bool,
    allow_outside: bool,
    list_worst: tuple[float, str] | None,
    index_best: tuple[float, str] | None,
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
    manifest = load_manifest(folder, allow_commands=allow_commands, allow_outside=allow_outside)
    # After what refuses a wrong path: these imports take seconds.
    import numpy as np

    from pipeline.analysis.contact_sheet import write_contact_sheet
    from pipeline.analysis.pair_scores import (
        FACTS_NAME,
        TABLE_NAME,
        best_uids,
        check_uids,
        join_parts,
        score_shards,
        start_output,
    )
    from pipeline.analysis.scorer import make_scorer
    from pipeline.data.shards.check_shards import check_caption
    from pipeline.distributed.start import start_world
    from pipeline.files import check_writable, replacing
    from pipeline.pictures.pixels import colour_name

    field = CaptionField.parse(caption, option="--caption")
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about odd metadata of images
    check_caption(manifest, caption, name="--caption")
    place = Path(output)
    for wanted in filter(None, (list_worst, index_best)):
        check_writable(wanted[1])
    if list_worst:
        check_keys(manifest, manifest.shards)
    if index_best:
        check_uids(manifest)
    with start_world(device=device) as world:
        tell = click.echo if world.is_main else (lambda message: None)
        scorer, facts = make_scorer(
            model,
            manifest,
            caption=field,
            normalizers=normalizers,
            reference=reference,
            batch_size=batch_size,
            workers=workers,
            world=world,
        )
        tell(f"Scoring {manifest.n:,} pairs with {facts.normalizers} normalizers at tau = {facts.tau:.4f}.")
        start_output(place / FACTS_NAME, facts, what="scores")
        world.barrier()
        score_shards(scorer, output=place, world=world, on_shard=shard_progress(tell))
        world.barrier()
        if world.is_main:
            counts = join_parts(manifest, place, facts)
            tell(f"{counts['scored']:,} of {counts['pairs']:,} pairs have scores: {place / TABLE_NAME}")
            for problem, number in sorted(counts["problems"].items(), key=lambda item: -item[1]):
                tell(f"  {number:,} without a score: {problem}")
            if counts["transparent"]:
                colour = colour_name(scorer.model.architecture.background)
                tell(f"  {counts['transparent']:,} have pictures with transparency, which were scored on {colour}.")
            if counts["single_colour"]:
                tell(f"  {counts['single_colour']:,} have pictures of a single colour.")
            share = list_worst[0] if list_worst else SHOWN_CUT
            write_contact_sheet(place / PAGE_NAME, place / TABLE_NAME, manifest, caption=field, share=share)
            tell(f"Look at the worst pairs, and those around the cut at {share:.0%}: {place / PAGE_NAME}")
            if list_worst:
                _list_worst(place / TABLE_NAME, *list_worst, folder=folder)
            if index_best:
                uids = best_uids(place / TABLE_NAME, index_best[0])
                with replacing(index_best[1]) as temporary, temporary.open("wb") as file:
                    np.save(file, uids)
                tell(f"{len(uids):,} uids are in {index_best[1]}, for `neuclip download` with subset.index.")


def _list_worst(table: Path, share: float, output: str, *, folder: str) -> None:
    """Write the names of the worst pairs, and print the command that removes them."""
    from pipeline.analysis.pair_scores import worst_keys
    from pipeline.files import write_text

    worst = worst_keys(table, share)
    write_text(output, "".join(f"{key}\n" for key in worst))
    click.echo(f"{len(worst):,} names are in {output}; to remove these samples from the shards:")
    click.echo(f"  neuclip verify {shlex.quote(str(folder))} --remove {shlex.quote(str(output))}")


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
