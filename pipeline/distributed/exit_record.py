"""How each rank of a run ended: RUN/heartbeats/exit-R.json, from which `neuclip doctor RUN` says what happened.

A process that is aborted in C++ (NCCL's watchdog does that with SIGABRT) cannot write it. Python's fault handler then
writes the stacks of its threads to fatal-R.txt, and stderr-R.txt has what it wrote last. A rank that was killed from
outside writes neither, which is how its end is recognized.
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
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER_NAME = "heartbeats"
EXIT_STALLED = 76
"""Another rank hangs or is gone. Checkpoints that were written are intact: start again with --resume latest."""
FATAL = "Fatal Python error: "
FATAL_SIGNALS = {
    "Aborted": signal.SIGABRT,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}
"""What Python's fault handler calls them."""
LAST_WORDS = ("what():", "Watchdog caught", "NCCL error", "CUDA error")
"""In the lines that say why NCCL's watchdog, or another C++ library, aborts the process."""
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
    reserved: Path | None = None
    """A file of this process, of which nobody can guess the name, with the space of the record."""


def start_recording(run: Path, *, rank: int) -> None:
    """From now on `record_exit` writes into this run's folder. Old records of this rank are removed."""
    _Recording.run, _Recording.rank = run, rank
    with suppress(OSError):
        _path(run, rank).unlink(missing_ok=True)


def remove_records(run: Path) -> None:
    """Remove what the ranks of a start have left in RUN/heartbeats, and the folder unless it has other files."""
    folder = run / FOLDER_NAME
    with suppress(OSError):
        for path in folder.iterdir():
            if re.fullmatch(r"(rank|exit|fatal|stderr)-\d+\.(json|txt|tmp|[0-9a-f]{32}\.tmp)", path.name):
                path.unlink(missing_ok=True)
        folder.rmdir()


def reserve_space() -> None:
    """Take the space of this rank's record now."""
    if _Recording.run is not None:
        reserved = _temporary(_Recording.run, _Recording.rank)
        with suppress(OSError):
            with reserved.open("x", encoding="utf-8") as file:
                file.write(" " * RESERVED)
            _Recording.reserved = reserved


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
    reserved, _Recording.reserved = _Recording.reserved, None
    temporary = reserved or _temporary(run, rank)
    text = json.dumps({**asdict(record), "reason": reason[: RESERVED // 8]}) + "\n"
    with suppress(OSError):  # the folder of a refused start is gone
        with temporary.open("r+" if reserved else "x", encoding="utf-8") as file:
            file.write(text.ljust(RESERVED))  # over the reserved blocks
        os.replace(temporary, path)


@contextmanager
def fatal_errors_recorded(run: Path, *, rank: int) -> Iterator[None]:
    """Inside, a fatal signal (SIGABRT, SIGSEGV, ...) leaves the stacks of all threads in fatal-R.txt."""
    path = run / FOLDER_NAME / f"fatal-{rank:05d}.txt"
    try:
        last_words_path(run, rank).unlink(missing_ok=True)  # of an earlier start
        file = path.open("w", encoding="utf-8")
    except OSError:
        yield
        return
    with file:
        file.write(f"{socket.gethostname()} {os.getpid()}\n")
        file.flush()
        faulthandler.enable(file)
        try:
            yield
        finally:
            faulthandler.enable(sys.__stderr__ or 2)
            with suppress(OSError):  # the disk has become read-only
                path.unlink()


def read_ends(folder: Path, *, below: int = 2**31) -> list[ExitRecord]:
    """The records of ranks in RUN/heartbeats, in their order, those of fatal signals included.

    Those of ranks from `below` on are left out: an earlier start may have had more.
    """
    from pipeline.run_files import read_as  # signals are handled before libraries are imported

    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError:
        return []
    found: dict[int, ExitRecord] = {}
    for name in names:
        kind, _, number = name.removesuffix(".json").removesuffix(".txt").partition("-")
        if kind in ("fatal", "exit") and number.isdecimal() and int(number) < below:
            record = read_as(ExitRecord, folder / name) if kind == "exit" else _read_fatal(folder / name)
            if record is not None:
                found.setdefault(record.rank, record)
    return [found[rank] for rank in sorted(found)]


def _read_fatal(path: Path) -> ExitRecord | None:
    """The end of a rank by a fatal signal; None while there was none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            who, what = file.readline().split(), file.readline().strip()
        if not what.startswith(FATAL):
            return None
        number, words = FATAL_SIGNALS.get(what.removeprefix(FATAL), signal.SIGABRT), _last_words(path)
        said = f": {words}" if words else ", its last words on standard error"
        reason = f"{number.name}; the stacks are in {path}{said}"
        return ExitRecord(int(path.stem[-5:]), who[0], int(who[1]), path.stat().st_mtime, 128 + number, reason)
    except (OSError, ValueError, IndexError):
        return None


def _last_words(fatal: Path) -> str:
    """What NCCL's watchdog or the C++ runtime said last, in one line; else the last line on standard error."""
    try:
        text = last_words_path(fatal.parents[1], int(fatal.stem[-5:])).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip() and not line.startswith("frame #")]
    said = [number for number, line in enumerate(lines) if any(word in line for word in LAST_WORDS)]
    last = lines[said[-1] : said[-1] + 3] if said else lines[-1:]
    return " ".join(line for line in last if not line.startswith("Exception raised from")).removeprefix("what(): ")


def last_words_path(run: Path, rank: int) -> Path:
    """The copy of a rank's standard error, while it trains on several GPUs."""
    return run / FOLDER_NAME / f"stderr-{rank:05d}.txt"


def _temporary(run: Path, rank: int) -> Path:
    return _path(run, rank).with_suffix(f".{uuid.uuid4().hex}.tmp")


def _path(run: Path, rank: int) -> Path:
    return run / FOLDER_NAME / f"exit-{rank:05d}.json"
