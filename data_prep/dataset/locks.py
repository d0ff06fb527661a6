"""Locks that keep programs from changing the same part of a data set at the same time.

Downloads share the folder's lock and that of their number of workers, and each hold one for their own part; removal and
rebuilding lock the folder exclusively.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from data_prep.dataset.dataset_folder import Folder
from pipeline.errors import UserError

_WHOLE = "folder"
_OF_WORKERS = "workers-"


@contextmanager
def part_lock(folder: Folder, part: int | str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of one part of the work.

    Raises:
        UserError: Another process holds the lock, and `wait` is not set.
    """
    with _locked(folder, part, fcntl.LOCK_EX, wait=wait):
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
    folder.locks.mkdir(parents=True, exist_ok=True)
    with _locked(folder, _WHOLE, fcntl.LOCK_EX, wait=False):
        yield


@contextmanager
def _locked(folder: Folder, part: int | str, how: int, *, wait: bool) -> Iterator[None]:
    with (folder.locks / f"lock-{part}").open("w") as lock:
        try:
            fcntl.flock(lock, how | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise UserError(f"Another process is working in {folder.root}: wait for it, or stop it.") from error
        yield
