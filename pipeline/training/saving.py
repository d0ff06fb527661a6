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
from typing import Any

from pipeline.checkpoint.layout import fallback_run, fallback_runs
from pipeline.checkpoint.reader import Checkpoint, agreed_checkpoint
from pipeline.checkpoint.writer import CheckpointWriter
from pipeline.data.loading.loader import Batch
from pipeline.errors import UserError
from pipeline.evaluation.ledger import forget_after
from pipeline.metrics.logger import Telemetry
from pipeline.run_files import name_of, write_run_id
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
        self._mark("checkpoint")
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
        self._mark("last checkpoint")
        self.writer.finish()
        # Every rank waits here until rank 0 has written.
        return not self._agreed(self.writer.problem) or not again or self.save_again(stopped)

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

    def save_again(self, stopped: Callable[[], bool]) -> bool:
        """Try to write the last checkpoint for some minutes, and then to `checkpoint.fallback`."""
        writer, fallback = self.writer, self.state.run.checkpoint.fallback
        deadline = time.monotonic() + 60 * RETRY_MINUTES
        while self._problem(writer):
            if self._agreed(stopped() or time.monotonic() >= deadline):
                break
            time.sleep(PAUSE_SECONDS)
        else:
            return True
        if fallback:
            other = writer.at(fallback_run(fallback, writer.run, self._agreed(writer.run_id)))
            if not self._problem(other):
                other.finish()
                with suppress(OSError):
                    if writer.run_id:  # rank 0; without the file, --resume latest would not know that folder
                        write_run_id(writer.run, writer.run_id)
                if other.run in fallback_runs(fallback, writer.run):
                    how = "--resume latest finds it there"
                else:
                    how = f"continue with --resume {other.folder / name_of(self.state.step)}"
                self.telemetry.event(f"The last checkpoint is in {other.folder}, not in the run's folder; {how}.")
                return True
        self.telemetry.event(
            f"The last checkpoint, {name_of(self.state.step)}, is NOT on disk ({writer.problem}): the training since "
            "the one before is lost. Free some space, and continue with --resume latest; checkpoint.fallback names a "
            "folder to write to instead."
        )
        return False

    def _problem(self, writer: CheckpointWriter) -> str:
        """Write the state and wait for it. Returns the reason for a failure, or an empty string."""
        writer.save(self.state.snapshot())
        writer.wait()
        return str(self._agreed(writer.problem))

    def _agreed(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        self._mark("last checkpoint")
        return self.state.world.gather_objects(value)[0]

    def _mark(self, phase: str) -> None:
        if self.state.world.phases is not None:
            self.state.world.phases.mark(phase)
