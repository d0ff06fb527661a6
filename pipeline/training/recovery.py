"""What a run does when steps are skipped, and when its last checkpoint cannot be written.

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
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.checkpoint.layout import fallback_run, fallback_runs
from pipeline.checkpoint.reader import Checkpoint, agreed_checkpoint
from pipeline.checkpoint.writer import CheckpointWriter, Snapshot
from pipeline.errors import UserError
from pipeline.evaluation.watch.ledger import forget_after
from pipeline.run_files import name_of, write_run_id
from pipeline.training.run_state import RunState

PAUSE_SECONDS = 15.0


def roll_back(state: RunState, *, writer: CheckpointWriter, report: Callable[..., None]) -> Checkpoint:
    """A good checkpoint from before the skipped steps, whose data continues after them; later ones are removed.

    The run continues from it as a run that is resumed: its step may be one of an earlier stage. Collective.

    Args:
        state: After a step that was skipped; the skipped steps are those before `state.step + 1`.
        writer: Of the run's checkpoints.
        report: Called with messages and facts, on rank 0.

    Raises:
        UserError: There is no checkpoint from before the skipped steps.
    """
    run, world, skipped, here = state.run, state.world, state.skipped, state.step + 1
    count = skipped.in_a_row
    writer.wait()  # the checkpoint may be the one that is being written

    def newest(not_after: int) -> Checkpoint | None:
        with suppress(UserError):  # all of them are damaged
            return agreed_checkpoint(Path(run.output), "latest", world=world, on_event=report, not_after=not_after)
        return None

    found = skipped.choose(newest, step=here)
    if found is None:
        raise UserError(
            f"{count} steps in a row were skipped, and there is no checkpoint from before step {here - count}, the "
            "first of them, to roll back to. Start again with a smaller optimizer.lr."
        )
    skipped.roll_back(found.step)
    if world.is_main:
        writer.abandon_after(found.step)
        forget_after(Path(run.output), found.step)
    report(
        f"Rolled back to {found.path.name} after {count} skipped steps in a row; the data continues after "
        f"them (rollback {skipped.rollbacks} of {run.max_rollbacks}).",
        step=here,
        rollbacks=skipped.rollbacks,
        checkpoint=found.path.name,
    )
    now = {"data": state.loader.state_dict(state.position), "faults": skipped.state_dict()}
    return replace(found, meta={**found.meta, **now})


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
