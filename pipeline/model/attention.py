"""Self-attention with one matrix product for queries, keys and values, on the parameters of open_clip's modules.

`nn.MultiheadAttention`, which open_clip's transformers use, copies the joint projection into another layout and gives
a causal mask as a matrix of floats, for which there are no flash kernels. The classes here compute the same function
with views of the projection and `is_causal`.

Packed texts are one behind the other in a row, without padding: all of a causal text tower but its attention works on
each token alone. `PackedLayout` tells the attention where each text is.

torch's CPU kernel adds the gradients of a token's occurrences in the dtype of the embedding table. In bf16 a sum stops
growing once it is 256 times a summand, which the padding token of a micro-batch exceeds easily. So lookups here sum in
fp32, as CUDA's kernel does.

Shape legend: B rows or texts, L tokens of the context, T tokens of all texts together, D width, H heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.distributed.devices import to_device

GROUPS = 4


def replace_modules(model: nn.Module, classes: Mapping[nn.Module, type[nn.Module]]) -> None:
    """Replace modules of a model by ones of other classes that have the same parameters, submodules and attributes.

    State dicts, names and hooks stay as they are. `classes` maps modules, without the model itself, to subclasses of
    their classes.
    """
    new: dict[nn.Module, nn.Module] = {}
    for old, kind in classes.items():
        new[old] = kind.__new__(kind)
        new[old].__dict__.update(old.__dict__)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in new:
            model.set_submodule(name, new[module])


@dataclass(frozen=True)
class PackedLayout:
    """Where texts are in a row of tokens, [1, T, D]; given to open_clip's blocks in place of a mask."""

    cumulative: Tensor
    """int32 [B + 1]: each text's first token, and T."""
    context: int
    """The context length, which no text exceeds. Kernels could be given the longest text instead, but its length would
    be another constant in every batch, for which compiled towers would be compiled again."""
    groups: tuple[tuple[int, int], ...]
    """(texts, width) of padded groups of similar lengths; empty where the device has a kernel for packed texts."""
    places: Tensor
    """int32 [P]: the tokens of all groups, P = sum of texts * width. Padding repeats a text's last token."""
    order: Tensor
    """int32 [T]: where each token of the row is among these; empty without groups."""

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
    """Multi-head attention of queries, of which there may be fewer than keys and values; [B, L, D] as the queries.

    On CPUs bf16 inputs are computed in fp32, in which the backward pass of torch's fused attention is faster there.
    `mask` is added to the logits, [L, L] or open_clip's [B H, L, L], unless attention is `causal`.
    """
    rows, length, _ = q_BLD.shape
    if causal:
        mask = None
    elif mask is not None and mask.dim() == 3:
        mask = mask.view(rows, heads, length, length)
    dtype, in_fp32 = q_BLD.dtype, q_BLD.device.type == "cpu" and q_BLD.dtype == torch.bfloat16
    if in_fp32:
        q_BLD, k_BLD, v_BLD = (x.float() for x in (q_BLD, k_BLD, v_BLD))
        mask = None if mask is None else mask.float()
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q_BLD, k_BLD, v_BLD))
    with torch.autocast("cpu", enabled=False) if in_fp32 else contextlib.nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2).flatten(2)
    return out.to(dtype) if in_fp32 else out


def attend_packed(qkv: Tensor, layout: PackedLayout, *, heads: int) -> Tensor:
    """Causal attention within each text of a packed row, [1, T, 3 D] -> [1, T, D].

    By torch's kernel for variable lengths, which GPUs have in 16 bits, or in the layout's groups of texts of similar
    length: a text's padding comes after it, where causal attention does not look.
    """
    if not layout.groups:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (x.unflatten(-1, (heads, -1)).contiguous() for x in qkv[0].chunk(3, dim=-1))
        ends = layout.cumulative
        out = varlen_attn(q, k, v, ends, ends, layout.context, layout.context, window_size=(-1, 0))
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


def use_packed_attention(clip: nn.Module) -> int:
    """Replace the self-attention of all of open_clip's transformers in a model; returns how many.

    Towers of other libraries (timm, Hugging Face) are left alone; timm's attention is packed already.
    """
    from open_clip.transformer import ResidualAttentionBlock

    causal = causal_text_transformer(clip)
    inside = set(causal.modules()) if causal is not None else set()
    classes: dict[nn.Module, type[nn.Module]] = {}
    for block in clip.modules():
        attention = getattr(block, "attn", None)
        plain = isinstance(block, ResidualAttentionBlock) and not hasattr(block, "ln_1_kv")
        if not plain or type(attention) is not nn.MultiheadAttention:
            continue
        odd = attention.bias_k is not None or attention.add_zero_attn or attention.dropout
        if attention._qkv_same_embed_dim and attention.batch_first and not odd:
            classes[attention] = CausalPackedAttention if block in inside else PackedAttention
    replace_modules(clip, classes)
    return len(classes)


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


