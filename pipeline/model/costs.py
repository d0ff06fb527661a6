"""What a run will cost in memory, arithmetic and time, told before it starts: pure functions and shapes on "meta".

Every figure is a stated estimate. Memory counts what is certain (weights, gradients, optimizer, normalizer network,
tables) and what autograd saves for backward; kernels' workspaces and the allocator's slack come on top. Time is
arithmetic divided by peak rate x MFU, where MFU (the share of the peak that useful arithmetic reaches) is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config import section

GIB = 2**30
BUCKET = 500_000_000
"""DeepSpeed's default `reduce_bucket_size`: elements that are reduced at once, and kept in a buffer for it; the engine
never asks for more than the model has."""


@section
class PlanConfig:
    """What `neuclip plan` assumes about machine and data. Training does not read it."""

    gpus: int = Field(default=1, ge=1)
    peak_tflops: float = Field(default=989.0, gt=0)
    """Dense bf16 rate of one GPU: H100 and H200 989, A100 312, L40S 362, T4 (fp16) 65."""
    gpu_gib: float = Field(default=80.0, gt=0)
    mfu: float = Field(default=0.3, gt=0, le=1)
    """Share of the peak that executed arithmetic reaches, recomputation included."""
    dataset_size: int | None = Field(default=None, ge=1)
    """Samples to expect as long as the data's manifest is not there."""
    sample_bytes: int = Field(default=30_000, ge=1)
    """Stored bytes of a sample to expect as long as the data's manifest is not there."""


@dataclass(frozen=True)
class TowerCosts:
    """Of one pair: forward_flops (a multiply-add is 2), saved_bytes (for backward, in fp32); and all parameters."""

    parameters: int
    forward_flops: float
    saved_bytes: float
    context_length: int


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU that do not depend on the batch. buffers: of the engine's communication."""

    weights: int
    gradients: int
    masters: int
    moments: int
    buffers: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.moments + self.buffers


@dataclass(frozen=True)
class ObjectiveMemory:
    """replicated: bytes of the state that every rank holds; per_sample: bytes of each sample's row, over all ranks."""

    replicated: int
    per_sample: float


@dataclass(frozen=True)
class Cost:
    """steps, epochs and samples of the budget; text_tokens seen; flops as executed, with recomputation; gpu_hours."""

    steps: int
    samples: int
    epochs: float
    text_tokens: int
    read_bytes: int
    flops: float
    gpu_hours: float


def measure_towers(towers: nn.Module, *, image_size: int, context_length: int) -> TowerCosts:
    """Count parameters, arithmetic and saved tensors of towers on the meta device, where nothing is computed."""

    def forward(batch: int) -> Any:
        image = torch.zeros(batch, 3, image_size, image_size, device="meta")
        return towers(image, torch.zeros(batch, context_length, dtype=torch.int64, device="meta"))

    towers.train()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        forward(2)
    one, two = (_saved_bytes(lambda b=b: forward(b), towers) for b in (2, 4))  # type: ignore[misc]
    return TowerCosts(
        parameters=sum(p.numel() for p in towers.parameters()),
        forward_flops=counter.get_total_flops() / 2,
        saved_bytes=(two - one) / 2,
        context_length=context_length,
    )


def engine_memory(parameters: int, *, stage: int, bf16: bool, ranks: int, bucket: int = BUCKET) -> EngineMemory:
    """Bytes per GPU of DeepSpeed's ZeRO stages with AdamW, as this project's ds_configs set them.

    Stage 0 keeps fp32 weights (bf16 by autocast). Stages 1 to 3 hold weights in bf16 (or fp32), fp32 masters and
    moments shared among the ranks, and accumulate gradients in fp32: whole at stage 1, shared from 2 on. Stage 3 also
    shares the weights; the layers gathered at a time are counted as buffers.
    """
    compute = 2 if bf16 and stage > 0 else 4
    share = -(-parameters // ranks)
    if stage == 0:
        return EngineMemory(compute * parameters, 4 * parameters, 0, 8 * parameters, 4 * min(bucket, parameters))
    weights = compute * (share if stage == 3 else parameters)
    gradients = 4 * (parameters if stage == 1 else share)
    reduced = 4 if stage == 1 else compute  # stage 1 reduces what it has accumulated
    return EngineMemory(weights, gradients, 4 * share, 8 * share, reduced * min(bucket, parameters))


def activation_bytes(costs: TowerCosts, *, micro_batch: int, bf16: bool) -> int:
    """What autograd saves for one micro-batch; half of fp32 under bf16, fused attention assumed."""
    return round(costs.saved_bytes * micro_batch * (0.5 if bf16 else 1.0))


def objective_memory(state: Mapping[str, Tensor], rows: Mapping[str, tuple[int, Tensor]]) -> ObjectiveMemory:
    """From an objective's `state_dict()` and, of one built for a small dataset on one rank, its `row_state_dict()`."""
    per_sample = sum(values.numel() * values.element_size() / max(1, len(values)) for _, values in rows.values())
    return ObjectiveMemory(sum(v.numel() * v.element_size() for v in state.values()), per_sample)


def run_cost(
    costs: TowerCosts, *, steps: int, batch_size: int, dataset_size: int, again: int, assume: PlanConfig
) -> Cost:
    """Arithmetic and time of a budget: backward is twice forward.

    Args: again: further forward passes of each sample (feature-cached accumulation, activation checkpointing).
    """
    samples = steps * batch_size
    flops = (3 + again) * costs.forward_flops * samples
    return Cost(
        steps=steps,
        samples=samples,
        epochs=samples / dataset_size,
        text_tokens=samples * costs.context_length,
        read_bytes=samples * assume.sample_bytes,
        flops=flops,
        gpu_hours=flops / (assume.peak_tflops * 1e12 * assume.mfu) / 3600,
    )


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Attention that saves what fused kernels save; on "meta" torch takes the plain one, which saves L x L weights.

    The function is replaced by name: torch's own multi-head attention is out of a TorchFunctionMode's reach.
    """
    functional: Any = nn.functional
    plain = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = lambda q, k, v, *_, **__: _FusedAttention.apply(q, k, v)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain


class _FusedAttention(torch.autograd.Function):
    """Shapes only: inputs, output and one log-sum per query are saved."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)  # in the layout of q, so that joining the heads copies nothing
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("shapes only")


def _saved_bytes(forward: Callable[[], Any], towers: nn.Module) -> int:
    """Bytes of distinct storages that autograd keeps for backward, parameters not counted.

    Under activation checkpointing, whose saved tensors are hidden, the inputs of the transformer's blocks count.
    """
    own = {p.untyped_storage()._cdata for p in towers.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    blocks = [block for name, m in towers.named_modules() if name.endswith("resblocks") for block in m.children()]
    handles = [block.register_forward_pre_hook(lambda _, inputs: (keep(inputs[0]), None)[1]) for block in blocks]
    with _fused_attention(), saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    for handle in handles:
        handle.remove()
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
