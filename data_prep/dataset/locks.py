"""Locks that keep two programs from working on the same part of a data set."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from data_prep.dataset.dataset_folder import Folder
from pipeline.errors import UserError


@contextmanager
def alone(folder: Folder, part: int | str, *, wait: bool = False) -> Iterator[None]:
    """Hold the folder's lock for one part of the work. Raises: UserError when another process has it."""
    with (folder.locks / f"lock-{part}").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            raise UserError(f"Another process is working in {folder.root}: wait for it, or stop it.") from error
        yield
