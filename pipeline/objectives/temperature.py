"""Temperatures: components of objectives, replicated fp32 state outside the encoders' engine.

A global temperature is learned as log(1/tau) with an Adam of its own. It cannot be a parameter of the engine: bf16
would round 1/0.07 = 14.2857 to 14.25, and engines that flatten parameters do not take 0-dim tensors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pydantic
import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.registry import ObjectiveConfig, ObjectiveContext, StatefulPart

log = logging.getLogger(__name__)
TAU_MAX = 1.0
TAU_BETA1 = 0.9
"""Adam's decay of a temperature's first moment."""
TAU_OF_FALL = 0.03
"""Temperature below which `tau_lr_fall` holds (FastCLIP, NeuCLIP)."""
Rate = Tensor | float


@dataclass(frozen=True)
class Adam:
    """torch.optim.Adam without weight decay, in place on tensors that the caller keeps.

    `lr` and `updates`, the number of the update from 1, may be tensors, one value for all or one per row. With `root`
    false it divides by the second moment instead of by its root.
    """

    lr: Rate
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    root: bool = True
    slots: ClassVar[tuple[str, ...]] = ("moment1", "moment2")

    def step(self, parameter: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], *, updates: Rate) -> None:
        beta1, beta2 = self.betas
        first = slots["moment1"].lerp_(gradient, 1 - beta1) / (1 - beta1**updates)
        second = slots["moment2"].lerp_(gradient.square(), 1 - beta2) / (1 - beta2**updates)
        parameter -= self.lr * first / ((second.sqrt() if self.root else second) + self.eps)


@section
class LearnedTauConfig(ObjectiveConfig):
    """Settings of methods that learn temperatures: one for all samples, or one for each."""

    tau_init: float = Field(default=0.07, gt=0)
    """Initial temperature."""
    tau_min: float = Field(default=0.01, gt=0)
    """Lower bound of the temperature, tau_0 in NeuCLIP; the upper one is 1."""
    tau_lr: float = Field(default=2e-3, ge=0)
    """Learning rate of log(1/tau). Its Adam has the encoders' beta2 and eps, and 0.9 for beta1."""
    tau_schedule: Literal["encoders", "constant"] = "encoders"
    """`encoders`: the rate follows the encoders' warm-up and decay, as in open_clip, where the temperature is one of
    the model's parameters. `constant`: as in the published commands of FastCLIP-v2, -v3 and AmorLIP."""

    @pydantic.model_validator(mode="after")
    def _tau_within_bounds(self) -> LearnedTauConfig:
        if not self.tau_min <= self.tau_init <= TAU_MAX:
            raise ValueError(f"tau_init = {self.tau_init} must lie within [tau_min, 1] = [{self.tau_min}, 1]")
        return self


@section
class TemperatureConfig(LearnedTauConfig):
    """Settings of methods with one learned temperature."""

    tau_lr_fall: float = Field(default=1.0, gt=0, le=1)
    """Factor of the rate while the temperature is below 0.03; 1 = the rate never falls."""


def tau_lr_at(config: LearnedTauConfig, *, lr_scale: float) -> float:
    """The learning rate of temperatures where the encoders' schedule is at `lr_scale`, in [0, 1]."""
    return config.tau_lr * (1.0 if config.tau_schedule == "constant" else lr_scale)


class LearnedScalar(StatefulPart):
    """A replicated scalar with its own Adam. State: value, both moments, number of updates."""

    def __init__(self, initial: float, *, name: str, context: ObjectiveContext) -> None:
        self.name, self.context = name, context
        self.value = torch.tensor(initial, device=context.device, dtype=context.dtype)
        self.moment1, self.moment2, self.updates = (torch.zeros_like(self.value) for _ in range(3))

    def update(self, gradient: Tensor, *, lr: Rate) -> None:
        self.updates += 1
        slots = {"moment1": self.moment1, "moment2": self.moment2}
        adam = Adam(lr, (TAU_BETA1, self.context.beta2), self.context.adam_eps)
        adam.step(self.value, gradient, slots, updates=self.updates)

    def replicated_state(self) -> dict[str, Tensor]:
        fields = ("value", "moment1", "moment2", "updates")
        return {f"{self.name}.{field}": getattr(self, field) for field in fields}


class Temperature(StatefulPart):
    """The temperature of every anchor: here one for all of them, a constant."""

    def __init__(self, tau: float, context: ObjectiveContext) -> None:
        self.tau, self._tensor = tau, torch.full((), tau, dtype=context.dtype, device=context.device)

    def value(self) -> Tensor:
        """tau, a 0-dim tensor."""
        return self._tensor

    def of_anchors(self, size: int, fetched: Tensor | None) -> Tensor:
        """tau of a batch's anchors, [2, B] (an expanded scalar for a global one); fetched: the batch's table rows."""
        return self.value().expand(2, size)

    def logit_scale(self) -> float:
        """log(1/tau), as open_clip stores it."""
        return -math.log(self.tau)

    def update(self, gradient: Any, *, lr_scale: float) -> None:
        """Learn from dL/dtau."""
        raise NotImplementedError(f"{type(self).__name__} is not learned")


class LearnedTemperature(Temperature):
    """One learned temperature for all anchors, kept as log(1/tau)."""

    def __init__(self, config: TemperatureConfig, context: ObjectiveContext) -> None:
        self.config = config
        self.log_scale = LearnedScalar(-math.log(config.tau_init), name="log_scale", context=context)

    def value(self) -> Tensor:
        return torch.exp(-self.log_scale.value)

    def update(self, gradient: Tensor, *, lr_scale: float) -> None:
        """One step of Adam on log(1/tau) from dL/dtau = -(1/tau) dL/dlog(1/tau); tau stays in [tau_min, 1]."""
        self.log_scale.update(-self.value() * gradient, lr=self.rate(lr_scale=lr_scale))
        self.log_scale.value.clamp_(-math.log(TAU_MAX), -math.log(self.config.tau_min))

    def rate(self, *, lr_scale: float) -> Tensor:
        c = self.config
        return tau_lr_at(c, lr_scale=lr_scale) * torch.where(self.value() < TAU_OF_FALL, c.tau_lr_fall, 1.0)

    def logit_scale(self) -> float:
        return float(self.log_scale.value)

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        return {"tau_lr": float(self.rate(lr_scale=lr_scale))}

    def replicated_state(self) -> dict[str, Tensor]:
        return self.log_scale.replicated_state()


def warn_of_large_rho(rho: float, config: LearnedTauConfig, context: ObjectiveContext) -> None:
    """Log a warning when `rho` is so large that tau must fall to its lower bound.

    dL/dtau is rho minus the KL divergence of an anchor's n - 1 weights from uniform, which is at most log(n - 1). This
    is no error: a recipe of the papers tried on a few shards is such a run, and its encoders still learn.
    """
    n = context.dataset_size
    learned = config.tau_lr > 0 and config.tau_init > config.tau_min
    if context.world.is_main and learned and n > 2 and rho >= math.log(n - 1):
        low, high = 0.44 * math.log(n), 0.67 * math.log(n)
        log.warning(
            f"objective.rho = {rho:g} is not below log(n - 1) = {math.log(n - 1):.2f} for n = {n} samples: tau will "
            f"fall to tau_min = {config.tau_min:g}. Most papers use 0.44 to 0.67 of log n: set objective.rho to "
            f"{low:.1f} to {high:.1f}, or objective.tau_lr to 0."
        )