def has_packed_kernel(clip: nn.Module, device: torch.device) -> bool:
    """Whether torch's kernel for packed texts works on a device, in 16 bits, for a text tower's heads."""
    blocks: Any = getattr(causal_text_transformer(clip), "resblocks", ())
    return device.type == "cuda" and all(block.attn.head_dim % 8 == 0 for block in blocks)


class Fp32SumEmbedding(nn.Embedding):
    """`nn.Embedding` that reads its table with `lookup`."""

    def forward(self, input: Tensor) -> Tensor:
        """[...] ids -> [..., D]."""
        return lookup(input, self.weight, padding=self.padding_idx)


def lookup(ids: Tensor, table: Tensor, *, padding: int | None = None) -> Tensor:
    """[...] ids and a table [V, D] -> [..., D]; the gradient of row `padding` is 0.

    Unlike indexing, its backward pass adds in a fixed order on CUDA unless it is compiled, and in fp32 on CPUs.
    """
    if table.device.type != "cpu" or table.dtype in (torch.float32, torch.float64):
        return F.embedding(ids, table, padding)
    used, place = ids.unique(return_inverse=True)  # the whole table in fp32 would take long, and much memory
    return F.embedding(place, F.embedding(used, table, padding).float()).to(table.dtype)


def use_fp32_embedding_sums(model: nn.Module) -> None:
    """Replace every plain `nn.Embedding` with a dense gradient by a `Fp32SumEmbedding`."""
    plain = (module for module in model.modules() if type(module) is nn.Embedding)
    dense = (m for m in plain if not (m.sparse or m.scale_grad_by_freq or m.max_norm))
    replace_modules(model, dict.fromkeys(dense, Fp32SumEmbedding))


@dataclass(frozen=True)
class PackedText:
    """The tokens of some texts, in the texts' order."""

    tokens: Tensor
    """int32 [1, T]"""
    positions: Tensor
    """int32 [1, T]: each token's place in its text."""
    ends: Tensor
    """int32 [B]: the place in the row of each text's last token."""
    layout: PackedLayout

    def __len__(self) -> int:
        return len(self.ends)


def pack(text: Tensor, lengths: Tensor, *, device: torch.device, by_kernel: bool = False) -> PackedText:
    """Pack [B, L] tokens of the host, `lengths` [B] of each, and copy all that the towers need to the device at once.

    `by_kernel`: attention is computed by a kernel for packed texts, which needs no groups: on GPUs in 16 bits.
    """
    sizes = lengths.numpy()
    ends = np.cumsum(sizes)
    real = np.arange(text.shape[1]) < sizes[:, None]
    positions = np.broadcast_to(np.arange(text.shape[1]), real.shape)[real]
    groups, places, order = ((), *np.empty((2, 0))) if by_kernel else _grouped(sizes, ends)
    parts = (text.numpy()[real], positions, ends - 1, [0], ends, places, order)
    row = to_device(torch.from_numpy(np.concatenate(parts).astype(np.int32)), device)
    total, count = int(ends[-1]), len(sizes)
    tokens, positions, last, cumulative, placed, ordered = row.split(
        (total, total, count, count + 1, len(places), len(order))
    )
    layout = PackedLayout(cumulative, text.shape[1], groups, placed, ordered)
    return PackedText(tokens[None], positions[None], last, layout)


def _grouped(sizes: np.ndarray, ends: np.ndarray) -> tuple[tuple[tuple[int, int], ...], np.ndarray, np.ndarray]:
    """`groups`, `places` and `order` of a layout, for texts of [B] sizes that end before `ends` in the row."""
    groups, places, order, first = [], [], np.empty(int(ends[-1]), dtype=np.int64), 0
    for rows in (part for part in np.array_split(np.argsort(sizes, kind="stable"), GROUPS) if len(part)):
        width = int(sizes[rows].max())
        within = np.minimum(np.arange(width), sizes[rows, None] - 1)
        tokens = (ends[rows] - sizes[rows])[:, None] + within
        padded = first + np.arange(tokens.size).reshape(tokens.shape)
        real = np.arange(width) < sizes[rows, None]
        order[tokens[real]] = padded[real]
        groups.append((len(rows), width))
        places.append(tokens.ravel())
        first += tokens.size
    return tuple(groups), np.concatenate(places), order
