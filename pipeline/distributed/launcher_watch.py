"""Ranks notice that the launcher that started them is gone, and end with a checkpoint.

A launcher that is killed (SIGKILL, or an out-of-memory kill) cannot end its ranks. They would train on as orphans, hold
the GPUs and the run's folder, and nobody would start the run again when they fail.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SECONDS = 2.0
"""Between two looks at the launcher."""
DEEPSPEED, DEEPSPEED_NODE = frozenset({"deepspeed", "deepspeed.pt", "ds"}), "deepspeed.launcher.launch"
"""Names of the command that starts DeepSpeed's launcher, and the module that it runs on every node."""


@dataclass(frozen=True)
class Process:
    """A process, which another one with the same id is not."""

    pid: int
    started: str
    """Clock ticks between the machine's start and its own."""

    def runs(self) -> bool:
        """Whether it exists and has not ended; one that has ended may still be listed as a zombie."""
        stat = _stat(self.pid)
        return stat is not None and stat[2] == self.started and stat[0] not in "ZX"


def watch_launcher() -> None:
    """If a launcher has started this process, send this process SIGTERM when the launcher is gone.

    Processes without a launcher may outlive whatever started them, such as the shell behind `nohup`.
    """
    launchers = find_launchers(os.getppid())
    if not launchers:
        return

    def watch() -> None:
        while all(launcher.runs() for launcher in launchers):
            time.sleep(SECONDS)
        gone = ", ".join(str(launcher.pid) for launcher in launchers if not launcher.runs())
        with suppress(OSError, ValueError):  # the launcher may have read what we print
            print(f"The launcher (process {gone}) is gone: stopping as on SIGTERM.", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def find_launchers(parent: int) -> list[Process]:
    """The processes without which nobody looks after this rank: torchrun's agent, or DeepSpeed's two.

    Args:
        parent: This process's parent.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        pids = [parent]
    elif DEEPSPEED_NODE in _arguments(parent):
        above = _parent(parent)
        pids = [parent, *([above] if above and DEEPSPEED & {Path(part).name for part in _arguments(above)} else [])]
    else:
        pids = []
    return [Process(pid, stat[-1]) for pid in pids if (stat := _stat(pid))]


def _stat(pid: int) -> tuple[str, str, str] | None:
    """State, parent and start of a process; None if there is none, or no /proc."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0], fields[1], fields[19]
    return None


def _parent(pid: int) -> int | None:
    stat = _stat(pid)
    return int(stat[1]) if stat else None


def _arguments(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []
