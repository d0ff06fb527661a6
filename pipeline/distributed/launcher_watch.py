"""Each rank checks whether its launcher still runs; if not, the rank writes a checkpoint and exits.

A launcher that is killed (SIGKILL, or an out-of-memory kill) cannot end its ranks. They would continue to train as
orphans, keep the GPUs and the run's folder, and nothing would restart the run when they fail.
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
"""Time between two checks of the launcher."""
DEEPSPEED, DEEPSPEED_NODE = frozenset({"deepspeed", "deepspeed.pt", "ds"}), "deepspeed.launcher.launch"
"""The command names of DeepSpeed's launcher, and the module that this launcher runs on every node."""


@dataclass(frozen=True)
class Process:
    """A process, identified by its id and its start time: the system reuses ids."""

    pid: int
    started: str
    """Start time in clock ticks since the machine booted, as in /proc/PID/stat."""

    def runs(self) -> bool:
        """Whether this process still runs; a zombie has ended, although it is still listed."""
        stat = _stat(self.pid)
        return stat is not None and stat[2] == self.started and stat[0] not in "ZX"


def watch_launcher() -> None:
    """If a launcher started this process, send this process SIGTERM when the launcher is gone.

    Nothing is watched without a launcher: a run under `nohup` may outlive the shell that started it.
    """
    launchers = find_launchers(os.getppid())
    if not launchers:
        return

    def watch() -> None:
        while all(launcher.runs() for launcher in launchers):
            time.sleep(SECONDS)
        gone = ", ".join(str(launcher.pid) for launcher in launchers if not launcher.runs())
        with suppress(OSError, ValueError):  # our stderr may have been a pipe to the launcher
            print(f"The launcher (process {gone}) is gone: stopping as on SIGTERM.", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def find_launchers(parent: int) -> list[Process]:
    """The launcher's processes above this rank: torchrun's agent, or DeepSpeed's two.

    Args:
        parent: This process's parent.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        pids = [parent]
    elif DEEPSPEED_NODE in _arguments(parent):
        above = parent_of(parent)
        pids = [parent, *([above] if above and DEEPSPEED & {Path(part).name for part in _arguments(above)} else [])]
    else:
        pids = []
    return [Process(pid, stat[-1]) for pid in pids if (stat := _stat(pid))]


def _stat(pid: int) -> tuple[str, str, str] | None:
    """State, parent and start time of a process; None if it does not exist, or there is no /proc."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0], fields[1], fields[19]
    return None


def parent_of(pid: int) -> int | None:
    """The parent of a process; None if the process does not exist, or there is no /proc."""
    stat = _stat(pid)
    return int(stat[1]) if stat else None


def _arguments(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []
