"""Texts of different lengths in one row, without padding, and lookups whose gradients are summed in fp32.

All of a causal text tower but its attention works on each token alone, so the texts of a micro-batch can be computed
one behind the other: as many tokens as there are, instead of the longest text's for each. `attention.PackedLayout`
tells the attention where each text is. Features and gradients stay the same up to rounding.

torch's CPU kernel adds the gradients of a token's occurrences in the dtype of the embedding table. In bf16 a sum stops
growing once it is 256 times a summand, which the padding token of a micro-batch exceeds easily. CUDA's kernel sums in
fp32.

Shape legend: B texts, L tokens of the context, T tokens of all texts together, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.model.attention import PackedLayout, to_device


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


@dataclass(frozen=True)
class PackedText:
    """The tokens of some texts, in the texts' order."""

    tokens: Tensor
    """[1, T]"""
    positions: Tensor
    """[1, T]: each token's place in its text."""
    ends: Tensor
    """[B]: the place in the row of each text's last token."""
    layout: PackedLayout

    def __len__(self) -> int:
        return len(self.ends)


def pack(text: Tensor, lengths: Tensor) -> PackedText:
    """Pack [B, L] tokens.

    Args:
        text: The tokens, on the device.
        lengths: [B] tokens of each text, on the host; places are computed there, without waiting for the device.
    """
    total, device = int(lengths.sum()), text.device
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(total) - starts.repeat_interleave(lengths)
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    places = to_device(rows * text.shape[1] + positions, device)
    return PackedText(
        tokens=text.reshape(-1).index_select(0, places)[None],
        positions=to_device(positions[None], device),
        ends=to_device(starts + lengths - 1, device),
        layout=PackedLayout.of(lengths, device=device),
    )


def encode_packed(clip: nn.Module, text: PackedText) -> Tensor:
    """`clip.encode_text` for packed texts, [B, d] before normalisation; for towers that `why_not_trimmed` accepts."""
    from open_clip.model import CLIP

    tower: Any = clip if isinstance(clip, CLIP) else clip.text
    dtype = tower.transformer.get_cast_dtype()
    embedded = tower.token_embedding(text.tokens).to(dtype)
    x = embedded + lookup(text.positions, tower.positional_embedding).to(dtype)
    x = tower.transformer(x, attn_mask=text.layout)[0]
    pooled: Tensor = tower.ln_final(x.index_select(0, text.ends))
    projection = tower.text_projection
    if projection is None:
        return pooled
    return projection(pooled) if isinstance(projection, nn.Linear) else pooled @ projection
