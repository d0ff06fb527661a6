"""How each rank of a run ended: RUN/heartbeats/exit-R.json, from which `neuclip doctor RUN` says what happened.

A rank that was killed from outside writes no such file, which is how its end is recognized.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER_NAME = "heartbeats"
RESERVED = 4096
"""Bytes on the disk that a record is written into: a full disk may be what ends the run."""


@dataclass(frozen=True)
class ExitRecord:
    """The end of one rank."""

    rank: int
    host: str
    pid: int
    time: float
    """Seconds since the epoch."""
    code: int
    """The exit code, as in docs/cluster.md."""
    reason: str
    """The error message; empty if there was none."""


class _Recording:
    """Where this process records its end; None while it is not a rank that holds a run's folder."""

    run: Path | None = None
    rank = 0


def start_recording(run: Path, *, rank: int) -> None:
    """From now on `record_exit` writes into this run's folder. Old records of this rank are removed."""
    _Recording.run, _Recording.rank = run, rank
    with suppress(OSError):
        _path(run, rank).unlink(missing_ok=True)


def reserve_space() -> None:
    """Take the space of this rank's record now."""
    if _Recording.run is not None:
        with suppress(OSError):
            _path(_Recording.run, _Recording.rank).with_suffix(".tmp").write_text(" " * RESERVED, encoding="utf-8")


def stop_recording() -> None:
    """From now on `record_exit` does nothing: this process goes on after its run."""
    _Recording.run = None


def record_exit(code: int, reason: str = "") -> None:
    """Record the end of this process, if it is a rank of a run whose folder still exists."""
    run, rank = _Recording.run, _Recording.rank
    if run is None:
        return
    record = ExitRecord(rank, socket.gethostname(), os.getpid(), round(time.time(), 3), code, reason)
    path = _path(run, rank)
    temporary = path.with_suffix(".tmp")
    text = json.dumps({**asdict(record), "reason": reason[: RESERVED // 8]}) + "\n"
    with suppress(OSError):  # the folder of a refused start is gone
        with temporary.open("r+" if temporary.exists() else "w", encoding="utf-8") as file:
            file.write(text.ljust(RESERVED))  # over the reserved blocks
        os.replace(temporary, path)


def read_exit(path: Path) -> ExitRecord | None:
    """A rank's record; None when the file is missing or damaged."""
    try:
        return ExitRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _path(run: Path, rank: int) -> Path:
    return run / FOLDER_NAME / f"exit-{rank:05d}.json"
