"""Estimates of a run's memory and data, without computing values.

Memory counts weights, gradients, optimizer, normalizer network, tables and what autograd saves for backward; workspaces
of kernels and fragmentation come on top. An objective's part is that of a step on the meta device, on one of many ranks
that do not exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.data.data_config import PREFETCH, DataConfig
from pipeline.data.loading.blocks import SPARE
from pipeline.data.order.canonical_order import Order
from pipeline.distributed.world import World
from pipeline.engine.engine_config import BUCKET
from pipeline.objectives import ObjectiveMemory, build_objective
from pipeline.objectives.registry import ObjectiveConfig

META = torch.device("meta")


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU that do not depend on the batch; `buffers` are those of the engine's communication."""

    weights: int
    gradients: int
    masters: int
    moments: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def engine_memory(
    parameters: int,
    *,
    stage: int,
    bf16: bool,
    ranks: int,
    bucket: int = BUCKET,
    average: bool = False,
    trained: int | None = None,
) -> EngineMemory:
    """Bytes per GPU of DeepSpeed's ZeRO stages with AdamW, configured as in `ds_configs/`.

    Stage 0 keeps fp32 weights (bf16 by autocast). Stages 1 to 3 hold weights in bf16 (or fp32) and partition fp32
    masters and moments among the ranks. They accumulate gradients in fp32: whole at stage 1, partitioned at 2 and 3.
    Stage 3 also partitions the weights; the layers that it gathers at a time are counted as buffers. An average of the
    weights (EMA) is counted with the masters.

    Of the towers' `parameters`, those that are not `trained` (None: all are) have no gradients, masters or moments.
    `bucket` is the number of elements that are reduced at once.
    """
    compute = 2 if bf16 and stage > 0 else 4
    trained = parameters if trained is None else trained
    share, bucket = -(-trained // ranks), min(bucket, trained)
    if stage == 0:
        kept = 4 * trained if average else 0
        return EngineMemory(compute * parameters, 4 * trained, kept, 8 * trained, 4 * bucket)
    weights = compute * (-(-parameters // ranks) if stage == 3 else parameters)
    gradients = 4 * (trained if stage == 1 else share)
    reduced = 4 if stage == 1 else compute  # stage 1 reduces the fp32 accumulators
    return EngineMemory(weights, gradients, (8 if average else 4) * share, 8 * share, reduced * bucket)


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


def simulate_objective(
    config: ObjectiveConfig, *, dim: int, batch_size: int, ranks: int, **facts: Any
) -> tuple[ObjectiveMemory, dict[str, int]]:
    """Take two steps of an objective without values: the memory of one rank's part, and the traffic of the second step.

    `batch_size` is over all ranks; `facts` are dataset_size, steps_per_epoch and total_steps, as for `build_objective`.

    Returns:
        Bytes, and calls of each collective and bytes that this rank contributes, see `World.traffic`.
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
    return objective.memory(), dict(world.traffic)


def host_bytes(config: DataConfig, order: Order, *, ranks: int, image_size: int) -> tuple[int, int]:
    """One rank's host memory: encoded samples in its shuffle buffers, on average, and decoded batches kept ready."""
    layout, manifest = order.layout, order.mixture.manifest
    buffered = min(config.shuffle_buffer, layout.stream_length) / 2 * layout.streams / ranks
    local = layout.global_batch // ranks
    return round(buffered * manifest.bytes / manifest.n), (PREFETCH + SPARE) * local * 3 * image_size**2
