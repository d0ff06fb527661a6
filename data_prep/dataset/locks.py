"""Locks that keep programs from changing the same part of a data set at the same time.

Downloads share the folder's lock and that of their number of workers, and each hold one for their own part; removal and
rebuilding lock the folder exclusively. A command that finds itself alone removes temporary files that killed ones left.

The engine of a download, and its workers, outlive a killed supervisor for a moment. They hold a lock of their own, and
the next command waits until it is free.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from data_prep.dataset.dataset_folder import Folder
from pipeline.errors import UserError

_WHOLE = "folder"
_OF_WORKERS = "workers-"
_ENGINE = "engine-"
_PATIENCE = 15.0
"""Seconds to wait for the engine of a killed download."""
REPORT = "report"
"""The part of the work that writes the report and the datasheet."""


@contextmanager
def part_lock(folder: Folder, part: int | str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of one part of the work.

    Raises:
        UserError: Another process holds the lock, and `wait` is not set.
    """
    with _locked(folder, part, fcntl.LOCK_EX, wait=wait):
        yield


@contextmanager
def worker_lock(folder: Folder) -> Iterator[None]:
    """Hold the lock of one worker's part of a download, once an earlier engine of this worker has ended.

    Raises:
        UserError: Another process works on this part, or the engine does not end.
    """
    with part_lock(folder, folder.worker):
        _await_engines(folder, folder.worker)
        yield


@contextmanager
def engine_lock(folder: Folder) -> Iterator[None]:
    """Held by the engine and its workers while they may write."""
    with _locked(folder, f"{_ENGINE}{folder.worker}", fcntl.LOCK_SH, wait=True):
        yield


@contextmanager
def shared_lock(folder: Folder, workers: int = 1) -> Iterator[None]:
    """Hold the folder's shared lock: no removal or rebuild can start, but the other workers' downloads can.

    Raises:
        UserError: A removal or a rebuild is running, or a download that divides the shards among another number of
            workers, so that both would write some of them.
    """
    own = f"{_OF_WORKERS}{workers}"
    with ExitStack() as held:
        # One at a time: two workers that try another number's lock at once would keep it from each other.
        with part_lock(folder, "entry", wait=True):
            with suppress(UserError), exclusive_lock(folder):
                pass  # alone, so that leftovers are removed
            held.enter_context(_locked(folder, _WHOLE, fcntl.LOCK_SH, wait=False))
            held.enter_context(_locked(folder, own, fcntl.LOCK_SH, wait=False))
            for path in folder.locks.glob(f"lock-{_OF_WORKERS}*"):
                part = path.name.removeprefix("lock-")
                if part != own:
                    with _locked(folder, part, fcntl.LOCK_EX, wait=False):
                        pass
        yield


@contextmanager
def exclusive_lock(folder: Folder) -> Iterator[None]:
    """Hold the folder's exclusive lock.

    Raises:
        UserError: A download, a removal or a rebuild is running.
    """
    with _locked(folder, _WHOLE, fcntl.LOCK_EX, wait=False):
        _await_engines(folder, "*")
        with part_lock(folder, REPORT, wait=True):  # written after the other locks are released
            for pattern in (".*.tmp", "plan/.*.tmp"):
                for path in folder.root.glob(pattern):
                    path.unlink(missing_ok=True)
        yield


def _await_engines(folder: Folder, worker: int | str) -> None:
    ends = time.monotonic() + _PATIENCE
    for path in folder.locks.glob(f"lock-{_ENGINE}{worker}"):
        while True:
            try:
                with _locked(folder, path.name.removeprefix("lock-"), fcntl.LOCK_EX, wait=False):
                    break
            except UserError:
                if time.monotonic() > ends:
                    raise
            time.sleep(0.05)


@contextmanager
def _locked(folder: Folder, part: int | str, how: int, *, wait: bool) -> Iterator[None]:
    folder.locks.mkdir(parents=True, exist_ok=True)
    with (folder.locks / f"lock-{part}").open("w") as lock:
        try:
            fcntl.flock(lock, how | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise UserError(f"Another process is working in {folder.root}: wait for it, or stop it.") from error
        yield
