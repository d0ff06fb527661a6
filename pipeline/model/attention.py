"""Self-attention with one matrix product for queries, keys and values, on the parameters of open_clip's modules.

`nn.MultiheadAttention`, which open_clip's transformers use, copies the joint projection into another layout and gives
a causal mask as a matrix of floats, for which there are no flash kernels. The classes here compute the same function
with views of the projection and `is_causal`. They replace the class of existing modules, so that names, parameters and
hooks stay: state dicts are unchanged, and DeepSpeed gathers parameters (ZeRO-3) as before.

Shape legend: B rows, L tokens, D width, H heads.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PackedAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` for self-attention on [B, L, D]."""

    causal = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, **_: Any) -> Any:  # type: ignore[override]
        """[B, L, D] -> ([B, L, D], None). `key` and `value` must equal `query`, and are not read.

        They need not be the same objects: ZeRO-3 passes every argument through a function of its own.
        """
        q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
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
        q_BLD: queries, [B, L, D]; there may be fewer of them than keys.
        k_BLD: keys.
        v_BLD: values.
        heads: H, a divisor of D.
        mask: added to the logits, [L, L] or open_clip's [B H, L, L].
        causal: use the causal mask instead of `mask`.

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


def _can_pack(attention: object) -> TypeGuard[nn.MultiheadAttention]:
    return (
        type(attention) is nn.MultiheadAttention
        and attention._qkv_same_embed_dim
        and attention.batch_first
        and attention.bias_k is None
        and not attention.add_zero_attn
        and attention.dropout == 0.0
    )
