"""Embedding tables whose gradient is summed in fp32 on CPUs.

torch's CPU kernel adds the gradients of a token's occurrences in the dtype of the table. In bf16 a sum stops growing
once it is 256 times a summand, which the padding token of a micro-batch exceeds easily. CUDA's kernel sums in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Fp32SumEmbedding(nn.Embedding):
    """`nn.Embedding` that reads its table with `lookup` where that matters."""

    def forward(self, input: Tensor) -> Tensor:
        """[...] ids -> [..., D]."""
        if _needs_fp32_sum(self.weight):
            return lookup(input, self.weight, padding=self.padding_idx)
        return super().forward(input)


def lookup(ids: Tensor, table: Tensor, *, padding: int | None = None) -> Tensor:
    """[...] ids and a table [V, D] -> [..., D]; the gradient of row `padding` is 0.

    Unlike indexing, its backward pass adds in a fixed order on CUDA, and in fp32 on CPUs.
    """
    if not _needs_fp32_sum(table):
        return nn.functional.embedding(ids, table, padding)
    found: Tensor = _Lookup.apply(ids, table, padding)
    return found


def _needs_fp32_sum(table: Tensor) -> bool:
    return table.device.type == "cpu" and table.dtype != torch.float32


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding = table.shape, padding
        return torch.embedding(table, ids)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        used, place = ids.flatten().unique(return_inverse=True)
        width = ctx.shape[1]
        sums = torch.zeros((len(used), width)).index_add_(0, place, upstream[0].reshape(-1, width).float())
        if ctx.padding is not None:
            sums[used == ctx.padding] = 0
        gradient = upstream[0].new_zeros(ctx.shape)
        gradient[used] = sums.to(gradient.dtype)
        return None, gradient, None


def use_fp32_embedding_sums(model: nn.Module) -> None:
    """Turn every plain `nn.Embedding` with a dense gradient into a `Fp32SumEmbedding`, in place."""
    for module in model.modules():
        if type(module) is nn.Embedding and not (module.sparse or module.scale_grad_by_freq or module.max_norm):
            module.__class__ = Fp32SumEmbedding
