"""What loading workers are doing when no batch comes from them, from /proc: a stuck process cannot answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

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
