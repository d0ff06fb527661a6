"""Whether a run can continue from a checkpoint, and what has changed since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.checkpoint.reader import Checkpoint
from pipeline.config import Tree, departed, flatten, had_effect
from pipeline.data.loading.position import differences
from pipeline.errors import UserError
from pipeline.training.recipe import RunConfig

PREVIOUS = "previous_batch_size"
"""Key of a checkpoint's meta that `run_start.in_new_steps` adds."""


def check_continuation(checkpoint: Checkpoint, run: RunConfig) -> None:
    """Check that a run's budget, objective and optimizer can continue a checkpoint.

    Raises:
        UserError: The checkpoint has trained more steps, or its state is another objective's or optimizer's.
    """
    name, steps = checkpoint.path.name, run.total_steps
    if checkpoint.step > steps:
        raise UserError(
            f"samples = {run.samples} is {steps} step{'s' * (steps != 1)} of batch_size = {run.batch_size}, but {name} "
            f"has trained {checkpoint.step} ({checkpoint.meta['samples']:,} samples). Give more samples, or another "
            "output with --resume and the folder of an earlier checkpoint."
        )
    settings = flatten(checkpoint.meta["config"])
    for key, now in (("objective.name", run.objective.name), ("optimizer.name", run.optimizer.name)):
        if (before := settings.get(key, now)) != now:
            raise UserError(
                f"{name} was written with {key} = {before!r}, and this run has {now!r}, which cannot continue with its "
                f"state. {_with_weights_of(checkpoint)}"
            )


def check_features(checkpoint: Checkpoint, features: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that a run goes on with the stored features with which it began; `features` as `RunState.features`.

    Raises:
        UserError: A setting names features of another model.
    """
    for setting, now in features.items():
        before = checkpoint.meta.get("features", {}).get(setting, now)
        if changed := differences(before, now):
            raise UserError(
                f"The run of {checkpoint.path.name} has used other features than {setting} names: "
                f"{'; '.join(changed)}. {_with_weights_of(checkpoint)}"
            )


def _with_weights_of(checkpoint: Checkpoint) -> str:
    """What to do where a run cannot continue from a checkpoint."""
    return (
        "Use the former, or begin a new run with the weights: another output, and "
        f"model.arch=pretrained model.pretrained={checkpoint.path} instead of --resume."
    )


def describe(checkpoint: Checkpoint, run: RunConfig, *, skipped: int) -> str:
    """What a changed batch size did, for the log; empty if it did not change.

    `skipped` samples were left out so that new batches begin at multiples of their size.
    """
    if PREVIOUS not in checkpoint.meta:
        return ""
    return (
        f"New batch size: {checkpoint.batch_size} -> {run.batch_size}. Steps count new batches: "
        f"{checkpoint.path.name} is step {checkpoint.step} of {run.total_steps} now. Learning rate: the schedule "
        f"continues at that step; warm-up has {run.schedule.warmup_steps} steps of the new size, and the peak is "
        f"optimizer.lr = {run.optimizer.lr:g}. Data: the order of each stream is unchanged; {skipped:,} samples of "
        "this epoch are skipped, and none is repeated. Optimizer state is kept."
    )


def changed_settings(before: Tree, now: Tree) -> list[str]:
    """The settings that differ, without `output`: first those that both have.

    One that only one of both has differs, too: the default of a new setting may compute in another way than the version
    that did not have it. Not so one that has left and was at the value that is built in now.
    """
    old, new = flatten(before), flatten(now)
    old = {key: value for key, value in old.items() if departed(key) is None or had_effect(key, value)}
    return [
        f"{key} {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
        for key in sorted(old.keys() | new.keys(), key=lambda key: (key not in old or key not in new, key))
        if old.get(key, "absent") != new.get(key, "absent") and key != "output"
    ]
