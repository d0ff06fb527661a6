"""Where a run is and where its time goes: the phases of a step and the data wait, read at logging steps only."""

from __future__ import annotations

import gc
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch


@contextmanager
def present_objects_kept() -> Iterator[None]:
    """Inside, Python's garbage collector does not look at the objects that exist at the begin.

    Imports, towers and engine leave so many that a full collection takes up to a second, and every rank has it at
    another step. Collect where all ranks do.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


MANY_OBJECTS = 30_000


def collect_garbage() -> None:
    """Collect garbage between two steps. Where many objects survive, later collections do not look at them again.

    Steps leave some 12,000; torch.compile of ViT-B/32 left 217,000, and each collection took 0.09 s.
    """
    gc.collect()
    if len(gc.get_objects()) > MANY_OBJECTS:
        gc.freeze()


@dataclass(frozen=True)
class Mark:
    """The phase that a rank has entered last."""

    step: int = 0
    phase: str = "start"
    count: int = 0
    """Phases entered so far."""
    since: float = 0.0
    """When, or when its work was last seen to go on, on the clock of `time.monotonic`."""


class Phases:
    """The phase that this rank is in, and the seconds spent in each phase since the last reading.

    On CUDA the phases are bracketed by events and summed when read, so that timing never waits for the device. Phases
    appear under their names in torch's profiler.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.latest = Mark(since=time.monotonic())
        """Replaced as a whole, so that another thread may read it."""

    def mark(self, phase: str, *, step: int | None = None) -> None:
        """Enter a phase that is not timed, optionally of another step."""
        before = self.latest
        self.latest = Mark(before.step if step is None else step, phase, before.count + 1, time.monotonic())

    def progress(self) -> None:
        """Note that the work of a long phase goes on, so that nobody takes it for a hang."""
        self.latest = replace(self.latest, since=time.monotonic())

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase."""
        self.mark(name)
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
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


class Meter:
    """Samples per second, CPU time of a step, and the shares of time in data wait and in each phase, since the last
    reading.

    The phases forward, objective, backward and optimizer follow each other. npn and communication (our own collectives;
    DeepSpeed's are in backward and optimizer) overlap with them.
    """

    def __init__(self, batch_size: int, phases: Phases) -> None:
        self._batch_size, self._phases = batch_size, phases
        self.start()

    @contextmanager
    def waiting(self, *, hidden_by: torch.device | None = None) -> Iterator[None]:
        """Time the wait for a batch. It does not count when the device `hidden_by` still has queued work at its end."""
        start = time.perf_counter()
        queued = None
        if hidden_by is not None and hidden_by.type == "cuda":
            queued = torch.cuda.Event()
            queued.record()
        yield
        if queued is None or queued.query():
            self._waited += time.perf_counter() - start

    def start(self) -> None:
        """Restart the measurement and drop everything before."""
        self._phases.read()
        self.steps, self._waited = 0, 0.0
        """Since the last reading; steps are counted by the training loop."""
        self._since, self._cpu_since = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """Samples per second, CPU time of a step, shares of time (data_wait, time_PHASE), peak memory since the last
        reading."""
        phases = self._phases.read()
        elapsed = time.perf_counter() - self._since
        rates = {
            "samples_per_second": self.steps * self._batch_size / elapsed,
            "cpu_ms": 1e3 * (time.process_time() - self._cpu_since) / max(1, self.steps),
            "data_wait": self._waited / elapsed,
            **{f"time_{name}": seconds / elapsed for name, seconds in phases.items()},
        }
        # Peak resident memory of this process; the kernel counts KiB.
        rates["host_memory_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if torch.cuda.is_available():
            rates["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        self.start()
        return rates
