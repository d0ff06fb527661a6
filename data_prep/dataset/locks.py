"""Locks, which keep programs from changing the same part of a data set at once.

Downloads share the folder's lock if they divide the shards among the same number of workers, and each hold one for
their own part; `neuclip pairs`, removals and deletions lock the folder exclusively. A command that finds itself alone
finishes or deletes what killed ones have left.

The engine of a download, and the workers of both commands, outlive a killed one for a moment. They hold a lock of their
own, and the next command waits until it is free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from data_prep.dataset.commit import recover
from data_prep.dataset.dataset_folder import Folder
from pipeline.errors import UserError
from pipeline.files import file_lock, write_text

REPORT = "report"
"""The part of the work that writes the page."""
_WHOLE, _ENGINE = "folder", "engine-"
_PATIENCE = 15.0
"""Seconds to wait for the engine and workers of a killed command."""


@contextmanager
def part_lock(folder: Folder, part: int | str, *, shared: bool = False, seconds: float = math.inf) -> Iterator[None]:
    """Hold the lock of one part of the work, for which to wait so many seconds.

    Raises:
        UserError: Another process holds the lock.
    """
    with ExitStack() as held:
        try:
            held.enter_context(file_lock(folder.locks / f"lock-{part}", shared=shared, seconds=seconds))
        except BlockingIOError as error:
            raise UserError(f"Another process is working in {folder.root}: wait for it, or stop it.") from error
        yield


@contextmanager
def worker_lock(folder: Folder) -> Iterator[None]:
    """Hold the lock of one worker's part of a download, once an earlier engine of this worker has ended.

    Raises:
        UserError: Another process works on this part, or the engine does not end.
    """
    with part_lock(folder, folder.worker, seconds=0):
        _wait_for_engines(folder, folder.worker)
        yield


@contextmanager
def engine_lock(folder: Folder) -> Iterator[None]:
    """Held by the engine and by workers while they may write."""
    with part_lock(folder, f"{_ENGINE}{folder.worker}", shared=True):
        yield


@contextmanager
def shared_lock(folder: Folder, workers: int = 1) -> Iterator[None]:
    """Hold the folder's shared lock: no removal can start, but the other workers' downloads can.

    Raises:
        UserError: A removal is running, or a download that divides the shards among another number of
            workers, so that both would write some of them.
    """
    number = folder.locks / "workers"
    with ExitStack() as held:
        with part_lock(folder, "entry"):
            try:
                with exclusive_lock(folder):
                    write_text(number, str(workers))
            except UserError:
                if folder.pending_removal.exists():
                    raise
            held.enter_context(part_lock(folder, _WHOLE, shared=True, seconds=0))
            if number.read_text() != str(workers):
                raise UserError(
                    f"Another process is working in {folder.root} with another fetch.workers: give the same."
                )
        yield


@contextmanager
def exclusive_lock(folder: Folder, *, allow_outside: bool = False) -> Iterator[None]:
    """Hold the folder's exclusive lock, once what was interrupted in it is finished.

    Raises:
        UserError: A download or a removal is running, or `recover` refuses a link.
    """
    with part_lock(folder, _WHOLE, seconds=0):
        _wait_for_engines(folder, "*")
        with part_lock(folder, REPORT):  # written after the other locks are released
            recover(folder, allow_outside=allow_outside)
        yield


def _wait_for_engines(folder: Folder, worker: int | str) -> None:
    for path in folder.locks.glob(f"lock-{_ENGINE}{worker}"):
        with part_lock(folder, path.name.removeprefix("lock-"), seconds=_PATIENCE):
            pass
