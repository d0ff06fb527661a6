"""How each rank of a run ended: RUN/heartbeats/exit-R.json, from which `neuclip doctor RUN` says what happened.

A process that is aborted in C++ (NCCL's watchdog does that with SIGABRT) cannot write it. Python's fault handler then
writes the stacks of its threads to fatal-R.txt. A rank that was killed from outside writes neither, which is how its
end is recognized.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

FOLDER_NAME = "heartbeats"
EXIT_STALLED = 76
"""Another rank hangs or is gone. Checkpoints that were written are intact: start again with --resume latest."""
FATAL = "Fatal Python error: "
FATAL_SIGNALS = {
    signal.strsignal(number): number
    for number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
}
"""By the names that Python's fault handler gives them, too."""
RESERVED = 4096
"""Bytes of a record, which the disk has in reserved-R.json from the start on: a full disk may be what ends the run."""


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
    """Where this process records its end; None while it is not a rank of a run."""

    folder: Path | None = None
    rank = 0
    fatal: IO[str] | None = None
    """Where the fault handler writes."""


def start_recording(folder: Path, *, rank: int) -> None:
    """From now on the end of this process is recorded in this folder."""
    stop_recording()
    _Recording.folder, _Recording.rank = folder, rank
    with suppress(OSError):
        _path("reserved", rank).write_text(" " * RESERVED, encoding="utf-8")
        _Recording.fatal = _path("fatal", rank).open("w", encoding="utf-8")
        _Recording.fatal.write(f"{socket.gethostname()} {os.getpid()}\n")
        _Recording.fatal.flush()
        faulthandler.enable(_Recording.fatal)


def stop_recording() -> None:
    """From now on no end is recorded: this process goes on after its run."""
    if _Recording.fatal is not None:
        faulthandler.enable(sys.__stderr__ or 2)
        with suppress(OSError):  # the disk is full or has become read-only
            _Recording.fatal.close()
            _path("fatal", _Recording.rank).unlink(missing_ok=True)
    _Recording.folder = _Recording.fatal = None


def record_exit(code: int, reason: str = "") -> None:
    """Record the end of this process, if it is a rank of a run whose folder still exists."""
    if _Recording.folder is None:
        return
    rank, host, pid = _Recording.rank, socket.gethostname(), os.getpid()
    record = ExitRecord(rank, host, pid, round(time.time(), 3), code, reason[: RESERVED // 8])
    reserved = _path("reserved", rank)
    with suppress(OSError):  # the folder of a refused start is gone
        with os.fdopen(os.open(reserved, os.O_WRONLY | os.O_CREAT, 0o666), "w", encoding="utf-8") as file:
            file.write((json.dumps(asdict(record)) + "\n").ljust(RESERVED))  # over the reserved blocks
        os.replace(reserved, _path("exit", rank))


def remove_records(folder: Path) -> None:
    """Remove what the ranks of a start have left in a folder, and the folder unless it has other files."""
    if folder.is_symlink():
        return
    with suppress(OSError):
        for path in folder.iterdir():
            if re.fullmatch(r"\.?(rank|exit|reserved|fatal)-\d+\.(json|txt)(\.[0-9a-f]{32}\.tmp)?", path.name):
                path.unlink(missing_ok=True)
        folder.rmdir()


def read_ends(folder: Path) -> list[ExitRecord]:
    """The records of the ranks in a folder, in their order, those of fatal signals included."""
    from pipeline.run_files import read_as  # signals are handled before libraries are imported

    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    fatal = (_read_fatal(path) for path in paths if path.match("fatal-*.txt"))
    ended = (read_as(ExitRecord, path) for path in paths if path.match("exit-*.json"))
    ends = {end.rank: end for end in (*fatal, *ended) if end is not None}
    return [ends[rank] for rank in sorted(ends)]


def _read_fatal(path: Path) -> ExitRecord | None:
    """The end of a rank by a fatal signal; None while there was none."""
    from pipeline.files import read_bounded  # as above

    try:
        first, second = read_bounded(path).decode(errors="replace").splitlines()[:2]
        who, what = first.split(), second.strip()
        if not what.startswith(FATAL):
            return None
        number = FATAL_SIGNALS.get(what.removeprefix(FATAL), signal.SIGABRT)
        reason = f"{number.name}; the stacks are in {path}, its last words on standard error"
        return ExitRecord(int(path.stem[-5:]), who[0], int(who[1]), path.stat().st_mtime, 128 + number, reason)
    except (OSError, ValueError, IndexError):
        return None


def _path(kind: str, rank: int) -> Path:
    assert _Recording.folder is not None
    return _Recording.folder / f"{kind}-{rank:05d}.{'txt' if kind == 'fatal' else 'json'}"
