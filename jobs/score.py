"""`neuclip score MODEL --data SHARDS`: score every image-text pair of a dataset by how well it fits."""

from __future__ import annotations

import warnings
from pathlib import Path

import click


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
@click.option("--list-worst", nargs=2, type=(click.FloatRange(0, 1), click.Path()), metavar="SHARE FILE",
              help="Write the keys of the worst share, for `neuclip verify --remove`.")  # fmt: skip
@click.option("--index-best", nargs=2, type=(click.FloatRange(0, 1), click.Path()), metavar="SHARE FILE",
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
    list_worst: tuple[float, str] | None,
    index_best: tuple[float, str] | None,
) -> None:
    """Score every pair of a dataset: how much better it fits than chance over the whole dataset, under a trained model.

    MODEL is a run, a checkpoint, an exported folder, or ARCH:PRETRAINED. OUTPUT/scores.parquet has one row per sample:
    its id, key and uid, the cosine, the log-normalizers of image and text, and the score. Samples that cannot be read
    have a `problem` instead. Run it again to continue a stopped job.
    """
    import numpy as np

    from pipeline.analysis.pair_scores import TABLE_NAME, best_uids, join_parts, score_shards, start_output, worst_keys
    from pipeline.analysis.scorer import make_scorer
    from pipeline.data.shards.caption_field import CaptionField
    from pipeline.data.shards.manifest_format import load_manifest
    from pipeline.distributed.world import start_world
    from pipeline.files import replacing, write_text

    try:
        field = CaptionField.parse(caption)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--caption") from error
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about odd metadata of images
    manifest, place = load_manifest(folder), Path(output)
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
        start_output(place, facts)
        world.barrier()
        score_shards(
            scorer,
            manifest,
            caption=field,
            output=place,
            world=world,
            batch_size=batch_size,
            workers=workers,
            on_shard=lambda done, total: tell(f"{done:,} of {total:,} shards of this rank are done."),
        )
        world.barrier()
        if world.is_main:
            counts = join_parts(manifest, place, facts)
            tell(f"{counts['scored']:,} of {counts['pairs']:,} pairs have scores: {place / TABLE_NAME}")
            for problem, number in sorted(counts["problems"].items(), key=lambda item: -item[1]):
                tell(f"  {number:,} without a score: {problem}")
            if list_worst:
                write_text(list_worst[1], "".join(f"{key}\n" for key in worst_keys(place / TABLE_NAME, list_worst[0])))
            if index_best:
                uids = best_uids(place / TABLE_NAME, index_best[0])
                with replacing(index_best[1]) as temporary, temporary.open("wb") as file:
                    np.save(file, uids)


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="neuclip score")
