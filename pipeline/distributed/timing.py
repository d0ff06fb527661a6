"""Where the time of a run goes: data wait and the phases of a step, read at logging steps only."""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Phases:
    """Seconds spent in named phases since the last reading.

    On CUDA the phases are bracketed by events and summed when read, so that timing never waits for the device. Every
    phase also bears its name in torch's profiler.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.on_enter: Callable[[str], None] | None = None
        """Is told every phase's name when it begins."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.on_enter is not None:
            self.on_enter(name)
        with torch.profiler.record_function(name):
            if self._cuda:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                yield
                end.record()
                self._events.append((name, start, end))
            else:
                began = time.perf_counter()
                yield
                self._seconds[name] += time.perf_counter() - began

    def read(self) -> dict[str, float]:
        """Seconds per phase since the last call."""
        if self._events:
            torch.cuda.synchronize()
            for name, start, end in self._events:
                self._seconds[name] += start.elapsed_time(end) / 1e3
            self._events.clear()
        found, self._seconds = dict(self._seconds), defaultdict(float)
        return found


class Meter:
    """Samples per second, and the shares of time in data wait and in each phase, since the last reading.

    forward, objective, backward and optimizer follow each other; npn and communication (our own collectives; the
    engine's are in backward and optimizer) are parts of them.
    """

    def __init__(self, batch_size: int, phases: Phases) -> None:
        self._batch_size, self._phases = batch_size, phases
        self._steps, self._waited, self._since = 0, 0.0, time.perf_counter()

    @contextmanager
    def waiting(self, *, hidden_by: torch.device | None = None) -> Iterator[None]:
        """Around the wait for a batch; it counts unless that device still has work queued when it ends."""
        start = time.perf_counter()
        queued = None
        if hidden_by is not None and hidden_by.type == "cuda":
            queued = torch.cuda.Event()
            queued.record()
        yield
        if queued is None or queued.query():
            self._waited += time.perf_counter() - start

    def count(self) -> None:
        """A step was taken."""
        self._steps += 1

    def read(self) -> dict[str, float]:
        phases = self._phases.read()
        elapsed = time.perf_counter() - self._since
        rates = {
            "samples_per_second": self._steps * self._batch_size / elapsed,
            "data_wait": self._waited / elapsed,
            **{f"time_{name}": seconds / elapsed for name, seconds in phases.items()},
        }
        # Peak resident memory of this process; the kernel counts KiB.
        rates["host_memory_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if torch.cuda.is_available():
            rates["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self._steps, self._waited, self._since = 0, 0.0, time.perf_counter()
        return rates
