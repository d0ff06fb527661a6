"""`neuclip plan`: estimate GPU memory, steps, FLOPs and hours of a recipe before a run, or measure it for a minute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from jobs.recipe_option import TRAINING, FiniteRange, RecipePath, load_run

if TYPE_CHECKING:
    from pipeline.data.shards.manifest_format import Manifest
    from pipeline.planning.run_plan import RunPlan
    from pipeline.training.recipe import RunConfig

GIB = 2**30
PEAKS = "H100 and H200 989, A100 312, L40S 362, T4 in fp16 65"
ABOVE_0 = FiniteRange(min=0, min_open=True)


@click.command(name="plan", context_settings={"show_default": True})
@click.option("--recipe", type=RecipePath(TRAINING), help="YAML with the run's settings, or a name: cc12m.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, help="Number of GPUs.")
@click.option("--dataset-size", type=click.IntRange(min=1), help="Samples, while there is no manifest.")
@click.option("--peak-tflops", type=ABOVE_0, default=989.0, help=f"Dense bf16 peak of a GPU: {PEAKS}.")
@click.option(
    "--mfu",
    type=FiniteRange(min=0, max=1, min_open=True),
    default=0.3,
    help="Share of the peak that the executed arithmetic reaches, recomputation included.",
)
@click.option("--gpu-gib", type=ABOVE_0, default=80.0, help="Memory of one GPU, in GiB.")
@click.option("--measure", is_flag=True, help="Also run the recipe on this machine for a minute; forecast from that.")
@click.option("--seconds", default=60.0, type=FiniteRange(min=1), help="Duration of --measure.")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
def command(
    recipe: str | None,
    ranks: int,
    dataset_size: int | None,
    peak_tflops: float,
    mfu: float,
    gpu_gib: float,
    measure: bool,
    seconds: float,
    overrides: tuple[str, ...],
) -> None:
    """Estimate the cost of a recipe: GPU memory per ZeRO stage, steps, FLOPs and GPU hours.

    Needs no GPU and only the manifest of the data, or --dataset-size if there is none yet. Settings are those of
    `neuclip train`: try engine.micro_batch or model.grad_checkpointing if memory is short.

    With --measure, the data must be there: loader, steps, both together and a checkpoint are measured on this machine
    with one rank's share of the batch. It has this machine's cores divided by its GPUs, or by --ranks without a GPU;
    with `taskset --cpu-list 0-7 neuclip plan ...` those cores are all that are divided.
    """
    run = load_run(recipe, overrides, dataset_size=dataset_size)
    from pipeline.planning.run_plan import plan_run

    plan = plan_run(run, gpus=ranks, dataset_size=dataset_size)
    if plan.data is None:
        click.echo(f"The data is assumed, not read: {plan.data_missing}\n")
    title = f"{run.objective.name} on {plan.architecture.name}: {plan.gpus} x {plan.local_batch} pairs"
    _print_memory(plan, title=title, capacity=gpu_gib)
    _print_lines(describe(plan, run, mfu=mfu, peak_tflops=peak_tflops))
    if measure:
        import logging

        from pipeline.planning.measure import measure as measure_run

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        _print_lines(measure_run(run, ranks=ranks, seconds=seconds).items())


def describe(plan: RunPlan, run: RunConfig, *, mfu: float, peak_tflops: float) -> list[tuple[str, str]]:
    """FLOPs, time, data and notes as lines of (label, text)."""
    from pipeline.planning.run_plan import host_bytes

    towers, pairs = plan.towers, run.total_steps * run.batch_size
    hours = plan.flops / (peak_tflops * 1e12 * mfu) / 3600
    times = f"{pairs / plan.dataset_size:.2f} times the data"
    at = f"{100 * mfu:.3g}% utilization (--mfu) of {peak_tflops:g} TFLOP/s (--peak-tflops)"
    took = f"{_hours(hours)} GPU hours, {_hours(hours / plan.gpus)} h on {counted(plan.gpus, 'GPU')}"
    size = f"{towers.parameters / 1e6:,.1f}M parameters"
    lines = [
        ("model", f"{size}, {towers.forward_flops / 1e9:,.2f} GFLOP forward a pair"),
        ("budget", f"{counted(run.total_steps, 'step')}, {pairs:,} pairs ({times})"),
        ("time", f"{_size(plan.flops, 'FLOP')}; at {at} {took}"),
    ]
    if len(plan.stages) > 1:
        lines += [("stage", f"{what} {flops / plan.flops:.0%} of the arithmetic") for what, flops in plan.stages]
    if plan.data is None:
        lines.append(("data", f"{counted(plan.dataset_size, 'sample')}, assumed"))
    else:
        layout, manifest, unused = plan.data.layout, plan.data.mixture.manifest, "every sample is in a batch"
        if layout.dropped:
            unused = f"{counted(layout.dropped, 'sample')} left over, which fill no batch"
        size = f"{counted(manifest.n, 'sample')} in {counted(len(manifest.shards), 'shard')}, {_size(manifest.bytes)}"
        pixels = plan.architecture.image_size
        buffers, batches = map(_size, host_bytes(run.data, plan.data, ranks=plan.gpus, image_size=pixels))
        memory = f"{buffers} of encoded samples (data.shuffle_buffer), {batches} of decoded batches per rank"
        lines += [("data", size), ("epoch", f"{counted(layout.steps, 'step')} of {layout.global_batch:,}; {unused}")]
        lines.append(("host memory", memory))
    return [*lines, *(("note", note) for note in plan.notes)]


def _print_memory(plan: RunPlan, *, title: str, capacity: float) -> None:
    """One row per ZeRO stage; values are GiB on one GPU, as is its `capacity`."""
    from rich.console import Console
    from rich.table import Table

    note = (
        f"Estimates for one GPU. Activations: what autograd saves for {plan.micro_batch} pairs with fused attention. "
        f"Fits: below 90% of {capacity:g} GiB (--gpu-gib); the rest is for workspaces of kernels and fragmentation."
    )
    if row := plan.objective.per_sample:
        host = _size(row * plan.dataset_size / plan.gpus)
        note += f" Per-sample table: {row:g} B a sample, {host} of host memory per rank."
    table = Table(title=title, caption=note, caption_justify="left")
    table.add_column("ZeRO")
    for name in (*plan.memory[0], "GiB", "fits"):
        table.add_column(name, justify="right")
    for stage, parts in plan.memory.items():
        total = sum(parts.values()) / GIB
        cells = [f"{value / GIB:.{2 + (name == 'objective')}f}" for name, value in parts.items()]
        name, fits = f"{stage} (recipe)" if stage == plan.stage else str(stage), total < 0.9 * capacity
        table.add_row(name, *cells, f"{total:.2f}", "yes" if fits else "no")
    Console(soft_wrap=False, width=None if Console().is_terminal else 110).print(table)


def _print_lines(lines: Iterable[tuple[str, str]]) -> None:
    for label, text in lines:
        click.echo(f"{label:<16} {text}")


def _size(count: float, unit: str = "B") -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if count < 1000:
            return f"{count:.3g} {prefix}{unit}"
        count /= 1000
    return f"{count:.3g} E{unit}"


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as `1 step`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def contents(manifest: Manifest) -> str:
    """How many shards, samples and bytes a manifest lists."""
    shards, samples = counted(len(manifest.shards), "shard"), counted(manifest.n, "sample")
    return f"{shards}, {samples}, {manifest.bytes / 1e6:,.1f} MB"


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.2g}" if hours >= 0.01 else "less than 0.01"


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="jobs.plan")
