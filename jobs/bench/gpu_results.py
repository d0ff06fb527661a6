"""Measurements with time limits, and the JSON file that keeps them. `jobs.bench.gpu` takes them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.cores import usable_cores
from pipeline.files import write_json
from pipeline.versions import source_commit, versions


@dataclass
class Results:
    """The JSON file, written again after each measurement."""

    path: Path
    tiny: bool
    seconds: float
    """For all measurements."""
    found: dict[str, Any] = field(default_factory=dict)
    """By part and measurement."""
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start, self._facts = time.monotonic(), {"tiny": self.tiny, "machine": machine()}
        self.write()

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self._start)

    def measure(self, part: str, name: str, call: Callable[[], Any], *, seconds: float) -> Any:
        """Record what `call` returns, or why there is nothing, and return it; it has as many seconds, or what is left.

        What cannot be written as JSON (a contender) is not recorded.
        """
        begin, limit, value = time.monotonic(), min(seconds, self.left), None
        outcome: dict[str, Any] = {"status": "done"}
        if limit < 1:
            outcome["status"] = "left out: no time was left"
        else:
            print(f"{part}, {name} ...", flush=True)
            try:
                with alarm(limit):
                    value = call()
            except (Exception, OutOfTime) as error:
                outcome["status"] = f"failed: {type(error).__name__}: {error}"[:2000]
                self.failed.append(f"{part}, {name}")
        outcome["seconds"] = round(time.monotonic() - begin, 1)
        if isinstance(value, dict):
            outcome["result"] = value
        self.found.setdefault(part, {})[name] = outcome
        self.write()
        print(f"{part}, {name}: {outcome['status']}, {outcome['seconds']} s", flush=True)
        return value

    def write(self) -> None:
        write_json(self.path, {**self._facts, "parts": self.found})


class OutOfTime(BaseException):
    """A measurement takes too long. No handler of errors on the way takes it for one."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Inside, OutOfTime is raised after so many seconds."""

    def stop(*_: object) -> None:
        raise OutOfTime(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def machine() -> dict[str, Any]:
    """The machine and the package versions."""
    import torch

    facts: dict[str, Any] = {"cores": usable_cores(), "commit": source_commit(), "versions": versions()}
    facts |= {"cpu": torch.backends.cpu.get_cpu_capability(), "cuda": torch.version.cuda}
    if shutil.which("nvidia-smi"):
        query = "name,memory.total,driver_version,power.limit,clocks.max.sm,clocks.max.memory"
        done = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv"], capture_output=True, text=True)
        facts["nvidia-smi"] = done.stdout.splitlines()
    return facts
