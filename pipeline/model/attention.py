"""Self-attention with one matrix product for queries, keys and values, on the parameters of open_clip's modules.

`nn.MultiheadAttention`, which open_clip's transformers use, copies the joint projection into another layout and gives
a causal mask as a matrix of floats, for which there are no flash kernels. The classes here compute the same function
with views of the projection and `is_causal`. They replace the class of existing modules, so that names, parameters and
hooks stay: state dicts are unchanged, and DeepSpeed gathers parameters (ZeRO-3) as before.

Shape legend: B rows, L tokens, D width, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = 4


@dataclass(frozen=True)
class PackedLayout:
    """Where texts are in a row of tokens, [1, T, D]; given to open_clip's blocks in place of a mask."""

    cumulative: Tensor
    """int32 [B + 1]: each text's first token, and T."""
    longest: int
    groups: tuple[tuple[int, int], ...]
    """(texts, width) of padded groups of similar lengths, for devices without a kernel for packed texts."""
    places: Tensor
    """[P]: the tokens of all groups, P = sum of texts * width. Padding repeats a text's last token."""
    order: Tensor
    """[T]: where each token of the row is among these."""

    @classmethod
    def of(cls, lengths: Tensor, *, device: torch.device) -> PackedLayout:
        """The layout of texts one behind the other, given [B] lengths on the host."""
        sizes = lengths.numpy()
        ends = np.cumsum(sizes)
        by_length = np.argsort(sizes, kind="stable")
        groups, places, order, first = [], [], np.empty(int(ends[-1]), dtype=np.int64), 0
        for rows in (part for part in np.array_split(by_length, GROUPS) if len(part)):
            width = int(sizes[rows].max())
            within = np.minimum(np.arange(width), sizes[rows, None] - 1)
            found = (ends[rows] - sizes[rows])[:, None] + within
            padded = first + np.arange(found.size).reshape(found.shape)
            real = np.arange(width) < sizes[rows, None]
            order[found[real]] = padded[real]
            groups.append((len(rows), width))
            places.append(found.ravel())
            first += found.size
        cumulative = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))
        arrays = (cumulative, torch.from_numpy(np.concatenate(places)), torch.from_numpy(order))
        bounds, placed, ordered = (to_device(values, device) for values in arrays)
        return cls(bounds, int(sizes.max()), tuple(groups), placed, ordered)

    def to(self, dtype: torch.dtype) -> PackedLayout:
        """This layout: open_clip's blocks cast what they take for a mask."""
        return self


class PackedAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` for self-attention on [B, L, D]."""

    causal = False

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | PackedLayout | None = None, **_: Any
    ) -> Any:
        """[B, L, D] -> ([B, L, D], None). `key` and `value` must equal `query`, and are not read.

        They need not be the same objects: ZeRO-3 passes every argument through a function of its own.
        """
        qkv = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        if isinstance(attn_mask, PackedLayout):
            return self.out_proj(attend_packed(qkv, attn_mask, heads=self.num_heads)), None
        q, k, v = qkv.chunk(3, dim=-1)
        attended = attend(q, k, v, heads=self.num_heads, mask=attn_mask, causal=self.causal)
        return self.out_proj(attended), None


class CausalPackedAttention(PackedAttention):
    """Token i sees tokens 0 to i. The mask that open_clip passes says the same and is ignored."""

    causal = True


def attend(
    q_BLD: Tensor, k_BLD: Tensor, v_BLD: Tensor, *, heads: int, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Multi-head attention.

    On CPUs bf16 inputs are computed in fp32, in which the backward pass of torch's fused attention is faster there.

    Args:
        q_BLD: Queries, [B, L, D]; there may be fewer of them than keys.
        k_BLD: Keys.
        v_BLD: Values.
        heads: H, a divisor of D.
        mask: Added to the logits, [L, L] or open_clip's [B H, L, L].
        causal: Use the causal mask instead of `mask`.

    Returns:
        As `q_BLD`.
    """
    rows, length, _ = q_BLD.shape
    if causal:
        mask = None
    elif mask is not None and mask.dim() == 3:
        mask = mask.view(rows, heads, length, length)
    if q_BLD.device.type == "cpu" and q_BLD.dtype == torch.bfloat16:
        mask = None if mask is None else mask.float()
        with torch.autocast("cpu", enabled=False):
            out = _attend(q_BLD.float(), k_BLD.float(), v_BLD.float(), heads=heads, mask=mask, causal=causal)
        return out.to(q_BLD.dtype)
    return _attend(q_BLD, k_BLD, v_BLD, heads=heads, mask=mask, causal=causal)


def attend_packed(qkv: Tensor, layout: PackedLayout, *, heads: int) -> Tensor:
    """Causal attention within each text of a packed row, [1, T, 3 D] -> [1, T, D].

    On CUDA in 16 bits by torch's kernel for variable lengths, elsewhere in groups of texts of similar length: a text's
    padding comes after it, where causal attention does not look.
    """
    if qkv.device.type == "cuda" and qkv.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (x.unflatten(-1, (heads, -1)).contiguous() for x in qkv[0].chunk(3, dim=-1))
        ends = layout.cumulative
        out = varlen_attn(q, k, v, ends, ends, layout.longest, layout.longest, window_size=(-1, 0))
        assert isinstance(out, Tensor)
        return out.flatten(1)[None]
    outs, first = [], 0
    padded = qkv[0].index_select(0, layout.places)
    for texts, width in layout.groups:
        group = padded[first : first + texts * width].view(texts, width, -1)
        q, k, v = group.chunk(3, dim=-1)
        outs.append(attend(q, k, v, heads=heads, causal=True).flatten(0, 1))
        first += texts * width
    return torch.cat(outs).index_select(0, layout.order)[None]


def _attend(q_BLD: Tensor, k_BLD: Tensor, v_BLD: Tensor, *, heads: int, mask: Tensor | None, causal: bool) -> Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q_BLD, k_BLD, v_BLD))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2).flatten(2)


def use_packed_attention(clip: nn.Module) -> int:
    """Replace the self-attention of all of open_clip's transformers in a model, in place.

    Towers of other libraries (timm, Hugging Face) are left alone; timm's attention is packed already.

    Returns:
        The number of modules replaced.
    """
    from open_clip.transformer import ResidualAttentionBlock

    causal = causal_text_transformer(clip)
    inside = set(causal.modules()) if causal is not None else set()
    count = 0
    for block in clip.modules():
        attention = getattr(block, "attn", None)
        if isinstance(block, ResidualAttentionBlock) and not hasattr(block, "ln_1_kv") and _can_pack(attention):
            attention.__class__ = CausalPackedAttention if block in inside else PackedAttention
            count += 1
    return count


def causal_text_transformer(clip: nn.Module) -> nn.Module | None:
    """The text tower's transformer if all that masks its attention is the causal mask; else None."""
    from open_clip.model import CLIP
    from open_clip.transformer import TextTransformer, Transformer

    text = clip if isinstance(clip, CLIP) else getattr(clip, "text", None)
    if not isinstance(text, CLIP | TextTransformer) or text.attn_mask is None:
        return None
    if isinstance(text, TextTransformer) and text.cls_emb is not None:  # CoCa also masks its class token
        return None
    return text.transformer if type(text.transformer) is Transformer else None


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device. Through page-locked memory: for other memory the host may wait for the GPU."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def _can_pack(attention: object) -> TypeGuard[nn.MultiheadAttention]:
    return (
        type(attention) is nn.MultiheadAttention
        and attention._qkv_same_embed_dim
        and attention.batch_first
        and attention.bias_k is None
        and not attention.add_zero_attn
        and attention.dropout == 0.0
    )
