"""Steps of objectives, of the normalizer network and of a tower's block, traced as `kernel_trace` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.distributed.world import World
from pipeline.model.attention import PackedAttention, replace_modules
from pipeline.objectives import build_objective
from pipeline.objectives.npn import kernels
from tests.cuda_without_gpu.kernel_trace import Kernel, KernelTrace, fake_gpu

DIM, PROTOTYPES, INNER_STEPS = 512, 4096, 10


@dataclass(frozen=True)
class TracedRanks(World):
    """One of `size` ranks whose collectives return tensors of the right shapes. Parts of the program are marked in the
    trace."""

    trace: KernelTrace = field(default_factory=KernelTrace, compare=False)

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

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.trace.within(self.trace.part if name == "communication" else name)


def objective_step(*, ranks: int, batch: int, **settings: Any) -> list[Kernel]:
    """One rank's step of an objective on a batch of the whole run's size, without its first step."""
    device, local = torch.device("cuda", 0), batch // ranks
    with fake_gpu() as trace, mock.patch.object(kernels, "_compiled", trace.fused):
        objective = build_objective(
            settings, dim=DIM, batch_size=batch, dataset_size=10**7, steps_per_epoch=1000,
            total_steps=10**4, world=TracedRanks(size=ranks, device=device, trace=trace), device=device,
        )  # fmt: skip
        ids = torch.zeros(local, dtype=torch.int64, device=device)
        for _ in range(2):
            trace.kernels.clear()
            image, text = (torch.empty(local, DIM, device=device) for _ in range(2))
            objective.compute(image, text, sample_ids=ids)
            objective.commit()
    return trace.kernels


def npn_step(*, ranks: int, batch: int, update: str = "replicated", compiled: bool = False) -> list[Kernel]:
    """The part of NeuCLIP's step that its network takes."""
    step = objective_step(
        ranks=ranks, batch=batch, name="neuclip", prototypes=PROTOTYPES, inner_steps=INNER_STEPS,
        npn_update=update, npn_compile=compiled,
    )  # fmt: skip
    return [kernel for kernel in step if kernel.part == "npn"]


def block_step(*, rows: int) -> list[Kernel]:
    """Forward and backward pass of one block of ViT-B/16's image tower, in bf16."""
    from open_clip.transformer import ResidualAttentionBlock

    # Autograd asks the CUDA driver for streams, so it runs on the meta device.
    with fake_gpu("meta") as trace, torch.device("meta"), flash_attention():
        block: nn.Module = ResidualAttentionBlock(768, 12).bfloat16()
        replace_modules(block, {block.attn: PackedAttention})
        x = torch.empty(rows, 197, 768, dtype=torch.bfloat16, requires_grad=True)
        trace.kernels.clear()
        with torch.enable_grad():
            out = block(x)
        out.backward(torch.empty_like(out))
    return trace.kernels


@contextmanager
def flash_attention() -> Iterator[None]:
    """Choose the attention kernel that a GPU would: on the meta device torch takes attention apart."""

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: Any, **settings: Any) -> Tensor:
        assert attn_mask is None
        causal = bool(settings.get("is_causal"))
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)[0]
        return out

    with mock.patch.object(F, "scaled_dot_product_attention", attend):
        yield
