"""Optimizers of the auxiliary networks: pure updates on tensors that somebody else keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad


class InnerOptimizer(Protocol):
    """`slots` names the tensors, shaped like the parameter, in which the optimizer remembers."""

    slots: ClassVar[tuple[str, ...]]

    def step(self, parameter: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], *, updates: int) -> None:
        """Update parameter and slots in place. Args: updates: number of this update, from 1."""


class AdaGrad:
    """torch.optim.Adagrad without decay, on a CPU in its fused form: one pass over memory."""

    slots: ClassVar[tuple[str, ...]] = ("accumulator",)

    def __init__(self, lr: float, *, eps: float = 1e-10) -> None:
        self.lr, self.eps = lr, eps
        self._step = torch.zeros(())  # torch's counter, which matters to its learning-rate decay only

    def step(self, parameter: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], *, updates: int) -> None:
        adagrad(
            [parameter],
            [gradient],
            [slots["accumulator"]],
            [self._step],
            fused=parameter.device.type == "cpu",
            lr=self.lr,
            weight_decay=0.0,
            lr_decay=0.0,
            eps=self.eps,
            maximize=False,
        )


class Adam:
    """As torch.optim.Adam; with the papers' weight decay of 0 it is AdamW."""

    slots: ClassVar[tuple[str, ...]] = ("moment1", "moment2")

    def __init__(self, lr: float, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.lr, self.betas, self.eps = lr, betas, eps

    def step(self, parameter: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], *, updates: int) -> None:
        beta1, beta2 = self.betas
        slots["moment1"].lerp_(gradient, 1 - beta1)
        slots["moment2"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (slots["moment2"] / (1 - beta2**updates)).sqrt_().add_(self.eps)
        parameter.addcdiv_(slots["moment1"], root, value=-self.lr / (1 - beta1**updates))


class Buffered:
    """Named tensors and a working copy of them: changes become lasting by swapping the two."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.lasting, self.working = tensors, {name: torch.empty_like(t) for name, t in tensors.items()}

    def begin(self) -> None:
        """Start again from the lasting values."""
        for name, tensor in self.lasting.items():
            self.working[name].copy_(tensor)

    def commit(self) -> None:
        self.lasting, self.working = self.working, self.lasting
