"""The last checkpoint of a run is written again until it is on disk: without it, the training would be lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pipeline.checkpoint.layout import fallback_run, name_of
from pipeline.checkpoint.writer import CheckpointWriter, Snapshot

PAUSE_SECONDS = 15.0


def save_again(
    snapshot: Callable[[], Snapshot],
    *,
    writer: CheckpointWriter,
    agreed: Callable[[Any], Any],
    minutes: float,
    report: Callable[[str], None],
    fallback: str | None,
) -> bool:
    """Try again to write a checkpoint that could not be written. Collective.

    Args:
        snapshot: Returns the state to write, each time anew.
        writer: The writer that failed.
        agreed: Returns rank 0's value on every rank.
        minutes: How long to try. There is one more attempt even if this is 0.
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
        if agreed(time.monotonic() >= deadline):
            break
        time.sleep(pause)
    if fallback:
        other = writer.at(fallback_run(fallback, writer.run))
        if not _problem(other, snapshot(), agreed):
            other.finish()
            report(
                f"The last checkpoint is in {other.folder}, not in the run's folder; --resume latest finds it there."
            )
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
