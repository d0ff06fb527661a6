"""The ranks of a run and their collectives. Only this module imports torch.distributed.

`World` is an object that is passed to the code that needs it, so that code for many ranks can be tested in one process.
It counts the calls and payload bytes of every collective in `world.traffic`.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from pipeline.distributed.timing import Phases
from pipeline.errors import UserError


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

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Copy rank `source`'s `x` into `x` on every rank."""
        if self.size > 1:
            with self._communication("broadcast", x):
                dist.broadcast(x, source)
        return x

    def gather_objects(self, value: Any) -> list[Any]:
        """One small picklable value per rank, in rank order, on every rank."""
        values: list[Any] = [None] * self.size
        if self.size == 1:
            return [value]
        self.traffic["gather_objects.calls"] += 1
        dist.all_gather_object(values, value)
        return values

    def raise_together(self, problem: str) -> None:
        """Raise a problem of rank 0 on every rank; nothing happens if it is empty there. Collective.

        Raises:
            UserError: Rank 0 has a problem.
        """
        if problem := self.gather_objects(problem)[0]:
            raise UserError(problem)

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
    """The ranks of the process group that this process has already joined, or one rank on the CPU if there is none.

    Its device is the current CUDA device if the group's backend communicates on GPUs.
    """
    if not dist.is_initialized():
        return World()
    on_gpus = dist.get_backend() != "gloo" and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)


@contextmanager
def start_world(*, timeout_minutes: float = 30.0, device: str = "auto") -> Iterator[World]:
    """Join the process group that the launcher's environment describes, and leave it at the end.

    Works under `deepspeed`, `torchrun` and `srun`, and in a plain process, which is a group of one.

    Args:
        timeout_minutes: Limit for a collective.
        device: "auto" (CUDA if there is a GPU), "cpu" or "cuda".

    Raises:
        UserError: The launcher's environment is incomplete, or there is no such device.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    present = [name for name in names if name in os.environ]
    if present and "WORLD_SIZE" in present and len(present) < len(names):
        missing = ", ".join(sorted(set(names) - set(present)))
        raise UserError(
            f"The launcher set {', '.join(present)} but not {missing}: start with deepspeed, torchrun or srun."
        )
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "WORLD_SIZE" not in present and int(tasks) > 1:
        raise UserError(
            f"srun started {tasks} processes that do not know of each other. Use jobs/cluster/train.sbatch, or export "
            "in each: RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS, MASTER_ADDR (the first "
            "node) and MASTER_PORT. For one process: srun --ntasks=1."
        )
    if "WORLD_SIZE" not in present:
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port())
        )
    rank, local_rank, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    chosen = _device(device, local_rank)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    owned = not dist.is_initialized()
    if owned:
        _join(backend, timedelta(minutes=timeout_minutes))
    failed = True
    try:
        yield World(rank=rank, size=size, local_rank=local_rank, device=chosen, phases=Phases(chosen))
        failed = False
    finally:
        # NCCL would wait here for its peers, which wait in a collective for this rank, and its error would not be seen.
        if owned and dist.is_initialized() and not (failed and backend == "nccl" and size > 1):
            dist.destroy_process_group()


def _join(backend: str, timeout: timedelta) -> None:
    """Create the process group.

    Raises:
        UserError: The meeting point is taken or cannot be reached.
    """
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistNetworkError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        taken = "EADDRINUSE" in str(error) or "already in use" in str(error)
        problem = "is used by another program" if taken else "cannot be reached"
        raise UserError(
            f"The ranks cannot meet at {place}, which {problem}: set MASTER_PORT to a free port (torchrun: "
            f"--master-port; deepspeed: --master_port), and MASTER_ADDR to the first node. {str(error).splitlines()[0]}"
        ) from error


def limit_collectives(minutes: float) -> None:
    """Set the time limit of all process groups of this process, including those of libraries.

    DeepSpeed creates groups with NCCL's default limit of 10 minutes, which would end a run before the heartbeats report
    which rank is behind.
    """
    if dist.is_initialized():
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(minutes=minutes), group)


def leave(code: int) -> NoReturn:
    """Exit this process; if it is one of several ranks, without the interpreter's usual cleanup.

    While the process group exists, destructors would wait for other ranks. After it was destroyed, references to it,
    such as DeepSpeed's, keep gloo's threads alive, and a thread that releases its last tensor while the interpreter
    shuts down aborts the process (PyTorch issue 190489).
    """
    joined = dist.is_available() and dist.is_initialized()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and not joined:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if several or joined:
        os._exit(code)
    sys.exit(code)


def ranks_here(world_size: int) -> int:
    """Ranks of this run on this machine, from the variables of torchrun or deepspeed; without them, all ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world_size)


def lost_contact(error: BaseException) -> bool:
    """Whether an error came from a collective: another rank is gone, or the collective timed out."""
    names = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")
    named = isinstance(error, RuntimeError) and any(name in str(error).lower() for name in names)
    return named or isinstance(error, dist.DistError)


def _device(name: str, local_rank: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("engine.device = 'cuda', but torch sees no CUDA device here: use 'auto' or 'cpu'.")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"Local rank {local_rank} has no GPU of its own: torch sees {torch.cuda.device_count()}. "
            "Start at most one process per GPU."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
