"""What a run says before its first step: model, data, budget, device, learning rate, and where results go."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

import torch

from pipeline.cores import usable_cores
from pipeline.engine.engine_protocol import ENGINES
from pipeline.planning.run_plan import UNKNOWN_DATA, measured_towers, stage_costs
from pipeline.training.recipe import RunConfig

CORE_GFLOPS = 50.0
"""What a CPU core reaches in fp32, roughly."""
LONG_STEP = 60.0
"""Seconds of a step from which on a CPU is hardly what was meant."""


def start_lines(run: RunConfig, *, pairs: int | None, ranks: int, scaled: Mapping[str, str]) -> list[str]:
    """The lines of the block, and a warning where the device cannot be meant.

    Args:
        run: The configuration.
        pairs: In the data; None: it is not there yet.
        ranks: Of the run.
        scaled: The rates that `reference_batch` has changed, as `scale_rates` gives them.

    Raises:
        UserError: There is no such architecture.
    """
    towers, architecture, _ = measured_towers(run.model)
    facts = ENGINES[run.engine.name].facts(
        run.engine, optimizer=run.optimizer, global_batch=run.batch_size, world_size=ranks
    )
    on_cpu = run.engine.device == "cpu" or not torch.cuda.is_available()
    device = "CPU" if on_cpu else torch.cuda.get_device_name()
    trained = towers.trained_parameters
    some = f", {trained / 1e6:,.1f}M of them trained" if trained < towers.parameters else ""
    was = f" = {scaled['optimizer.lr']}" if "optimizer.lr" in scaled else ""
    steps, output = run.total_steps, shlex.quote(run.output)
    board = f", or tensorboard --logdir {output}" if run.telemetry.tensorboard else ""
    lines = {
        "model": f"{architecture.name}, {towers.parameters / 1e6:,.1f}M parameters{some}; method {run.objective.name}",
        "data": f"{pairs:,} pairs" if pairs else "not there yet",
        "budget": (
            f"{_count(steps, 'step')} of batch_size={run.batch_size}"
            + (f" ({steps * run.batch_size / pairs:,.2f} times the data)" if pairs else "")
        ),
        "device": f"{device}, {_count(ranks, 'rank')}, {'bf16' if facts.bf16 else 'fp32'}",
        "learning rate": f"{run.optimizer.lr:g}{was}",
        "output": f"{run.output}; to look at it: neuclip report {output}{board}",
    }
    rows = [f"{label:<14} {text}" for label, text in lines.items()]
    if on_cpu:
        costs = stage_costs(run, dataset_size=pairs or run.samples, accumulation=False, assume=UNKNOWN_DATA)
        rows += _unlikely(step=sum(cost.flops for _, cost in costs) / steps, ranks=ranks)
    return rows


def _unlikely(*, step: float, ranks: int) -> list[str]:
    """Warnings about a run on a CPU; `step` in FLOP."""
    cores, here = usable_cores(), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    warnings = []
    if (seconds := step * here / ranks / (1e9 * CORE_GFLOPS * cores)) > LONG_STEP:
        warnings.append(
            f"WARNING: torch uses no GPU here: a step is {step / 1e12:,.1f} TFLOP, which takes {_count(cores, 'core')} "
            f"about {seconds / 60:,.0f} min. `neuclip doctor` says why a GPU is not seen."
        )
    if here > cores:
        warnings.append(
            f"WARNING: {here} ranks share {_count(cores, 'core')}, without a GPU: they only wait for each other. "
            f"Use --ranks {cores} at most."
        )
    return warnings


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
