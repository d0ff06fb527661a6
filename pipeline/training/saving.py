"""When a run saves a checkpoint, what it does when its last one cannot be written, and to which one it rolls back.

The rules of skipping and rolling back are in docs/cluster.md. Weights, moments, objective and step count are restored,
the position in the data is not, so that the number of updates stays as planned. The update that ruins the weights is
finite itself, and so may be the losses of the next few steps: a checkpoint therefore counts as good only when
FINITE_STEPS steps after it were applied.

The last checkpoint is written again until it is on disk: without it, the training since the one before is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.checkpoint.reader import Checkpoint, agreed_checkpoint
from pipeline.checkpoint.writer import CheckpointWriter
from pipeline.data.loading.loader import Batch
from pipeline.errors import UserError
from pipeline.evaluation.watcher import forget_after
from pipeline.metrics.logger import Telemetry
from pipeline.run_files import name_of
from pipeline.training.run_state import RunState
from pipeline.training.step import StepResult

PAUSE_SECONDS = 15.0
RETRY_MINUTES = 10.0
"""How long the last checkpoint is tried again if it cannot be written. Not after a signal, when the machine goes."""


@dataclass
class Saver:
    """Saves a run when a checkpoint is due. All methods are collective."""

    state: RunState
    writer: CheckpointWriter
    telemetry: Telemetry
    end: int
    """The step at which the stage ends."""
    step: int = 0
    """The step of the last checkpoint that was begun."""

    def __call__(self, batch: Batch, result: StepResult) -> None:
        """Save if that is due: at the end, after the best validation, and regularly unless steps are being skipped."""
        state = self.state
        regular = state.step % state.run.checkpoint.every == 0 and not state.skipped.in_a_row
        ends = result.stop or state.step == self.end or state.ended_early
        if regular or ends or state.validation.best_step == state.step:
            self.save()

    def save(self) -> None:
        """Start writing a checkpoint."""
        state, step = self.state, self.state.step
        state.mark("checkpoint")
        snapshot = state.snapshot()
        if ruined := state.world.gather_objects(snapshot.not_finite)[0]:
            message = f"{ruined} is not finite after step {step}: the run has diverged. No checkpoint is written."
            if step == self.end:
                raise UserError(f"{message} Resume from an earlier one or start again, with a smaller optimizer.lr.")
            self.telemetry.warning(message)
            return
        self.writer.save(snapshot)
        self.step = step

    def finish(self, *, stopped: Callable[[], bool], again: bool) -> bool:
        """Wait for the last checkpoint on every rank. Returns whether it is on disk.

        Args:
            stopped: Whether a signal has arrived; rank 0's ends the attempts.
            again: Try again if it could not be written.
        """
        self.state.mark("last checkpoint")
        self.writer.finish()
        deadline, over = time.monotonic() + 60 * RETRY_MINUTES, False
        while True:
            self.state.mark("last checkpoint")
            # Every rank waits here until rank 0 has written.
            problem, over = self.state.world.gather_objects((self.writer.problem, over))[0]
            if not (problem and again):
                return True
            if over:
                break
            self.writer.save(self.state.snapshot())
            self.writer.wait()
            over = stopped() or time.monotonic() >= deadline
            if self.writer.problem and not over:
                time.sleep(PAUSE_SECONDS)
        self.telemetry.event(
            f"The last checkpoint, {name_of(self.state.step)}, is NOT on disk ({problem}): the training since the one "
            "before is lost. Free some space, and continue with --resume latest."
        )
        return False

    def roll_back(self) -> Checkpoint:
        """A good checkpoint from before the skipped steps, whose data continues after them; later ones are removed.

        The run continues from it as a run that is resumed: its step may be one of an earlier stage. Call it after a
        step that was skipped.

        Raises:
            UserError: There is no checkpoint from before the skipped steps.
        """
        state, event = self.state, self.telemetry.event
        run, world, skipped, here = state.run, state.world, state.skipped, state.step
        count = skipped.in_a_row
        self.writer.wait()  # the checkpoint may be the one that is being written

        def newest(not_after: int) -> Checkpoint | None:
            with suppress(UserError):  # all of them are damaged
                return agreed_checkpoint(Path(run.output), "latest", world=world, on_event=event, not_after=not_after)
            return None

        checkpoint = skipped.choose(newest, step=here)
        if checkpoint is None:
            raise UserError(
                f"{count} steps in a row were skipped, and there is no checkpoint from before step {here - count}, the "
                "first of them, to roll back to. Start again with a smaller optimizer.lr."
            )
        skipped.roll_back(checkpoint.step)
        if world.is_main:
            self.writer.abandon_after(checkpoint.step)
            forget_after(Path(run.output), checkpoint.step)
        event(
            f"Rolled back to {checkpoint.path.name} after {count} skipped steps in a row; the data continues after "
            f"them (rollback {skipped.rollbacks} of {run.max_rollbacks}).",
            step=here,
            rollbacks=skipped.rollbacks,
            checkpoint=checkpoint.path.name,
        )
        now = {"data": state.loader.state_dict(state.position), "faults": asdict(skipped)}
        return replace(checkpoint, meta={**checkpoint.meta, **now})
