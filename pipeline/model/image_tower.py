"""Replacements in open_clip's vision transformers: patch dropout on the device, and a last block for one token.

A CLIP ViT's feature is its class token after the last block. In that block, patches only matter as keys and values:
their queries, their output projection and their MLP are computed and then thrown away. That is 5/6 of the products of
the block's matrices, about 7% of a tower of 12 blocks. The blocks here leave them out; feature and gradients stay the
same up to rounding, and so does the state dict.

Shape legend: B images, L tokens (the class token and the patches), D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from open_clip.transformer import ResidualAttentionBlock, VisionTransformer
from torch import Tensor, nn

from pipeline.errors import UserError
from pipeline.model.attention import PackedAttention, attend

NO_PATCHES = "the last block computes the class token only. Build the towers with model.trim_image=false."


class ClassTokenAttention(PackedAttention):
    """Attention of the first token to all tokens."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Any:  # type: ignore[override]
        """[B, L, D] -> ([B, 1, D], None). `key` and `value` must equal `query`, and are not read."""
        width = query.shape[-1]
        # One split of the weights, because the gradients of separate slices would each be padded to the whole.
        query_weight, rest_weight = self.in_proj_weight.split((width, 2 * width))
        query_bias, rest_bias = self.in_proj_bias.split((width, 2 * width))
        q = F.linear(query[:, :1], query_weight, query_bias)
        k, v = F.linear(query, rest_weight, rest_bias).chunk(2, dim=-1)
        return self.out_proj(attend(q, k, v, heads=self.num_heads)), None


class ClassTokenBlock(ResidualAttentionBlock):
    """A transformer block of which only the first token is read."""

    def forward(self, q_x: Tensor, *_: Any, **__: Any) -> Tensor:
        """[B, L, D] -> [B, 1, D]."""
        x = q_x[:, :1] + self.ls_1(self.attention(self.ln_1(q_x)))
        return x + self.ls_2(self.mlp(self.ln_2(x)))


class ClassTokenTower(VisionTransformer):
    """A vision transformer whose last block computes the class token only, and which therefore returns no patches."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, d]."""
        if self.output_tokens:
            raise UserError(f"output_tokens: {NO_PATCHES}")
        feature: Tensor = super().forward(x)
        return feature

    def forward_intermediates(self, *_: Any, **__: Any) -> Any:
        raise UserError(f"forward_intermediates: {NO_PATCHES}")


def use_class_token_block(clip: nn.Module, *, wanted: bool | None) -> None:
    """Let the image tower's last block compute the class token only, in place, where that is exact.

    The tower then refuses `forward_intermediates` and `output_tokens`, which would return the last block's patches.

    Args:
        clip: open_clip's model, after `use_packed_attention`.
        wanted: `model.trim_image`.

    Raises:
        UserError: It is demanded, and would change what this model computes.
    """
    if wanted is False:
        return
    visual: Any = clip.visual
    reason = why_all_tokens(visual)
    if wanted and reason:
        raise UserError(f"model.trim_image=true: {reason} Use model.trim_image=false, or leave it out.")
    if reason is None:
        block = visual.transformer.resblocks[-1]
        visual.__class__, block.__class__, block.attn.__class__ = ClassTokenTower, ClassTokenBlock, ClassTokenAttention


def why_all_tokens(visual: Any) -> str | None:
    """Why an image tower's last block must compute all tokens; None if the class token is enough."""
    if type(visual) is not VisionTransformer:
        return "The image tower is not a vision transformer of open_clip's own."
    if visual.attn_pool is not None or visual.pool_type != "tok" or visual.output_tokens:
        return "The image tower's features are not those of its class token alone."
    if not visual.transformer.resblocks:
        return "The image tower has no transformer blocks."
    block = visual.transformer.resblocks[-1]
    if type(block) is not ResidualAttentionBlock or type(block.attn) is not PackedAttention:
        return "It needs packed attention (model.packed_attention, and open_clip's default transformer blocks)."
    return None


class PatchDropout(nn.Module):
    """Keeps a random subset of each image's patches in training, and the class token before them.

    open_clip's own module draws on the CPU, so that every step on a GPU waits for the host, and its backward pass
    is a slow scatter with repeated indices. On a CPU both draw the same patches and give the same values.
    """

    def __init__(self, share: float) -> None:
        """`share` is the share of the patches that is dropped, in [0, 1)."""
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """[B, 1 + patches, D] -> [B, 1 + kept, D] in training, unchanged otherwise."""
        if not self.training or self.share == 0.0:
            return x
        rows, length, width = x.shape
        kept = max(1, int((length - 1) * (1 - self.share)))
        order = torch.randn(rows, length - 1, device=x.device).topk(kept, dim=-1).indices
        patches = x[:, 1:].gather(1, order[..., None].expand(-1, -1, width))
        return torch.cat((x[:, :1], patches), dim=1)

    def extra_repr(self) -> str:
        return f"share={self.share}"


def use_patch_dropout_on_device(clip: nn.Module) -> None:
    """Replace open_clip's patch dropout in a model by the above, in place."""
    from open_clip.transformer import PatchDropout as Original

    for module in clip.modules():
        dropout = getattr(module, "patch_dropout", None)
        if isinstance(dropout, Original) and dropout.exclude_first_token:
            module.patch_dropout = PatchDropout(dropout.prob)
