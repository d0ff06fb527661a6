"""Position embeddings for another image size, and the optimizer's moments of these parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.errors import UserError

RESIZABLE = "positional_embedding"
"""How open_clip names position embeddings of a class token and a square grid of patches (ViT) or pixels (ResNet)."""


def resized(name: str, value: Tensor, *, shape: torch.Size, nonnegative: bool = False) -> Tensor:
    """A parameter, or a moment of it, in the shape that it has at another image size.

    Args:
        name: The parameter's name in open_clip's state dict.
        value: [1 + g * g, D], or any tensor of `shape`, which is returned as it is.
        shape: The shape at the new size, [1 + G * G, D].
        nonnegative: Interpolate linearly, which keeps the sign, as second moments need; else by open_clip's
            bicubic rule.

    Raises:
        UserError: Only position embeddings of square grids can change their shape.
    """
    if value.shape == shape:
        return value
    old, new = (math.isqrt(s[0] - 1) if len(s) == 2 else 0 for s in (value.shape, shape))
    square = len(shape) == 2 and old**2 + 1 == len(value) and new**2 + 1 == shape[0] and value.shape[1] == shape[1]
    if not (name.startswith("visual.") and name.endswith(RESIZABLE) and square):
        raise UserError(
            f"The parameter {name} is {tuple(value.shape)} at one image size and {tuple(shape)} at the other. Only "
            "position embeddings of open_clip's own vision towers can change with the image size: keep one size for "
            "this architecture."
        )
    token, grid = value[:1].float(), value[1:].float()
    grid = grid.reshape(1, old, old, -1).permute(0, 3, 1, 2)
    mode = "bilinear" if nonnegative else "bicubic"
    grid = F.interpolate(grid, size=(new, new), mode=mode, antialias=True, align_corners=False)
    if nonnegative:
        grid = grid.clamp_min(0.0)  # rounding
    return torch.cat([token, grid.permute(0, 2, 3, 1).reshape(new * new, -1)]).to(value.dtype)


def resized_state(values: Mapping[str, Tensor], *, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Weights by open_clip's names in the shapes of a model of another image size."""
    return {name: resized(name, value, shape=shapes.get(name, value.shape)) for name, value in values.items()}


def resized_moments(
    moments: Mapping[tuple[str, str], Tensor], *, shapes: Mapping[str, torch.Size]
) -> dict[tuple[str, str], Tensor]:
    """Optimizer state by (parameter, key) in the shapes of a model of another image size."""
    return {
        (name, key): resized(name, value, shape=shapes.get(name, value.shape), nonnegative=key == "exp_avg_sq")
        for (name, key), value in moments.items()
    }
