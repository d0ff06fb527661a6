"""Several ranks in one process: each is a thread with a `World` whose collectives synchronize at a barrier."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from pipeline.distributed.devices import true_fp32
from pipeline.distributed.world import World


class _Meeting:
    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=60)
        self.values: list[Any] = [None] * size
        self.counts, self.lock = Counter[str](), threading.Lock()


class ThreadWorld(World):
    """One of several ranks in this process."""

    def __init__(self, rank, meeting):
        super().__init__(rank=rank, size=len(meeting.values))
        object.__setattr__(self, "meeting", meeting)

    def _exchange(self, x):
        self.meeting.values[self.rank] = x.detach().clone()
        self.meeting.barrier.wait()
        values = list(self.meeting.values)
        self.meeting.barrier.wait()
        return values

    def wait_for_all(self):
        self.meeting.barrier.wait()

    def count(self, name, amount=0):
        with self.meeting.lock:
            self.meeting.counts[name] += amount
            return self.meeting.counts[name]

    def gather_objects(self, value):
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait()
        values = list(self.meeting.values)
        self.meeting.barrier.wait()
        return values

    def all_gather(self, x_b):
        return torch.cat(self._exchange(x_b)) if x_b.dim() else torch.stack(self._exchange(x_b))

    def all_reduce(self, x, op="sum"):
        values = torch.stack(self._exchange(x))
        return values.sum(0) if op == "sum" else values.amax(0)


def on_ranks(size, program):
    """Return the results of `program(world)` on every rank."""
    meeting = _Meeting(size)

    def run(rank):
        try:
            return program(ThreadWorld(rank, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    # The ranks change the process-wide precision settings concurrently: they are restored here.
    with true_fp32(torch.device("cpu")), ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]
