"""No arithmetic on padding: texts cut after the longest of a micro-batch, or packed one behind the other.

In a causal text tower no token sees a later one, and the text's feature is read at its end-of-text token. Everything
behind the last end-of-text token of a micro-batch can therefore be left out, and features and gradients stay the same.

Shape legend: B texts, L tokens of the context, l tokens that are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.distributed.devices import to_device
from pipeline.model.attention import CausalPackedAttention, PackedText, causal_text_transformer, lookup, pack

MULTIPLE = 8
"""Widths are multiples of this: efficient for kernels, and few different shapes to compile."""


@dataclass(frozen=True)
class TextTrimming:
    """How many tokens of a text a tower reads."""

    eos_id: int | None
    """The end-of-text token, the first of which is read; None: the largest token is the end of the text."""
    longest: int | None = None
    """Texts with more tokens are cut to as many, the last of which is their end-of-text token."""

    def cut(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """[B, L] tokens -> the same with each text cut to `longest` tokens, and the texts' lengths.

        A length, int64 [B], is the number of tokens up to and including the one at which the feature is read.
        """
        marks = text if self.eos_id is None else (text == self.eos_id).int()
        lengths = marks.argmax(dim=-1) + 1
        if self.longest is None or self.longest >= text.shape[1]:
            return text, lengths
        ends = text.gather(1, lengths[:, None] - 1)[:, 0]
        short = torch.empty_like(text, pin_memory=text.is_pinned()).copy_(text)  # copies to a GPU stay asynchronous
        short[:, self.longest - 1] = torch.where(lengths > self.longest, ends, short[:, self.longest - 1])
        short[:, self.longest :] = 0
        return short, lengths.clamp(max=self.longest)


def trimmed_width(lengths: Tensor, *, context_length: int) -> int:
    """Width to which such texts are cut: the longest rounded up to a multiple of 8, at most the context length."""
    return min(context_length, -(-int(lengths.max()) // MULTIPLE) * MULTIPLE)


class TextChunks:
    """The texts of a local batch in micro-batches on a device: packed, or cut and, if there are several, sorted.

    A micro-batch's images and texts may be of different pairs; features and gradients are given and taken in the
    batch's order. All that the device needs is copied when this is made, without waiting for it.
    """

    def __init__(
        self,
        text: Tensor,
        chunks: Sequence[slice],
        *,
        lengths: Tensor | None = None,
        packed: bool = False,
        by_kernel: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Divide [b, L] tokens of the host (unpacked ones may be on the device), pinned if they go to a GPU.

        Args:
            text: The tokens.
            chunks: Rows of each micro-batch, without gaps from 0 to b.
            lengths: [b] on the host, of `TextTrimming`; None: neither pack nor cut.
            packed: Pack each micro-batch instead of cutting it.
            by_kernel: As for `pack`.
            device: Where the towers are; None: where the tokens are.
        """
        self.text, device = text, device or text.device
        self._rows = list[slice | Tensor](chunks)
        self.computed_tokens = text.numel()
        """Tokens that one forward pass over the local batch computes."""
        if lengths is not None and packed:
            self._tokens: list[Tensor | PackedText] = [
                pack(text[rows], lengths[rows], device=device, by_kernel=by_kernel) for rows in chunks
            ]
            self.computed_tokens = int(lengths.sum())
            return
        widths = [text.shape[1]] * len(chunks)
        if lengths is not None:
            if len(chunks) > 1:
                order = lengths.argsort(stable=True)
                lengths = lengths[order]
                order = to_device(order, device)
                self._rows = [order[rows] for rows in chunks]
            widths = [trimmed_width(lengths[rows], context_length=text.shape[1]) for rows in chunks]
            self.computed_tokens = sum(len(lengths[rows]) * w for rows, w in zip(chunks, widths, strict=True))
        whole = text.to(device, non_blocking=True)
        self._tokens = [whole[rows, :width] for rows, width in zip(self._rows, widths, strict=True)]

    def tokens(self, index: int) -> Tensor | PackedText:
        """[c, l] tokens of micro-batch `index`, or the packed ones."""
        return self._tokens[index]

    def tensors(self) -> Iterator[Tensor]:
        """What is in the device's memory."""
        for tokens in self._tokens:
            yield tokens.tokens if isinstance(tokens, PackedText) else tokens
        yield from (rows for rows in self._rows if isinstance(rows, Tensor))

    def rows(self, index: int, values: Tensor) -> Tensor:
        """The rows of micro-batch `index` of a [b, ...] tensor in the batch's order."""
        return values[self._rows[index]]

    def in_order(self, parts: Sequence[Tensor]) -> Tensor:
        """The micro-batches' [c, d] features as [b, d] in the batch's order."""
        joined = torch.cat(list(parts))
        if isinstance(self._rows[0], slice):
            return joined
        return torch.empty_like(joined).index_copy_(0, torch.cat(self._rows), joined)  # type: ignore[arg-type]


