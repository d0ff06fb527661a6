"""The ranks of a run and their collectives. Only this folder imports torch.distributed.

`World` is an object that is passed to the code that needs it, so that code for many ranks can be tested in one process.
It counts the calls and payload bytes of every collective in `world.traffic`.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from pipeline.cores import usable_cores
from pipeline.distributed.timing import Phases
from pipeline.errors import UserError, is_out_of_memory, too_many_files

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The ranks of a run, of which this process is one. A world of size 1 needs no process group."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    traffic: Counter[str] = field(default_factory=Counter, compare=False)
    phases: Phases | None = field(default=None, compare=False)
    """Times collectives and the parts of a step; None: nothing is timed."""
    cores: int = field(default_factory=usable_cores, compare=False)
    """CPU cores of this rank, without those of the other ranks on its node."""
    patient: bool = field(default=False, compare=False)
    """Objects are gathered after `wait_for_all`: a rank may work for longer than a collective may take."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_gather(self, x_b: Tensor) -> Tensor:
        """`[b, ...]` of every rank, concatenated in rank order to `[K b, ...]`, without gradient."""
        x_b = x_b.detach().contiguous()
        if self.size == 1:
            return x_b
        gathered = x_b.new_empty((self.size, *x_b.shape))
        with self._communication("all_gather", x_b):  # into one buffer: a list would be copied piece by piece
            dist.all_gather_into_tensor(gathered.view(-1), x_b.view(-1))
        return gathered.flatten(0, 1) if x_b.dim() else gathered

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """The sum, max or min of `x` over the ranks, as a new tensor; bit-identical on all ranks."""
        x = x.detach().clone()
        if self.size > 1:
            with self._communication("all_reduce", x):
                dist.all_reduce(x, getattr(dist.ReduceOp, op.upper()))
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Copy rank 0's `x` into `x` on every rank."""
        if self.size > 1:
            with self._communication("broadcast", x):
                dist.broadcast(x, 0)
        return x

    def gather_objects(self, value: Any) -> list[Any]:
        """One small picklable value per rank, in rank order, on every rank."""
        values: list[Any] = [None] * self.size
        if self.size == 1:
            return [value]
        if self.patient:
            self.wait_for_all()
        self.traffic["gather_objects.calls"] += 1
        dist.all_gather_object(values, value)
        self.progress()
        return values

    def wait_for_all(self) -> None:
        """Wait until all ranks are here. Unlike a collective, this has no time limit, for work that one rank does while
        the others wait, such as scoring a task: the heartbeats end the run when no rank works. Collective."""
        if self.size == 1:
            return
        self.traffic["wait_for_all.calls"] += 1
        key = f"wait_for_all/{self.traffic['wait_for_all.calls']}"
        arrived, pause = self.count(key, 1), 1e-3
        while arrived < self.size:
            time.sleep(pause)
            arrived, pause = self.count(key), min(2 * pause, 0.25)

    def count(self, name: str, amount: int = 0) -> int:
        """Add to a number that several ranks share, and return it. Not collective, and callable in any thread."""
        return int(distributed_c10d._get_default_store().add(name, amount)) if self.size > 1 else 0

    def work_on_main(self, work: Callable[[], T]) -> T | None:
        """Do on rank 0 what others need not do, or what may take longer than a collective may. Collective.

        Returns what the work returns; None on other ranks, which wait for it. A `UserError` is raised on every rank.
        Long work calls `progress` now and then: without progress, the heartbeats end the run.
        """
        result, failure = None, None
        phases = self.phases or Phases(self.device)
        before = phases.latest.phase
        if self.is_main:
            try:
                result = work()
            except Exception as error:
                failure = error
        if self.size > 1:  # rank 0 is behind while it works, and not afterwards
            phases.mark("wait for rank 0")
            self.wait_for_all()
            phases.mark(before)
        problem = self.gather_objects(str(failure) if isinstance(failure, UserError) else "")[0]
        if failure is not None:
            raise failure
        if problem:
            raise UserError(problem)
        return result

    def progress(self) -> None:
        """Note that the work of a long phase goes on: see `Phases.progress`."""
        if self.phases is not None:
            self.phases.progress()

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def rows(self, local: int) -> slice:
        """This rank's rows of a gathered `[K * local, ...]` tensor."""
        return slice(self.rank * local, (self.rank + 1) * local)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a block under `name`, if `phases` is set; in torch's profiler it is a range of that name in any case."""
        return self.phases(name) if self.phases is not None else torch.profiler.record_function(name)

    def _communication(self, collective: str, x: Tensor) -> AbstractContextManager[None]:
        self.traffic[f"{collective}.calls"] += 1
        self.traffic[f"{collective}.bytes"] += x.numel() * x.element_size()
        return self.phase("communication")


def joined_world() -> World:
    """The ranks of the process group that this process has joined, or one rank on the CPU if there is none."""
    if not dist.is_initialized():
        return World()
    on_gpus = dist.get_backend() != "gloo" and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)


def limit_collectives(minutes: float) -> None:
    """Set the time limit of all process groups, including DeepSpeed's, whose default of 10 minutes would end a run
    before the heartbeats report which rank is behind."""
    if dist.is_initialized():
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(minutes=minutes), group)


WRITER, NEXT_BATCH = "checkpoint writer", "next batch"
"""Names of threads during which the interpreter must not shut down."""


def leave(code: int) -> NoReturn:
    """Exit; one of several ranks, or a process with such a thread, without the interpreter's usual cleanup.

    While the process group exists, destructors would wait for other ranks. After it was destroyed, references to it,
    such as DeepSpeed's, keep gloo's threads alive, and a thread that releases its last tensor while the interpreter
    shuts down aborts the process (PyTorch issue 190489). So does one that writes a checkpoint or fetches a batch,
    after an interrupt or an error.
    """
    joined = dist.is_available() and dist.is_initialized()
    at_once = int(os.environ.get("WORLD_SIZE", "1")) > 1 or any(
        thread.name in (WRITER, NEXT_BATCH) for thread in threading.enumerate()
    )
    if at_once and not joined:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if at_once or joined:
        os._exit(code)
    sys.exit(code)


def lost_contact(error: BaseException) -> bool:
    """Whether an error came from a collective: another rank is gone, or the collective timed out."""
    names = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")
    if too_many_files(error) or is_out_of_memory(error):
        return False
    named = isinstance(error, RuntimeError) and any(name in str(error).lower() for name in names)
    return named or isinstance(error, dist.DistError)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
