"""What an evaluation runs with: its settings, its processes and its device.

Inside a training run the processes are its ranks (`pipeline.distributed.world`). Elsewhere `accelerate` starts and
connects them; one process needs neither.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from pydantic import Field

from pipeline.config import section
from pipeline.cores import cores_of_rank, cpu_quota
from pipeline.distributed.devices import keep_fp32
from pipeline.distributed.world import World
from pipeline.errors import UserError, is_out_of_memory
from pipeline.evaluation.compute import Compute
from pipeline.evaluation.datasets.task_data import TaskError, plain
from pipeline.evaluation.datasets.webdataset import BlankClass

T = TypeVar("T")


@section
class EvaluationConfig:
    """How to evaluate. `micro_batch`, `blank_class` and `precision` can change a score, and results record them."""

    batch_size: int = Field(default=64, ge=1)
    """Images per loader item."""
    micro_batch: int = Field(default=64, ge=1)
    """Images or texts that are computed together, padded to this size."""
    workers: int | None = Field(default=None, ge=0)
    """Processes that decode images, per process of the evaluation (None: one per core, 16 at most)."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """What the encoders compute in. `bf16` is faster where the device has it, and scores differ in the last digits."""
    blank_class: BlankClass = "keep"
    """What a blank line of classnames.txt is: a class without a name, or (`drop`) none, as in some published work."""
    recompute: bool = False
    """Compute again what is there already with the same inputs."""
    allow_outside: bool = False
    """Read files outside of a task's folders that links or tables in them name."""
    relock: bool = False
    """Accept data other than in `suite.lock.json`, and lock that."""

    def loader_workers(self, cores: int) -> int:
        """How many loader workers a process with so many cores starts."""
        return min(16, cores) if self.workers is None else self.workers


@dataclass(frozen=True)
class Session:
    """The settings, the processes and the device of one evaluation."""

    config: EvaluationConfig
    world: World
    """Ranks of a run, or the processes that a launcher has started for an evaluation."""
    compute: Compute

    def together(self, action: Callable[[], T]) -> T:
        """Run `action` on every process; if it fails on one, all raise that `TaskError`, so that none waits forever."""
        value, error = attempt(action)
        message = next((text for text in self.world.gather_objects(error) if text is not None), None)
        if message is not None:
            raise TaskError(message)
        return value  # type: ignore[return-value]

    def share(self, action: Callable[[int], T], count: int) -> list[T]:
        """`action` of the numbers below `count`, each on one of the processes; the values on all of them."""

        def mine() -> dict[int, T]:
            values = {}
            for number in range(self.world.rank, count, self.world.size):
                values[number] = action(number)
                self.world.progress()
            return values

        parts = self.world.gather_objects(self.together(mine))
        return [parts[number % self.world.size][number] for number in range(count)]

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on the first process only and return its value, or raise its `TaskError`, on all of them."""
        value, error = attempt(action) if self.world.rank == 0 else (None, None)
        value, error = self.world.gather_objects((value, error))[0]
        if error is not None:
            raise TaskError(error)
        return value


def attempt(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """The value of `action`, or its error message: a failed task must not stop the others."""
    try:
        return action(), None
    except UserError as error:
        return None, plain(error, longest=1200)
    except OSError as error:
        where = plain(error.filename, longest=200) if error.filename else "A file"
        return None, f"{where} cannot be read or written: {error.strerror or plain(error)}."
    except Exception as error:
        if is_out_of_memory(error):
            return None, f"{plain(error)} Lower micro_batch."
        return None, f"Unexpected {type(error).__name__}: {plain(error)}. This is probably a bug in neuclip."


def connected_world(state: Any) -> World:
    """The processes that `accelerate` has connected, with this one's share of its node's cores. Collective."""
    world = World(rank=state.process_index, size=state.num_processes, device=state.device)
    own = (socket.gethostname(), sorted(os.sched_getaffinity(0)))
    gathered = enumerate(world.gather_objects(own))
    here = [cores for rank, (host, cores) in gathered if host == own[0] and rank != world.rank]
    return replace(world, cores=cores_of_rank(own[1], others=here, quota=cpu_quota()))


@contextmanager
def start_processes(device: str = "auto") -> Iterator[tuple[World, torch.device]]:
    """The processes that the launcher started (`accelerate launch`, `torchrun`), and this one's device.

    Args:
        device: `auto`, `cpu` or `cuda`.

    Raises:
        UserError: The device is not available.
    """
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    if device == "cuda" and on_cpu:
        raise UserError("device = 'cuda', but torch sees no CUDA device here: use 'auto' or 'cpu'.")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        one = torch.device("cpu" if on_cpu else "cuda")
        keep_fp32(one)
        yield World(), one
        return
    from accelerate import PartialState

    # The first process may score a large retrieval task, or a watcher may wait, while the others are in a collective.
    # Without `cpu` it would not connect the processes of a machine that has no GPU.
    state = PartialState(cpu=on_cpu, timeout=timedelta(hours=4))
    keep_fp32(state.device)
    try:
        yield connected_world(state), state.device
    finally:
        state.destroy_process_group()
