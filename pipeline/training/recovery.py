"""What a run does when steps are skipped, and when its last checkpoint cannot be written.

A step whose loss or gradient is not finite is skipped: it changes nothing. After more than `max_skipped_steps` in a row
the run stops or, if `max_rollbacks` allows it, rolls back: weights, moments, objective and step count are restored from
a checkpoint from before these steps, while the data continues after the last of them. The batches since that
checkpoint, good and bad, are not seen again in this epoch, and the number of updates stays as planned. Later
checkpoints and metrics are removed. A run that is killed before its next checkpoint does all of this again.

The update that ruins the weights is finite itself, and so may be the losses of the next few steps. A checkpoint
therefore counts as good only when FINITE_STEPS steps after it were applied. The newest good one is never pruned, and a
roll-back that would return to the same checkpoint as the one before takes the one before it.

The last checkpoint is written again until it is on disk: without it, the training since the one before is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.checkpoint.layout import fallback_run, fallback_runs, name_of
from pipeline.checkpoint.reader import Checkpoint, agreed_checkpoint
from pipeline.checkpoint.writer import CheckpointWriter, Snapshot
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.run_files import write_run_id
from pipeline.training.recipe import RunConfig

FINITE_STEPS = 3
"""Applied steps after a checkpoint that show that its weights were not ruined already."""
T = TypeVar("T")


@dataclass
class SkippedSteps:
    """Counts of a run, which survive resuming."""

    skipped: int = 0
    rollbacks: int = 0
    in_a_row: int = 0
    """Skipped steps since the last applied one."""
    rolled_back_to: int | None = None
    """The step of the checkpoint to which the last roll-back returned."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped, self.rollbacks, self.in_a_row = (int(state[k]) for k in ("skipped", "rollbacks", "in_a_row"))
        self.rolled_back_to = state.get("rolled_back_to")

    def note(self, *, applied: bool) -> None:
        """Count one more step."""
        self.skipped += not applied
        self.in_a_row = 0 if applied else self.in_a_row + 1

    def last_good(self, step: int) -> int:
        """After `step` steps, checkpoints of this step and of earlier ones are good."""
        return step - self.in_a_row - FINITE_STEPS

    def choose(self, newest: Callable[[int], T | None], *, step: int, step_of: Callable[[T], int]) -> T | None:
        """The checkpoint to roll back to; None if there is none from before the skipped steps.

        Args:
            newest: Returns the newest checkpoint up to a step.
            step: Steps taken, the skipped ones included.
            step_of: Returns a checkpoint's step.
        """
        found = newest(self.last_good(step)) or newest(step - self.in_a_row)
        if found is not None and step_of(found) == self.rolled_back_to:
            return newest(step_of(found) - 1) or found
        return found

    def roll_back(self, to: int) -> None:
        """Count a roll-back to the checkpoint of this step."""
        self.in_a_row, self.rollbacks, self.rolled_back_to = 0, self.rollbacks + 1, to

    def scalars(self) -> dict[str, float]:
        return {"skipped_steps": self.skipped, "rollbacks": self.rollbacks}

    def check(self, run: RunConfig, *, step: int) -> bool:
        """Whether to roll back now, after step number `step` (from 0).

        Raises:
            UserError: Too many steps were skipped, and no further rollback is allowed.
        """
        if self.in_a_row <= run.max_skipped_steps:
            return False
        if self.rollbacks < run.max_rollbacks:
            return True
        advice = (
            f"The run has already rolled back {self.rollbacks} times, as often as max_rollbacks allows."
            if self.rollbacks
            else "With max_rollbacks=1 the run would return to the checkpoint before them and skip their data."
        )
        raise UserError(
            f"{self.in_a_row} steps in a row were skipped, up to step {step} (max_skipped_steps = "
            f"{run.max_skipped_steps}): the run has diverged. Their sample ids are in metrics.jsonl. {advice} Resume "
            "from an earlier checkpoint with a smaller optimizer.lr."
        )


PAUSE_SECONDS = 15.0


def checkpoint_before(
    skipped: SkippedSteps, folder: Path, *, world: World, step: int, on_event: Callable[[str], None]
) -> Checkpoint:
    """The checkpoint to which a run rolls back. Collective.

    Args:
        skipped: The run's counts.
        folder: The run's folder.
        world: The ranks.
        step: Steps taken, the skipped ones included.
        on_event: Called with messages, on rank 0.

    Raises:
        UserError: There is no checkpoint from before the skipped steps.
    """

    def newest(not_after: int) -> Checkpoint | None:
        with suppress(UserError):  # all of them are damaged
            return agreed_checkpoint(folder, "latest", world=world, on_event=on_event, not_after=not_after)
        return None

    found = skipped.choose(newest, step=step, step_of=lambda checkpoint: checkpoint.step)
    if found is None:
        count = skipped.in_a_row
        raise UserError(
            f"{count} steps in a row were skipped, and there is no checkpoint from before step {step - count}, the "
            "first of them, to roll back to. Start again with a smaller optimizer.lr."
        )
    return found


def save_again(
    snapshot: Callable[[], Snapshot],
    *,
    writer: CheckpointWriter,
    agreed: Callable[[Any], Any],
    minutes: float,
    stopped: Callable[[], bool] = lambda: False,
    report: Callable[[str], None],
    fallback: str | None,
) -> bool:
    """Try again to write a checkpoint that could not be written. Collective.

    Args:
        snapshot: Returns the state to write, each time anew.
        writer: The writer that failed.
        agreed: Returns rank 0's value on every rank.
        minutes: How long to try. There is one more attempt even if this is 0.
        stopped: Whether a signal has arrived meanwhile; rank 0's ends the attempts.
        report: Called with messages, on rank 0.
        fallback: The setting `checkpoint.fallback`, tried last.

    Returns:
        Whether the checkpoint is on disk.
    """
    deadline = time.monotonic() + 60 * minutes
    pause = min(PAUSE_SECONDS, 60 * minutes / 10)
    while True:
        state = snapshot()
        if not _problem(writer, state, agreed):
            return True
        if agreed(stopped() or time.monotonic() >= deadline):
            break
        time.sleep(pause)
    if fallback:
        other = writer.at(fallback_run(fallback, writer.run, agreed(writer.run_id)))
        if not _problem(other, snapshot(), agreed):
            other.finish()
            with suppress(OSError):
                if writer.run_id:  # rank 0; without the file, --resume latest would not know that folder
                    write_run_id(writer.run, writer.run_id)
            if other.run in fallback_runs(fallback, writer.run):
                how = "--resume latest finds it there"
            else:
                how = f"continue with --resume {other.folder / name_of(state.step)}"
            report(f"The last checkpoint is in {other.folder}, not in the run's folder; {how}.")
            return True
    report(
        f"The last checkpoint, {name_of(state.step)}, is NOT on disk ({writer.problem}): the training since the one "
        "before is lost. Free some space, and continue with --resume latest; checkpoint.fallback names a folder to "
        "write to instead."
    )
    return False


def _problem(writer: CheckpointWriter, snapshot: Snapshot, agreed: Callable[[Any], Any]) -> str:
    """Write a snapshot and wait for it. Returns the reason for a failure, or an empty string."""
    writer.save(snapshot)
    writer.wait()
    return str(agreed(writer.problem))
