"""`neuclip plan`: what a recipe's data will cost in reading and memory, and how well it is shuffled, before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pipeline.data.plan import DataPlan


@click.command(name="plan")
@click.option("--recipe", type=click.Path(dir_okay=False), help="YAML file with the run's settings.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs the run will have.")
@click.option("--image-size", type=click.IntRange(min=1), default=224, show_default=True, help="Pixels, for buffers.")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
def command(recipe: str | None, ranks: int, image_size: int, overrides: tuple[str, ...]) -> None:
    """Tell what a recipe's data will cost: read volume, buffer memory, shuffle quality. Reads manifests only.

    Settings as for `neuclip train`; try other data.streams and data.shuffle_buffer before a run, since they cannot
    change once it has begun.
    """
    from pipeline.data.plan import plan_data
    from pipeline.recipe import load_recipe

    run = load_recipe(recipe, overrides)
    plan = plan_data(run.data, ranks=ranks, global_batch=run.batch_size, image_size=image_size, seed=run.seed)
    for label, text in describe_data(plan, total_steps=run.total_steps):
        click.echo(f"{label:<16} {text}")


def describe_data(plan: DataPlan, *, total_steps: int) -> list[tuple[str, str]]:
    """The plan in sentences, as (label, text)."""
    layout, quality = plan.layout, plan.quality
    epochs = total_steps / layout.steps
    per_rank = layout.streams // plan.ranks
    share = per_rank / max(1, plan.workers)
    place = "local, skipped by its headers" if plan.local else "read"
    return [
        ("data", f"{plan.samples:,} samples in {plan.shards:,} shards, {_size(plan.bytes)}"),
        ("epoch", f"{layout.steps:,} steps of {layout.global_batch:,}; {layout.dropped:,} samples fill no batch"),
        ("run", f"{total_steps:,} steps, {epochs:.2f} epochs, {total_steps * layout.global_batch:,} samples seen"),
        (
            "layout",
            (
                f"{layout.streams} streams of {layout.stream_length:,} samples, {layout.rows} rows of a batch each; "
                f"{per_rank} per rank, {share:.1f} per worker"
            ),
        ),
        (
            "reading",
            (
                f"{_size(plan.epoch_bytes)} per epoch, {_size(plan.epoch_bytes / plan.ranks)} per rank; before the "
                "streams' "
                f"first samples lie {plan.passed_samples:,} others ({_size(plan.passed_bytes)}, {place})"
            ),
        ),
        ("resuming", f"about {_size(plan.resume_bytes)} read again, {_size(plan.resume_bytes / plan.ranks)} per rank"),
        (
            "memory",
            f"{_size(plan.buffer_bytes)} of encoded samples and {_size(plan.batch_bytes)} of decoded batches per rank",
        ),
        (
            "shuffling",
            (
                f"{quality.shards_per_batch:,.0f} different shards in a batch (a global shuffle: "
                f"{quality.ideal_shards_per_batch:,.0f}); two samples of a batch share a shard with probability "
                f"{quality.same_shard_pairs:.2g} (global: {quality.ideal_same_shard_pairs:.2g})"
            ),
        ),
    ]


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="jobs.plan")
