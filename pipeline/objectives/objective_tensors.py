"""Helpers of `Objective`: a loss with known gradients for autograd, and restoring tensors in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import UserError


class WithGradient(torch.autograd.Function):
    """A loss whose gradients with respect to the features are known already."""

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, text: Tensor, loss: Tensor, gradients: tuple[Tensor, Tensor], scale: int
    ) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.scale, ctx.dtypes = scale, (image.dtype, text.dtype)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale = upstream[0] * ctx.scale
        image, text = ((g * scale).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return image, text, None, None, None


def load_tensors(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy `state[key]` into `own[key]` for every key of `own`, in place.

    Raises:
        UserError: A key is missing or a shape differs; then nothing has been changed.
    """
    for key, tensor in own.items():
        if key not in state:
            raise UserError(
                f"The saved objective state has no {key}; it holds {', '.join(sorted(state)) or 'nothing'}. "
                "Resume with the objective settings that the checkpoint was written with."
            )
        if state[key].shape != tensor.shape:
            raise UserError(
                f"The saved {key} has shape {tuple(state[key].shape)}, but these settings need {tuple(tensor.shape)}. "
                "Resume with the objective settings and the batch_size that the checkpoint was written with."
            )
    for key, tensor in own.items():
        tensor.copy_(state[key])
