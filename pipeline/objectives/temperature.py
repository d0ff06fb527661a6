"""The global temperature: learned as log(1/tau) with its own small Adam, outside the encoders' engine.

bf16 would round 1/0.07 = 14.2857 to 14.25, and a 0-dim parameter is no citizen of an engine that flattens parameters:
so it is a replicated fp32 scalar with the same bits on every rank.
"""

from __future__ import annotations

import math

import pydantic
import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.base import ObjectiveConfig, ObjectiveContext
from pipeline.objectives.frame import Decision, Pair, SoftmaxObjective


@section
class TemperatureConfig(ObjectiveConfig):
    """Settings of methods with one learned temperature; `tau_lr` acts on log(1/tau) and follows the encoders' schedule.

    tau_lr_fall: below `tau_lr_threshold` the learning rate is multiplied by it (1 = never falls).
    """

    tau_init: float = Field(default=0.07, gt=0)
    tau_min: float = Field(default=0.01, gt=0)
    tau_max: float = Field(default=1.0, gt=0)
    tau_lr: float = Field(default=2e-3, ge=0)
    tau_beta1: float = Field(default=0.9, ge=0, lt=1)
    tau_beta2: float = Field(default=0.98, ge=0, lt=1)
    tau_eps: float = Field(default=1e-8, gt=0)
    tau_lr_threshold: float = Field(default=0.03, gt=0)
    tau_lr_fall: float = Field(default=1.0, gt=0, le=1)

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> TemperatureConfig:
        if not self.tau_min <= self.tau_init <= self.tau_max:
            raise ValueError(
                f"tau_init = {self.tau_init} must lie within [tau_min, tau_max] = [{self.tau_min}, {self.tau_max}]"
            )
        return self


class Temperature:
    """One learned temperature. State: log(1/tau), both Adam moments and the number of updates."""

    def __init__(self, config: TemperatureConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.log_scale = torch.tensor(-math.log(config.tau_init), device=device, dtype=dtype)
        self.moment1, self.moment2, self.updates = (torch.zeros_like(self.log_scale) for _ in range(3))

    def value(self) -> Tensor:
        """tau, a 0-dim tensor."""
        return torch.exp(-self.log_scale)

    def update(self, tau_gradient: Tensor, *, lr_scale: float) -> None:
        """One Adam step on log(1/tau) from dL/dtau; no weight decay; tau stays within [tau_min, tau_max]."""
        c = self.config
        tau = self.value()
        gradient = -tau * tau_gradient.to(tau)
        lr = torch.where(tau < c.tau_lr_threshold, c.tau_lr * lr_scale * c.tau_lr_fall, c.tau_lr * lr_scale)
        self.updates += 1
        self.moment1.lerp_(gradient, 1 - c.tau_beta1)
        self.moment2.lerp_(gradient.square(), 1 - c.tau_beta2)
        first = self.moment1 / (1 - c.tau_beta1**self.updates)
        second = self.moment2 / (1 - c.tau_beta2**self.updates)
        self.log_scale -= lr * first / (second.sqrt() + c.tau_eps)
        self.log_scale.clamp_(-math.log(c.tau_max), -math.log(c.tau_min))

    def tensors(self) -> dict[str, Tensor]:
        """The lasting tensors themselves, by name."""
        return {
            "temperature.log_scale": self.log_scale,
            "temperature.moment1": self.moment1,
            "temperature.moment2": self.moment2,
            "temperature.updates": self.updates,
        }


class GlobalTemperatureObjective(SoftmaxObjective):
    """A softmax objective with one learned temperature."""

    def __init__(self, config: TemperatureConfig, context: ObjectiveContext) -> None:
        super().__init__(config, context)
        self.temperature = Temperature(config, device=context.device, dtype=context.dtype)

    def temperatures(self, size: int) -> Pair:
        tau = self.temperature.value().expand(size)
        return tau, tau

    def apply(self, decision: Decision, *, lr_scale: float) -> None:
        assert decision.tau_gradient is not None
        self.temperature.update(decision.tau_gradient, lr_scale=lr_scale)

    def logit_parameters(self) -> tuple[float, float]:
        return float(self.temperature.log_scale), 0.0

    def own_state(self) -> dict[str, Tensor]:
        return self.temperature.tensors()
