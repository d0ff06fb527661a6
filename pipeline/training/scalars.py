"""The metrics of a step, read from the device in one go."""

from __future__ import annotations

import torch

from pipeline.data.loading.loader import Batch
from pipeline.distributed.stragglers import slowest_rank
from pipeline.distributed.timing import Meter
from pipeline.engine.lr_schedule import lr_scale
from pipeline.metrics.mfu import Utilization
from pipeline.training.run_state import RunState
from pipeline.training.step import StepResult


def scalars_of(
    state: RunState, batch: Batch, result: StepResult, *, meter: Meter, utilization: Utilization
) -> dict[str, float]:
    """The metrics of the step that a run has just taken and counted. Collective."""
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
