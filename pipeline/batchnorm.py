"""Batch norm in fp32, whatever the dtype of the activations and of the engine's working weights."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Fp32BatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` for bf16 training: statistics, gain and bias enter in fp32, the output has the input's dtype.

    torch's own refuses bf16 gains beside fp32 running statistics, and bf16 statistics would stop moving: at momentum
    0.1 they round away every change below one per cent. Names in the state dict are unchanged.
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


def use_fp32_batch_norms(model: nn.Module) -> None:
    """Turn every plain `nn.BatchNorm2d` of a model into `Fp32BatchNorm2d`, in place."""
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = Fp32BatchNorm2d
