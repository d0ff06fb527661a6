"""The processes of an evaluation: `accelerate` starts and connects them; one process needs neither.

All classes here have `rank`, `size` and `gather_objects`. So does `pipeline.distributed.world.World`, so that an
evaluation inside a training run uses the run's own processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch

from pipeline.errors import UserError


class Processes(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather_objects(self, value: Any) -> list[Any]:
        """One value per process, in rank order, on every process."""


@dataclass(frozen=True)
class Alone:
    rank: int = 0
    size: int = 1

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


@dataclass(frozen=True)
class Accelerated:
    """Several processes, connected by `accelerate`."""

    state: Any
    rank: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", int(self.state.process_index))
        object.__setattr__(self, "size", int(self.state.num_processes))

    def gather_objects(self, value: Any) -> list[Any]:
        from accelerate.utils import gather_object

        return list(gather_object([value]))


@contextmanager
def start_processes(device: str = "auto") -> Iterator[tuple[Processes, torch.device]]:
    """The processes that the launcher started (`accelerate launch`, `torchrun`), and this one's device.

    Raises:
        UserError: The device is not available.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device = {device!r} is not known. Allowed: auto, cpu, cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda', but torch sees no CUDA device here: use 'auto' or 'cpu'.")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Alone(), torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
        return
    from accelerate import PartialState

    # The first process may score a large retrieval task, or a watcher may wait, while the others are in a collective.
    state = PartialState(cpu=device == "cpu", timeout=timedelta(hours=4))
    try:
        yield Accelerated(state), state.device
    finally:
        state.destroy_process_group()
