"""`neuclip plan`: estimate GPU memory, time, data reading and shuffle quality of a recipe before a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from jobs.known_settings import TRAINING, FiniteRange, RecipePath, complete_settings, load_run

if TYPE_CHECKING:
    from pipeline.planning.run_plan import RunPlan

GIB = 2**30
MOST_CORES = 32
"""Per GPU: more than nodes with several GPUs have."""
GPUS = {989.0: "H100 or H200", 312.0: "A100", 362.0: "L40S", 65.0: "T4 in fp16"}
"""By their dense peaks in bf16."""
PEAKS = ", ".join(f"{name} {peak:g}" for peak, name in GPUS.items())


ABOVE_0 = FiniteRange(min=0, min_open=True)


@click.command(name="plan", context_settings={"show_default": True})
@click.option("--recipe", type=RecipePath(TRAINING), help="YAML with the run's settings, or a name: cc12m.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, help="Number of GPUs.")
@click.option("--dataset-size", type=click.IntRange(min=1), help="Samples, while there is no manifest.")
@click.option("--sample-bytes", type=click.IntRange(min=1), default=30_000, help="Bytes of one, without a manifest.")
@click.option("--peak-tflops", type=ABOVE_0, default=989.0, help=f"Dense bf16 peak of a GPU: {PEAKS}.")
@click.option(
    "--mfu",
    type=FiniteRange(min=0, max=1, min_open=True),
    default=0.3,
    help="Share of the peak that the executed arithmetic reaches, recomputation included.",
)
@click.option("--gpu-gib", type=ABOVE_0, default=80.0, help="Memory of one GPU, in GiB.")
@click.option(
    "--images-per-core",
    type=ABOVE_0,
    default=500.0,
    help="Images that a core decodes per second; `neuclip doctor --data` measures it. About 700 for images stored at "
    "256 px, 300 at 512 px.",
)
@click.option("--measure", is_flag=True, help="Also run the recipe on this machine for a minute; forecast from that.")
@click.option("--seconds", default=60.0, type=FiniteRange(min=1), help="Duration of --measure.")
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=1),
    default=8,
    help="Ranks that share a node's cores: --measure gives one rank its share of this machine's.",
)
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...", shell_complete=complete_settings)
def command(
    recipe: str | None,
    ranks: int,
    measure: bool,
    seconds: float,
    gpus_per_node: int,
    gpu_gib: float,
    images_per_core: float,
    overrides: tuple[str, ...],
    **assumed: Any,
) -> None:
    """Estimate the cost of a recipe: GPU memory per ZeRO stage, steps, FLOPs, GPU hours and loading.

    Needs no GPU and only the manifest of the data, or --dataset-size if there is none yet. Settings are those of
    `neuclip train`: try engine.micro_batch or model.grad_checkpointing if memory is short.

    With --measure, the data must be there: loader, steps, both together, a checkpoint and an evaluation's forward pass
    are measured on this machine with one rank's share of the batch.
    """
    run = load_run(recipe, overrides, dataset_size=assumed["dataset_size"])
    from pipeline.planning.run_costs import Assumptions
    from pipeline.planning.run_plan import plan_run

    assume = Assumptions(**assumed)
    plan = plan_run(run, gpus=ranks, assume=assume)
    if plan.data is None:
        click.echo(f"The data is assumed, not read: {plan.data_missing}\n")
    title = f"{run.objective.name} on {plan.architecture}: {plan.gpus} x {plan.local_batch} pairs"
    _print_memory(plan, title=title, capacity=gpu_gib)
    lines = describe_cost(plan, mfu=assume.mfu, peak_tflops=assume.peak_tflops)
    lines += describe_data(plan)
    lines.append(("loading", describe_loading(plan, images_per_core=images_per_core)))
    _print_lines([*lines, *(("note", note) for note in plan.notes)])
    if measure:
        import logging

        from pipeline.planning.measure import measure as measure_run

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        _print_lines(measure_run(run, ranks=ranks, gpus_per_node=gpus_per_node, seconds=seconds).items())


def describe_cost(plan: RunPlan, *, mfu: float, peak_tflops: float) -> list[tuple[str, str]]:
    """FLOPs and time as lines of (label, text)."""
    cost, towers = plan.cost, plan.towers
    gpu = f"{GPUS[peak_tflops]}, " if peak_tflops in GPUS else ""
    lines = {
        "model": f"{towers.parameters / 1e6:,.1f}M parameters, {towers.forward_flops / 1e9:,.2f} GFLOP forward a pair",
        "budget": (
            f"{_count(cost.steps, 'step')}, {cost.samples:,} pairs ({cost.epochs:.2f} times the data), "
            f"{cost.text_tokens:,.0f} text tokens"
        ),
        "time": (
            f"{_size(cost.flops, 'FLOP')}; at {100 * mfu:.3g}% utilization (--mfu) of {peak_tflops:g} TFLOP/s "
            f"({gpu}--peak-tflops) {_hours(cost.gpu_hours)} GPU hours, {_hours(cost.gpu_hours / plan.gpus)} h on "
            f"{_count(plan.gpus, 'GPU')}"
        ),
    }
    rows = list(lines.items())
    if len(plan.stages) > 1:
        rows += [("stage", f"{what} {part.flops / cost.flops:.0%} of the arithmetic") for what, part in plan.stages]
    return rows


def describe_loading(plan: RunPlan, *, images_per_core: float) -> str:
    """What the steps take from loader and storage, and whether the workers deliver it."""
    from pipeline.data.data_config import LEAST_LOADING

    rate, workers = plan.pairs_per_second, max(1, plan.workers)
    cores = rate / images_per_core
    if LEAST_LOADING * cores > MOST_CORES:
        loaded = workers * images_per_core * plan.gpus
        hours = plan.cost.epochs * plan.dataset_size / loaded / 3600
        return (
            f"sets the pace of so small a model: about {loaded:,.0f} pairs/s with {_count(workers, 'worker')} per GPU, "
            f"at {images_per_core:g} images/s a core (--images-per-core), {_hours(hours)} h for the run; "
            "`neuclip plan --measure` measures it"
        )
    text = (
        f"a GPU's steps take {rate:,.0f} pairs/s: {_size(rate * plan.sample_bytes)}/s from storage and {cores:,.1f} "
        f"cores for decoding, at {images_per_core:g} images/s a core (--images-per-core); "
        f"{_count(workers, 'worker')} per GPU, if there are as many cores, load {workers / cores:.1f} times as fast"
    )
    if workers < LEAST_LOADING * cores:
        text += f": TOO SLOW, use data.workers={math.ceil(LEAST_LOADING * cores)} or store smaller images"
    return text


def _print_memory(plan: RunPlan, *, title: str, capacity: float) -> None:
    """One row per ZeRO stage; values are GiB on one GPU, as is its `capacity`."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption=_memory_note(plan, capacity=capacity), caption_justify="left")
    names = ("weights", "gradients", "masters", "moments", "buffers", "activations", "objective", "GiB", "fits")
    table.add_column("ZeRO")
    for name in names:
        table.add_column(name, justify="right")
    for stage, part in plan.engine.items():
        total = plan.gpu_bytes(stage) / GIB
        columns = (part.weights, part.gradients, part.masters, part.moments, part.buffers, plan.activations[stage])
        name, fits = f"{stage} (recipe)" if stage == plan.stage else str(stage), total < 0.9 * capacity
        cells = [*(f"{value / GIB:.2f}" for value in columns), f"{plan.objective.replicated / GIB:.3f}"]
        table.add_row(name, *cells, f"{total:.2f}", "yes" if fits else "no")
    Console(soft_wrap=False, width=None if Console().is_terminal else 110).print(table)


