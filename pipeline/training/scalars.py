"""The metrics of a step, read from the device in one go, and which rank the others wait for.

In synchronous training the slowest rank sets everybody's pace.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Mapping

import torch

from pipeline.data.loading.loader import Batch
from pipeline.distributed.timing import Meter
from pipeline.distributed.world import World
from pipeline.engine.lr_schedule import lr_scale
from pipeline.metrics.mfu import Utilization
from pipeline.training.run_state import RunState
from pipeline.training.step import StepResult


def scalars_of(
    state: RunState, batch: Batch, result: StepResult, *, meter: Meter, utilization: Utilization
) -> dict[str, float]:
    """The metrics of the step that a run has just taken and counted. Collective.

    Args:
        state: After the step.
        batch: This rank's.
        result: Of the step.
        meter: Read, which starts its next measurement.
        utilization: For the MFU.
    """
    run, position = state.run, batch.position
    metrics = dict(result.output.metrics)
    values = torch.stack([value.float() for value in metrics.values()]).tolist()
    norm = state.engine.gradient_norm()
    scale = lr_scale(run.schedule, step=state.step - 1, total_steps=run.total_steps)
    rates = meter.read()
    return {
        "samples": state.step * run.batch_size,
        "epoch": position.epoch + position.batch / state.loader.steps_per_epoch,
        "loss": float(result.output.loss),
        **dict(zip(metrics, values, strict=True)),
        "lr": run.optimizer.lr * scale,
        **state.objective.learning_rates(lr_scale=scale),
        **({} if norm is None else {"gradient_norm": norm}),
        **state.skipped.scalars(),
        **state.objective.counters(),
        "text_tokens": result.text_tokens,
        "corrupt_samples": state.loader.replaced(position),
        **rates,
        **slowest_rank(state.world, rates, batch_size=run.batch_size),
        **utilization.scalars(rates["samples_per_second"]),
    }


def slowest_rank(world: World, rates: Mapping[str, float], *, batch_size: int) -> dict[str, float]:
    """The slowest rank of the steps since the last record; empty for a single rank. Collective.

    All ranks take equally long for a step, because the fast ones wait for the slow ones in a collective. What differs
    is the time outside the objective's collectives, which are the first ones of a step: loading and the forward pass.

    Args:
        world: The ranks.
        rates: This rank's, from `Meter.read`.
        batch_size: Samples of a step over all ranks.

    Returns:
        `slowest_rank` (the lowest of equally slow ones), its `slowest_rank_ms` per step outside the objective's
        collectives, the same as `median_rank_ms` of the median rank (of two: the faster), and `slowest_rank_data_wait`
        as a share of its time.
    """
    if world.size == 1:
        return {}
    speed, waited = rates["samples_per_second"], rates.get("time_communication", 0.0)
    own_ms = 1e3 * batch_size / speed * max(0.0, 1.0 - waited) if speed else 0.0
    found = world.all_gather(torch.tensor([[own_ms, rates["data_wait"]]], device=world.device)).tolist()
    times = [own for own, _ in found]
    slowest = times.index(max(times))
    return {
        "slowest_rank": float(slowest),
        "slowest_rank_ms": times[slowest],
        "median_rank_ms": statistics.median_low(times),
        "slowest_rank_data_wait": found[slowest][1],
    }


def describe_hosts(world: World) -> str:
    """Which ranks run on which host; empty where all run on one. Collective."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(world.gather_objects(socket.gethostname())):
        ranks.setdefault(host, []).append(rank)
    if len(ranks) == 1:
        return ""
    return "Ranks by host: " + "; ".join(f"{host} {_spans(found)}" for host, found in ranks.items()) + "."


def _spans(numbers: list[int]) -> str:
    """Ascending numbers in short: 0-3, 6."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
