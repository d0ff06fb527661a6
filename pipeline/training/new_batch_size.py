"""Resuming with another batch size: what a checkpoint means in steps of another size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.checkpoint.reader import Checkpoint
from pipeline.errors import UserError
from pipeline.training.recipe import RunConfig

PREVIOUS = "previous_batch_size"
"""Key of a checkpoint's meta that `in_new_steps` adds."""


def in_new_steps(checkpoint: Checkpoint, run: RunConfig, *, allowed: bool) -> Checkpoint:
    """The checkpoint with its step counted in this run's batches; unchanged if the batch size is the same.

    Args:
        checkpoint: The checkpoint to continue from.
        run: The configuration of the run that continues it.
        allowed: The option `--new-batch-size` is given.

    Raises:
        UserError: The batch size differs and the option is not given, or the run would continue in the same folder,
            whose checkpoints and metrics count other steps.
    """
    before = int(checkpoint.meta["config"]["batch_size"])
    if before == run.batch_size:
        return checkpoint
    if not allowed:
        raise UserError(
            f"The checkpoint was written with batch_size = {before}, and this run has {run.batch_size}. Continue with "
            "the former, or add --new-batch-size with a new output folder: steps are then counted in new batches, the "
            "schedule continues at the same share of `samples`, and the data after the samples already shown."
        )
    if checkpoint.path.resolve().is_relative_to(Path(run.output).resolve()):
        raise UserError(
            f"--new-batch-size counts steps anew, so that checkpoints and metrics in {run.output} would contradict "
            f"each other: choose another output, with --resume {checkpoint.path}."
        )
    step = max(1, round(checkpoint.step * before / run.batch_size))
    return replace(checkpoint, meta={**checkpoint.meta, "step": step, PREVIOUS: before})


def describe(checkpoint: Checkpoint, run: RunConfig, *, skipped: int) -> str:
    """What a changed batch size did, for the log; empty if it did not change.

    Args:
        checkpoint: From `in_new_steps`.
        run: The run that continues it.
        skipped: Samples that were skipped so that new batches begin at multiples of their size.
    """
    if PREVIOUS not in checkpoint.meta:
        return ""
    return (
        f"New batch size: {checkpoint.meta[PREVIOUS]} -> {run.batch_size}. Steps count new batches: "
        f"{checkpoint.path.name} is step {checkpoint.step} of {run.total_steps} now. Learning rate: the schedule "
        f"continues at that step; warm-up has {run.schedule.warmup_steps} steps of the new size, and the peak is "
        f"optimizer.lr = {run.optimizer.lr:g}. Data: the order of each stream is unchanged; {skipped:,} samples of "
        "this epoch are skipped, and none is repeated. Optimizer state is kept."
    )
