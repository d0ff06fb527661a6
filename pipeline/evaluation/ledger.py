"""Which watcher evaluates which checkpoint: one folder per checkpoint, with a lock and a record of the last attempt.

    RUN/evaluation-ledger/SUITE/step-00000500/
        lock           held by the watcher that evaluates the checkpoint, until it ends, however it ends
        attempt.json   done, failed or started: who, where, since when, at which weights, how many attempts

The locks are the file system's (`flock`), so that no clocks are compared: the kernel, or the server of a network file
system, releases those of a process that was killed. On a file system without them two watchers may evaluate the same
checkpoint. They write the same results, byte for byte.

The ledger is for scheduling only; the results themselves are authoritative. A checkpoint that is done but has no
results is evaluated again.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.files import NO_LOCKS, file_lock, lock_holder, read_tree, write_json
from pipeline.run_files import PREFIX, is_name, step_of

LEDGER_FOLDER = "evaluation-ledger"
LOCK_NAME, ATTEMPT_NAME = "lock", "attempt.json"
STARTED, DONE, FAILED, RELEASED = "started", "done", "failed", "released"
ATTEMPTS = 3
"""After so many that failed or killed their watcher, a checkpoint is abandoned: it cannot kill watchers forever."""


@dataclass(frozen=True)
class Lease:
    """One attempt at one checkpoint, held by this process."""

    folder: Path
    attempt: dict[str, Any]
    held: ExitStack

    def end(self, how: str, **facts: Any) -> None:
        """Record how the attempt ended, and release the lock; one that was `RELEASED` does not count."""
        attempts = self.attempt["attempts"] - (how == RELEASED)
        with self.held:
            write_json(self.folder / ATTEMPT_NAME, {**self.attempt, "attempts": attempts, "how": how, **facts})


class Ledger:
    """The attempts below `folder`, of one run and one suite."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def outcome(self, name: str) -> dict[str, Any]:
        """The record of the last attempt at a checkpoint; empty if there was none."""
        return read_tree(self.folder / name / ATTEMPT_NAME)

    def attempts(self, name: str, *, weights: str) -> int:
        """How many attempts at these weights failed or did not end."""
        last = self.outcome(name)
        count = last.get("attempts")
        return count if isinstance(count, int) and last.get("weights") == weights and last.get("how") != DONE else 0

    def is_abandoned(self, name: str, *, weights: str) -> bool:
        """Whether `ATTEMPTS` at these weights are over and none gave a result."""
        return self.attempts(name, weights=weights) >= ATTEMPTS and not lock_holder(self.folder / name / LOCK_NAME)

    def claim(self, name: str, *, weights: str, again: bool = False) -> Lease | None:
        """A lease on a checkpoint; None when another watcher has it, or it is abandoned, or done and not `again`.

        Args:
            name: The checkpoint.
            weights: What tells it from another checkpoint of the same name; attempts at others are not counted.
            again: Also if it is done.
        """
        folder = self.folder / name
        with ExitStack() as held:
            try:
                held.enter_context(file_lock(folder / LOCK_NAME, seconds=0))
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            attempts = self.attempts(name, weights=weights)
            if attempts >= ATTEMPTS or (self.outcome(name).get("how") == DONE and not again):
                return None
            attempt = {
                "how": STARTED,
                "attempts": attempts + 1,
                "weights": weights,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
            write_json(folder / ATTEMPT_NAME, attempt, durable=True)
            return Lease(folder, attempt, held.pop_all())


def forget_after(run: Path, last: int) -> None:
    """Remove scores and outcomes of steps after `last`: the run was rolled back, and their names will be reused."""
    for folder in ("evaluation", f"{LEDGER_FOLDER}/*"):
        for path in run.glob(f"{folder}/{PREFIX}*"):
            if is_name(path.name) and path.is_dir() and step_of(path) > last:
                shutil.rmtree(path, ignore_errors=True)
