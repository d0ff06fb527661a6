"""Optimizers of the state outside the encoders' engine: temperatures, biases and auxiliary networks.

They are pure updates in place, on tensors that the caller keeps: AdaGrad for NeuCLIP's network, Adam for all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

Rate = Tensor | float


class InnerOptimizer(Protocol):
    """An optimizer whose memory is in `slots`: names of tensors with the parameter's shape."""

    slots: ClassVar[tuple[str, ...]]

    def step(self, parameter: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], *, updates: Rate) -> None:
        """Update parameter and slots in place; `updates` is the number of this update, from 1."""


@dataclass(frozen=True)
class AdaGrad:
    """torch.optim.Adagrad without decay; on a CPU in its fused form, one pass over memory."""

    lr: float
    eps: float = 1e-10
    unused_counter: Tensor = field(default_factory=lambda: torch.zeros(()), compare=False)
    """torch's step counter, which only matters to learning-rate decay."""
    slots: ClassVar[tuple[str, ...]] = ("accumulator",)

    def step(self, parameter: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], *, updates: Rate) -> None:
        adagrad(
            [parameter],
            [gradient],
            [slots["accumulator"]],
            [self.unused_counter],
            fused=parameter.device.type == "cpu",
            lr=self.lr,
            weight_decay=0.0,
            lr_decay=0.0,
            eps=self.eps,
            maximize=False,
        )


@dataclass(frozen=True)
class Adam:
    """torch.optim.Adam without weight decay; `lr` and `updates` may be tensors, one value for all or one per row."""

    lr: Rate
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    slots: ClassVar[tuple[str, ...]] = ("moment1", "moment2")

    def step(self, parameter: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], *, updates: Rate) -> None:
        beta1, beta2 = self.betas
        first = slots["moment1"].lerp_(gradient, 1 - beta1) / (1 - beta1**updates)
        second = slots["moment2"].lerp_(gradient.square(), 1 - beta2) / (1 - beta2**updates)
        parameter -= self.lr * first / (second.sqrt() + self.eps)


@dataclass(frozen=True)
class Momentum:
    """Gradient descent along a moving average of the gradient."""

    lr: Rate
    beta: float = 0.9
    slots: ClassVar[tuple[str, ...]] = ("moment1",)

    def step(self, parameter: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], *, updates: Rate) -> None:
        parameter -= self.lr * slots["moment1"].lerp_(gradient, 1 - self.beta)
