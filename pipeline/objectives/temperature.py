"""The global temperature: learned as log(1/tau) with its own small Adam, outside the encoders' engine.

bf16 would round 1/0.07 = 14.2857 to 14.25, and a 0-dim parameter is no citizen of an engine that flattens parameters:
so it is a replicated fp32 scalar with the same bits on every rank.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

import pydantic
import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.base import ObjectiveConfig, ObjectiveContext
from pipeline.objectives.softmax import Decision, Pair, SoftmaxObjective

log = logging.getLogger(__name__)
TauSchedule = Literal["encoders", "constant"]


def tau_lr_at(config: Any, *, lr_scale: float) -> float:
    """The learning rate of temperatures where the encoders' schedule stands at `lr_scale`, in [0, 1]."""
    return float(config.tau_lr * (1.0 if config.tau_schedule == "constant" else lr_scale))


@section
class TemperatureConfig(ObjectiveConfig):
    """Settings of methods with one learned temperature; `tau_lr` acts on log(1/tau).

    tau_schedule: the rate follows that of the "encoders", warm-up and decay (as in open_clip, where the temperature is
    one of the model's parameters), or stays "constant" (the published commands of FastCLIP-v2, -v3 and AmorLIP).
    tau_lr_fall: below `tau_lr_threshold` the learning rate is multiplied by it (1 = never falls).
    """

    tau_init: float = Field(default=0.07, gt=0)
    tau_min: float = Field(default=0.01, gt=0)
    tau_max: float = Field(default=1.0, gt=0)
    tau_lr: float = Field(default=2e-3, ge=0)
    tau_beta1: float = Field(default=0.9, ge=0, lt=1)
    tau_beta2: float = Field(default=0.98, ge=0, lt=1)
    tau_eps: float = Field(default=1e-8, gt=0)
    tau_schedule: TauSchedule = "encoders"
    tau_lr_threshold: float = Field(default=0.03, gt=0)
    tau_lr_fall: float = Field(default=1.0, gt=0, le=1)

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> TemperatureConfig:
        if not self.tau_min <= self.tau_init <= self.tau_max:
            raise ValueError(
                f"tau_init = {self.tau_init} must lie within [tau_min, tau_max] = [{self.tau_min}, {self.tau_max}]"
            )
        return self


class LearnedScalar:
    """A replicated fp32 scalar with its own Adam. State: value, both moments, number of updates."""

    def __init__(self, initial: float, *, name: str, betas: tuple[float, float], context: ObjectiveContext) -> None:
        self.name, self.betas = name, betas
        self.value = torch.tensor(initial, device=context.device, dtype=context.dtype)
        self.moment1, self.moment2, self.updates = (torch.zeros_like(self.value) for _ in range(3))

    def update(self, gradient: Tensor, *, lr: Tensor | float, eps: float) -> None:
        """One Adam step without weight decay."""
        beta1, beta2 = self.betas
        self.updates += 1
        self.moment1.lerp_(gradient, 1 - beta1)
        self.moment2.lerp_(gradient.square(), 1 - beta2)
        first = self.moment1 / (1 - beta1**self.updates)
        second = self.moment2 / (1 - beta2**self.updates)
        self.value -= lr * first / (second.sqrt() + eps)

    def tensors(self) -> dict[str, Tensor]:
        """The lasting tensors themselves, by name."""
        fields = ("value", "moment1", "moment2", "updates")
        return {f"{self.name}.{field}": getattr(self, field) for field in fields}


class Temperature:
    """One learned temperature, kept as log(1/tau)."""

    def __init__(self, config: TemperatureConfig, context: ObjectiveContext) -> None:
        self.config = config
        betas = (config.tau_beta1, config.tau_beta2)
        self.log_scale = LearnedScalar(-math.log(config.tau_init), name="log_scale", betas=betas, context=context)

    def value(self) -> Tensor:
        """tau, a 0-dim tensor."""
        return torch.exp(-self.log_scale.value)

    def rate(self, *, lr_scale: float) -> Tensor:
        """The learning rate of log(1/tau), a 0-dim tensor; below the threshold it falls."""
        c = self.config
        return tau_lr_at(c, lr_scale=lr_scale) * torch.where(self.value() < c.tau_lr_threshold, c.tau_lr_fall, 1.0)

    def update(self, tau_gradient: Tensor, *, lr_scale: float) -> None:
        """One Adam step on log(1/tau) from dL/dtau = -(1/tau) dL/dlog(1/tau); tau stays in [tau_min, tau_max]."""
        c, tau = self.config, self.value()
        self.log_scale.update(-tau * tau_gradient, lr=self.rate(lr_scale=lr_scale), eps=c.tau_eps)
        self.log_scale.value.clamp_(-math.log(c.tau_max), -math.log(c.tau_min))


def warn_of_large_rho(config: Any, context: ObjectiveContext) -> None:
    """Say so where `config.rho` cannot be reached, so that tau will fall to its lower bound.

    dL/dtau is rho minus the KL divergence of an anchor's n - 1 weights from uniform, and that is at most log(n - 1). It
    is no error: a recipe of the papers tried on a few shards is such a run, and its encoders still learn.
    """
    n, rho = context.dataset_size, config.rho
    moves = config.tau_lr > 0 and config.tau_init > config.tau_min
    if context.world.is_main and moves and n > 2 and rho >= math.log(n - 1):
        log.warning(
            "objective.rho = %g is not below log(n - 1) = %.2f for n = %d samples: tau will fall to tau_min = %g. "
            "Most papers use 0.44 to 0.67 of log n: set objective.rho to %.1f to %.1f, or objective.tau_lr to 0.",
            rho,
            math.log(n - 1),
            n,
            config.tau_min,
            0.44 * math.log(n),
            0.67 * math.log(n),
        )


class GlobalTemperatureObjective(SoftmaxObjective):
    """A softmax objective with one learned temperature."""

    def __init__(self, config: Any, context: ObjectiveContext) -> None:
        super().__init__(config, context)
        self.temperature = Temperature(config, context)

    def temperatures(self, size: int, fetched: Any) -> Pair:
        tau = self.temperature.value().expand(size)
        return tau, tau

    def apply(self, pending: Decision, *, lr_scale: float) -> None:
        assert pending.tau_gradient is not None
        self.temperature.update(pending.tau_gradient, lr_scale=lr_scale)

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        return {"tau_lr": float(self.temperature.rate(lr_scale=lr_scale))}

    def logit_parameters(self) -> tuple[float, float]:
        return float(self.temperature.log_scale.value), 0.0

    def own_state(self) -> dict[str, Tensor]:
        return self.temperature.log_scale.tensors()
