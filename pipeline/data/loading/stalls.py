"""What loading workers are doing when no batch comes from them, from /proc: a stuck process cannot answer."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.distributed.exit_record import record_exit

SHARED_MEMORY = Path("/dev/shm")
PROC = Path("/proc")
STATES = {
    "R": "is computing",
    "S": "is waiting",
    "D": "waits for storage or the network (uninterruptible)",
    "T": "is stopped (SIGSTOP; SIGCONT continues it)",
    "t": "is stopped by a debugger",
    "Z": "has died",
    "X": "has died",
}


EXIT_STALLED = 76
"""As `pipeline.distributed.heartbeat.EXIT_STALLED`: what a rank waits for hangs."""


class StallWatch:
    """Context manager around each wait for a batch: a wait that takes too long ends this process with exit code 76.

    A thread watches, because the wait may be in the kernel: torch's own limit does not cover the connection over which
    a worker hands out an image tensor, and a stopped worker does not answer there.

    Args:
        seconds: Limit of one wait.
        describe: Returns what is printed, and kills what would outlive this process.
    """

    def __init__(self, seconds: float, describe: Callable[[], str]) -> None:
        self._seconds, self._describe = seconds, describe
        self._since: float | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)
            self._thread.start()
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(10.0, self._seconds / 10))
            since = self._since
            if since is not None and time.monotonic() - since > self._seconds:
                text = self._describe()
                print(text, file=sys.stderr, flush=True)
                record_exit(EXIT_STALLED, text)
                os._exit(EXIT_STALLED)


def describe_workers(pids: Sequence[int], *, places: Sequence[str] = ()) -> list[str]:
    """One sentence per worker, and one about shared memory.

    Args:
        pids: The workers' processes, by number of the worker.
        places: Where each worker is in the data.
    """
    lines = []
    for number, pid in enumerate(pids):
        place = places[number] if number < len(places) else ""
        shards = _open_shards(pid)
        reading = f", has open {', '.join(shards)}" if shards else ""
        lines.append(f"Worker {number} (process {pid}) {_state(pid)}{f' at {place}' if place else ''}{reading}.")
    with suppress(OSError):
        stat = os.statvfs(SHARED_MEMORY)
        lines.append(
            f"{SHARED_MEMORY} has {stat.f_bavail * stat.f_frsize >> 20} MiB free; workers pass images through it."
        )
    return lines


def _state(pid: int) -> str:
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return "is gone"
    return STATES.get(text.rpartition(")")[2].split()[0], "is in an unknown state")


def _open_shards(pid: int) -> list[str]:
    """The tars that a process has open, on this machine's file systems."""
    found = set()
    with suppress(OSError):
        for link in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                target = os.readlink(link)
                if target.endswith(".tar"):
                    found.add(target)
    return sorted(found)
