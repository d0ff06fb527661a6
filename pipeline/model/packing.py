"""Texts of different lengths in one row, without padding.

All of a causal text tower but its attention works on each token alone, so the texts of a micro-batch can be computed
one behind the other: as many tokens as there are, instead of the longest text's for each. `attention.PackedLayout`
tells the attention where each text is. Features and gradients stay the same up to rounding.

Shape legend: B texts, L tokens of the context, T tokens of all texts together, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.model.attention import PackedLayout, to_device
from pipeline.model.embedding import lookup


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
