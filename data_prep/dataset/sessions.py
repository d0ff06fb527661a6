"""Who works on a data set: locks, which keep programs from changing the same part of it at once, and the journal.

Downloads share the folder's lock and that of their number of workers, and each hold one for their own part; removals
and deletions lock it exclusively. A command that finds itself alone removes temporary files that killed ones left.

The engine of a download, and its workers, outlive a killed supervisor for a moment. They hold a lock of their own, and
the next command waits until it is free.

`sessions.jsonl` says when and where each run of a download took place, including killed ones.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.swap import leftovers
from data_prep.settings.download_config import FetchConfig
from pipeline.errors import UserError
from pipeline.files import file_lock, read_tree, write_json

_WHOLE = "folder"
_OF_WORKERS = "workers-"
_ENGINE = "engine-"
_PATIENCE = 15.0
"""Seconds to wait for the engine of a killed download."""
REPORT = "report"
"""The part of the work that writes the report and the datasheet."""


@contextmanager
def part_lock(folder: Folder, part: int | str, *, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """Hold the lock of one part of the work.

    Raises:
        UserError: Another process holds the lock, and `wait` is not set.
    """
    with ExitStack() as held:
        try:
            held.enter_context(file_lock(folder.locks / f"lock-{part}", shared=shared, seconds=math.inf if wait else 0))
        except BlockingIOError as error:
            raise UserError(f"Another process is working in {folder.root}: wait for it, or stop it.") from error
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
    with part_lock(folder, f"{_ENGINE}{folder.worker}", shared=True, wait=True):
        yield


@contextmanager
def shared_lock(folder: Folder, workers: int = 1) -> Iterator[None]:
    """Hold the folder's shared lock: no removal can start, but the other workers' downloads can.

    Raises:
        UserError: A removal is running, or a download that divides the shards among another number of
            workers, so that both would write some of them.
    """
    own = f"{_OF_WORKERS}{workers}"
    with ExitStack() as held:
        # One at a time: two workers that try another number's lock at once would keep it from each other.
        with part_lock(folder, "entry", wait=True):
            with suppress(UserError), exclusive_lock(folder):
                pass  # alone, so that leftovers are removed
            held.enter_context(part_lock(folder, _WHOLE, shared=True))
            held.enter_context(part_lock(folder, own, shared=True))
            for path in folder.locks.glob(f"lock-{_OF_WORKERS}*"):
                part = path.name.removeprefix("lock-")
                if part != own:
                    with part_lock(folder, part):
                        pass
        yield


@contextmanager
def exclusive_lock(folder: Folder) -> Iterator[None]:
    """Hold the folder's exclusive lock.

    Raises:
        UserError: A download or a removal is running.
    """
    with part_lock(folder, _WHOLE):
        _await_engines(folder, "*")
        with part_lock(folder, REPORT, wait=True):  # written after the other locks are released
            if not folder.pending_removal.exists():  # else some of them are its new files
                for path in (*leftovers(folder.root), *leftovers(folder.plan)):
                    path.unlink(missing_ok=True)
        yield


def _await_engines(folder: Folder, worker: int | str) -> None:
    ends = time.monotonic() + _PATIENCE
    for path in folder.locks.glob(f"lock-{_ENGINE}{worker}"):
        while True:
            try:
                with part_lock(folder, path.name.removeprefix("lock-")):
                    break
            except UserError:
                if time.monotonic() > ends:
                    raise
            time.sleep(0.05)


_BEAT_SECONDS = 5.0
KILLED = "killed"
_KEYS = {"started", "seconds", "host", "worker", "distributor", "outcome"}


class Journal:
    """One session, as a context manager: its line is written when it ends.

    Until then its state is in the worker's staging folder; the next session writes the line of a killed one. The caller
    must hold the worker's lock. A disk too full for the journal does not stop the download.
    """

    def __init__(self, folder: Folder, fetch: FetchConfig) -> None:
        self._folder = folder
        self._state = folder.staging / "session.json"
        self._clock = self._last_beat = time.monotonic()
        self._line: dict[str, Any] = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "host": socket.gethostname(),
            "worker": fetch.worker,
            "distributor": fetch.distributor,
            "outcome": KILLED,
        }

    def beat(self) -> None:
        """Record the duration of the session; cheap enough to be called often."""
        if time.monotonic() - self._last_beat >= _BEAT_SECONDS:
            self._write_state()

    def __enter__(self) -> Journal:
        if self._state.exists():
            state = read_tree(self._state)
            damaged = {**self._line, "outcome": f"{KILLED}; its note was damaged"}
            self._append(state if state.keys() >= _KEYS else damaged)
        self._write_state()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            outcome = "finished"
        else:
            outcome = str(error) if isinstance(error, UserError) else f"{type(error).__name__} {error}".strip()
        with suppress(OSError):  # the state is kept, and the next session writes its line
            self._append({**self._line, "seconds": self._seconds(), "outcome": outcome})
            self._state.unlink(missing_ok=True)

    def _seconds(self) -> float:
        return round(time.monotonic() - self._clock, 1)

    def _write_state(self) -> None:
        self._last_beat = time.monotonic()
        with suppress(OSError):
            write_json(self._state, {**self._line, "seconds": self._seconds()})

    def _append(self, line: dict[str, Any]) -> None:
        """Append a line; a truncated line before it (after a kill or a full disk) is terminated first."""
        with self._folder.sessions.open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
            is_cut = bool(end) and file.read(1) != b"\n"
            file.write((b"\n" if is_cut else b"") + json.dumps(line).encode() + b"\n")


def read_sessions(folder: Folder) -> tuple[list[dict[str, Any]], int]:
    """The sessions in order, and the number of damaged lines."""
    sessions, damaged = [], 0
    lines = folder.sessions.read_bytes().splitlines() if folder.sessions.exists() else []
    for line in filter(None, lines):
        try:
            session = json.loads(line)
            if not set(session) >= _KEYS:
                raise ValueError("it lacks a field")
            sessions.append(session)
        except (ValueError, TypeError):
            damaged += 1
    return sessions, damaged