def _memory_note(plan: RunPlan, *, capacity: float) -> str:
    note = (
        f"Estimates for one GPU. Activations: what autograd saves for {plan.micro_batch} pairs with fused attention. "
        f"Fits: below 90% of {capacity:g} GiB (--gpu-gib); the rest is for workspaces of kernels and fragmentation."
    )
    if plan.objective.per_sample:
        per_gpu = plan.objective.per_sample * plan.dataset_size / plan.gpus
        note += (
            f" Per-sample table: {plan.objective.per_sample:g} B a sample, {_size(per_gpu)} of host memory per rank."
        )
    return note


def _print_lines(lines: Iterable[tuple[str, str]]) -> None:
    for label, text in lines:
        click.echo(f"{label:<16} {text}")


def describe_data(plan: RunPlan) -> list[tuple[str, str]]:
    """The data as lines of (label, text)."""
    data = plan.data
    if data is None:
        size = f"{_count(plan.dataset_size, 'sample')} of about {_size(plan.sample_bytes)} assumed"
        return [("data", f"{size}; {_size(plan.cost.read_bytes)} to read in all")]
    unused = "every sample is in a batch"
    if data.layout.dropped:
        unused = f"{_count(data.layout.dropped, 'sample')} left over, which fill no batch"
    buffers = f"{_size(data.buffer_bytes)} of encoded samples (data.shuffle_buffer)"
    return [
        ("data", f"{_count(data.samples, 'sample')} in {_count(data.shards, 'shard')}, {_size(data.bytes)}"),
        ("epoch", f"{_count(data.layout.steps, 'step')} of {data.layout.global_batch:,}; {unused}"),
        ("host memory", f"{buffers} and {_size(data.batch_bytes)} of decoded batches per rank"),
    ]


def _size(count: float, unit: str = "B") -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if count < 1000:
            return f"{count:.3g} {prefix}{unit}"
        count /= 1000
    return f"{count:,.3g} E{unit}" if count < 1000 else f"{count:,.0f} E{unit}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.2g}" if hours >= 0.01 else "less than 0.01"


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="jobs.plan")
