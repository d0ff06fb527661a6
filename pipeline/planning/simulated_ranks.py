"""A step of an objective on one of many ranks that do not exist: what it keeps in memory, and what it communicates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.distributed.world import World
from pipeline.objectives import ObjectiveMemory, build_objective
from pipeline.objectives.base import ObjectiveConfig

META = torch.device("meta")


@dataclass(frozen=True)
class SimulatedRanks(World):
    """One of `size` ranks whose collectives return tensors of the right shapes, and count calls and bytes."""

    def all_gather(self, x_b: Tensor) -> Tensor:
        if self.size == 1:
            return x_b
        with self._communication("all_gather", x_b):
            return x_b.new_empty((self.size * (x_b.shape[0] if x_b.dim() else 1), *x_b.shape[1:]))

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        if self.size == 1:
            return x.clone()
        with self._communication("all_reduce", x):
            return x.clone()


@dataclass(frozen=True)
class SimulatedObjective:
    """One rank's part of an objective."""

    memory: ObjectiveMemory
    traffic: dict[str, int]
    """Calls of each collective in a step and bytes that this rank contributes, see `World.traffic`."""


def simulate_objective(
    config: ObjectiveConfig, *, dim: int, batch_size: int, ranks: int, **facts: Any
) -> SimulatedObjective:
    """Take two steps of an objective without values, and count the second.

    Args:
        config: The objective's section.
        dim: Of the features.
        batch_size: Over all ranks.
        ranks: Their number.
        facts: dataset_size, steps_per_epoch and total_steps, as for `build_objective`.
    """
    world = SimulatedRanks(size=ranks, device=META)
    objective = build_objective(config, dim=dim, batch_size=batch_size, world=world, device=META, **facts)
    objective.drift.every = 0  # its comparison reads values, which do not exist here
    local = batch_size // ranks
    image, text = (torch.empty(local, dim, device=META) for _ in range(2))
    ids = torch.empty(local, dtype=torch.int64, device=META)
    for _ in range(2):
        world.traffic.clear()
        objective.prefetch(ids)
        objective.compute(image, text, sample_ids=ids)
        objective.commit()
    return SimulatedObjective(objective.memory(), dict(world.traffic))
