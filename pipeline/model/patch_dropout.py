"""Patch dropout (FLIP, arXiv:2212.00794) drawn on the model's device."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
