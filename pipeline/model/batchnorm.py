"""Batch norm computed in fp32 under bf16 training, optionally synchronised over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.distributed.world import World, joined_world
from pipeline.errors import UserError

ROWS = (0, 2, 3)  # all but the channels


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


class SyncFp32BatchNorm2d(Fp32BatchNorm2d):
    """`Fp32BatchNorm2d` with statistics over all ranks' rows, on any device (torch's `SyncBatchNorm` needs CUDA).

    Outputs, gradients and running statistics of K ranks with b rows each are those of one rank with all K b rows.
    Costs one all-gather of 2 C numbers in forward and one all-reduce of 2 C numbers in backward.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[b, C, H, W] -> [b, C, H, W]; collective in training, where every rank must have the same b."""
        world = joined_world()
        if world.size == 1 or not (self.training or self.running_mean is None):
            return super().forward(x)
        out, mean, variance = _Synchronised.apply(x, self.weight, self.bias, self.eps, world)
        if self.training and self.track_running_stats:
            assert self.running_mean is not None
            assert self.running_var is not None
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            rows = world.size * x.numel() // x.shape[1]
            self.running_mean.lerp_(mean, self.momentum or 0.0)
            self.running_var.lerp_(variance * (rows / max(1, rows - 1)), self.momentum or 0.0)
        normalised: Tensor = out
        return normalised


class _Synchronised(torch.autograd.Function):
    """Batch norm with statistics over ranks: (x, weight, bias) -> (y, mean [C], biased variance [C])."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, world: World
    ) -> tuple[Tensor, Tensor, Tensor]:
        variance, mean = torch.var_mean(x.float(), ROWS, unbiased=False)
        means, variances = world.all_gather(torch.stack([mean, variance])[None]).unbind(1)  # [K, C] each
        mean = means.mean(0)
        variance = variances.mean(0) + (means - mean).square().mean(0)
        y = F.batch_norm(x, mean, variance, weight.float(), bias.float(), False, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps))
        ctx.world = world
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        g = upstream[0].float()
        standard = (x.float() - mean[:, None, None]) * scale[:, None, None]
        own = torch.stack([g.sum(ROWS), (g * standard).sum(ROWS)])
        rows = ctx.world.size * x.numel() // x.shape[1]
        shift, slope = (ctx.world.all_reduce(own) / rows)[:, :, None, None]
        to_x = (weight.float() * scale)[:, None, None] * (g - shift - standard * slope)
        return to_x.to(x.dtype), own[1].to(weight.dtype), own[0].to(weight.dtype), None, None


def use_fp32_batch_norms(model: nn.Module, *, synchronised: bool = False) -> None:
    """Turn every plain `nn.BatchNorm2d` of a model into an `Fp32BatchNorm2d`, in place.

    Args:
        model: The model to change.
        synchronised: Use statistics over all ranks (`SyncFp32BatchNorm2d`).

    Raises:
        UserError: `synchronised`, and the model has batch norms of another class.
    """
    for name, module in model.named_modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SyncFp32BatchNorm2d if synchronised else Fp32BatchNorm2d
        elif synchronised and isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f"model.sync_batchnorm: {name} is a {type(module).__name__}, and only torch's BatchNorm2d can be "
                "synchronised here. Use model.sync_batchnorm=false, or one of open_clip's own ResNets (RN50 ...)."
            )