def text_trimming(clip: nn.Module, *, longest: int | None = None) -> TextTrimming | None:
    """How to trim texts for a model; None: that would change what it computes. `longest` is `model.text_tokens`."""
    if why_not_trimmed(clip):
        return None
    kind, eos_id = _pooling(clip)
    return TextTrimming(eos_id if kind == "eos" else None, longest)


def without_padding(text: Tensor, trimming: TextTrimming | None) -> Tensor:
    """[B, L] tokens -> [B, l], without columns that no feature of these texts depends on."""
    if trimming is None or not len(text):
        return text
    _, lengths = trimming.cut(text)
    return text[:, : trimmed_width(lengths, context_length=text.shape[1])]


def why_not_trimmed(clip: nn.Module) -> str | None:
    """Why texts cannot be cut without changing a model's features; None if they can."""
    transformer: Any = causal_text_transformer(clip)
    if transformer is None:
        return "The text tower is not a causal transformer of open_clip's: its features depend on the padding."
    if _pooling(clip)[0] not in ("argmax", "eos"):
        return f"The text tower pools by {_pooling(clip)[0]!r}, not at the end-of-text token."
    if not all(isinstance(block.attn, CausalPackedAttention) for block in transformer.resblocks):
        return "It needs packed attention (model.packed_attention, and open_clip's default transformer blocks)."
    return None


def encode_text(clip: nn.Module, text: Tensor | PackedText) -> Tensor:
    """`clip.encode_text` for packed texts, or for texts of up to the model's context length, before normalisation.

    open_clip's `CLIP.encode_text` takes texts of exactly the context length; other classes cut the position embeddings.
    """
    from open_clip.model import CLIP
    from open_clip.transformer import text_global_pool

    tower: Any = clip if isinstance(clip, CLIP) else clip.text
    if isinstance(text, PackedText):
        dtype = tower.transformer.get_cast_dtype()
        embedded = tower.token_embedding(text.tokens).to(dtype)
        x = embedded + lookup(text.positions, tower.positional_embedding).to(dtype)
        x = tower.transformer(x, attn_mask=text.layout)[0]
        pooled = tower.ln_final(x.index_select(0, text.ends))
    elif not isinstance(clip, CLIP) or text.shape[1] == tower.positional_embedding.shape[0]:
        return clip.encode_text(text)  # type: ignore[operator]
    else:
        dtype = tower.transformer.get_cast_dtype()
        x = tower.token_embedding(text).to(dtype) + tower.positional_embedding[: text.shape[1]].to(dtype)
        x = tower.ln_final(tower.transformer(x, attn_mask=tower.attn_mask))
        pooled = text_global_pool(x, text, tower.text_pool_type, getattr(tower, "text_eos_id", None))
    projection = tower.text_projection
    if projection is None:
        return pooled
    return projection(pooled) if isinstance(projection, nn.Linear) else pooled @ projection


def _pooling(clip: Any) -> tuple[str, int | None]:
    """Kind of pooling and end-of-text token of a model's text tower."""
    from open_clip.model import CLIP

    if isinstance(clip, CLIP):
        return clip.text_pool_type, getattr(clip, "text_eos_id", None)
    return getattr(clip.text, "pool_type", "?"), getattr(clip.text, "eos_id", None)
