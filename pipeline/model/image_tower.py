"""Replacements in open_clip's image towers: patch dropout on the device, a last block for one token, norms, patches.

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
from open_clip.transformer import LayerNorm, ResidualAttentionBlock, VisionTransformer
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from pipeline.errors import UserError
from pipeline.model.attention import PackedAttention, attend, replace_modules


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
    """A vision transformer whose last block computes the class token only."""

    def forward_intermediates(self, *_: Any, **__: Any) -> Any:
        raise UserError("The last block has no patches to return: build the towers with model.packed_attention=false.")


def use_class_token_block(clip: nn.Module) -> None:
    """Let the image tower's last block compute the class token only, where nothing else of it is read.

    Call this after `use_packed_attention`: it needs open_clip's default transformer blocks with packed attention.
    """
    visual: Any = clip.visual
    if type(visual) is not VisionTransformer or not visual.transformer.resblocks:
        return
    block = visual.transformer.resblocks[-1]
    alone = visual.attn_pool is None and visual.pool_type == "tok" and not visual.output_tokens
    if alone and type(block) is ResidualAttentionBlock and type(block.attn) is PackedAttention:
        replace_modules(clip, {visual: ClassTokenTower, block: ClassTokenBlock, block.attn: ClassTokenAttention})


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


def use_patch_dropout_on_device(clip: nn.Module) -> None:
    """Replace open_clip's patch dropout in a model by the above, in place."""
    from open_clip.transformer import PatchDropout as Original

    for module in clip.modules():
        dropout = getattr(module, "patch_dropout", None)
        if isinstance(dropout, Original) and dropout.exclude_first_token:
            module.patch_dropout = PatchDropout(dropout.prob)


class Fp32BatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` for bf16 training: statistics, gain and bias are used in fp32; the output has the input's dtype.

    torch's own module refuses bf16 gains together with fp32 running statistics, and bf16 running statistics would
    stop moving: at momentum 0.1, every change below one per cent is rounded away. The state dict keeps its names.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        moves = self.training and self.track_running_stats
        if moves and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        from_batch = self.training or self.running_mean is None
        uses_running = moves or not from_batch
        return F.batch_norm(
            x,
            self.running_mean if uses_running else None,
            self.running_var if uses_running else None,
            self.weight.float(),
            self.bias.float(),
            from_batch,
            self.momentum or 0.0,
            self.eps,
        )


class Fp32BatchNormAct2d(Fp32BatchNorm2d, BatchNormAct2d):
    """The same for timm's batch norm with an activation, which MobileCLIP and timm's ResNets have."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        activated: Tensor = self.act(self.drop(super().forward(x)))
        return activated


def use_fp32_batch_norms(model: nn.Module) -> None:
    """Replace every `nn.BatchNorm2d` of a model, torch's and timm's, by one in fp32."""
    kinds = {nn.BatchNorm2d: Fp32BatchNorm2d, BatchNormAct2d: Fp32BatchNormAct2d}
    replace_modules(model, {module: kinds[type(module)] for module in model.modules() if type(module) in kinds})


class Bf16LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that under CUDA's autocast computes bf16 inputs as with bf16 weights; sums are in fp32.

    Autocast would make fp32 copies of input and output, and keep the input's for the backward pass.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.in_bf16(x) if x.is_cuda and x.dtype == torch.bfloat16 else super().forward(x)

    def in_bf16(self, x: Tensor) -> Tensor:
        """As `forward` with bf16 weights, on any device."""
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def use_bf16_layer_norms(visual: nn.Module) -> None:
    """Replace the layer norms of a tower that `is_bf16_under_autocast` by the above."""
    if is_bf16_under_autocast(visual):
        replace_modules(visual, {module: Bf16LayerNorm for module in visual.modules() if type(module) is LayerNorm})


def is_bf16_under_autocast(visual: nn.Module) -> bool:
    """Whether autocast has bf16 between an image tower's blocks; timm's add fp32 position embeddings."""
    return isinstance(visual, VisionTransformer)


class PatchProduct(nn.Conv2d):
    """The convolution that divides an image into patches, computed on GPUs as a matrix product.

    A kernel that is as large as its stride sees every pixel once. cuDNN's gradient of its weights is slow: this
    convolution took 18 of 167 ms of a step of ViT-B/32 with 1,024 pairs on an H200, of which nearly all goes. On CPUs
    the convolution is as fast.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, D, H // P, W // P]; pixels that fill no whole patch are not read."""
        return self.product(x) if x.is_cuda else super().forward(x)

    def product(self, x: Tensor) -> Tensor:
        """As `forward`, on any device."""
        (height, width), (rows, channels) = self.kernel_size, x.shape[:2]
        down, across = x.shape[2] // height, x.shape[3] // width
        x = x[:, :, : down * height, : across * width].view(rows, channels, down, height, across, width)
        patches = x.permute(0, 2, 4, 1, 3, 5).reshape(rows, down * across, -1)
        return F.linear(patches, self.weight.flatten(1), self.bias).transpose(1, 2).unflatten(2, (down, across))


def use_patch_product(visual: nn.Module) -> None:
    """Replace the patch embedding of a vision transformer, which has no other convolution, by a `PatchProduct`."""
    convolutions = [module for module in visual.modules() if isinstance(module, nn.Conv2d)]
    plain = [m for m in convolutions if m.padding in ((0, 0), "valid") and m.dilation == (1, 1) and m.groups == 1]
    if len(convolutions) == 1 and plain and type(plain[0]) is nn.Conv2d and plain[0].kernel_size == plain[0].stride:
        replace_modules(visual, {plain[0]: PatchProduct})
