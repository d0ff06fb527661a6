"""`fastclip_v0` and `fastclip_v3`: moving-average estimators with one learned temperature."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.base import ObjectiveContext
from pipeline.objectives.estimators import EstimatorConfig, EstimatorObjective, temperature_slopes
from pipeline.objectives.registry import register
from pipeline.objectives.softmax import AnchorBatch, Decision
from pipeline.objectives.temperature import GlobalTemperatureObjective, TemperatureConfig, warn_of_large_rho


@section
class FastClipV0Config(TemperatureConfig, EstimatorConfig):
    """The global contrastive loss without the factor tau, whose gradient also moves tau (FastCLIP-v0)."""

    name: str = "fastclip_v0"
    tau_init: float = Field(default=0.03, gt=0)
    gamma_schedule: Literal["constant", "cosine"] = "cosine"


@section
class FastClipV3Config(TemperatureConfig, EstimatorConfig):
    """RGCL with one global temperature (FastCLIP-v3); tau's learning rate falls to a third below tau = 0.03.

    The fall follows the present tau: it is undone where tau rises above 0.03 again.
    """

    name: str = "fastclip_v3"
    rho: float = Field(default=6.5, gt=0)
    tau_lr: float = Field(default=2e-4, ge=0)
    tau_lr_fall: float = Field(default=1 / 3, gt=0, le=1)
    gamma_schedule: Literal["constant", "cosine"] = "cosine"


class _LearnedTemperatureEstimators(GlobalTemperatureObjective, EstimatorObjective):
    def apply(self, pending: Decision, *, lr_scale: float) -> None:
        super().apply(pending, lr_scale=lr_scale)
        rows: Tensor = pending.update
        self.table.write(rows)


@register("fastclip_v0", FastClipV0Config)
class FastClipV0(_LearnedTemperatureEstimators):
    """Unscaled GCL: mean_i [ log(eps + g1_i) + log(eps + g2_i) ], g estimated by moving averages u."""

    def decide(self, batch: AnchorBatch) -> Decision:
        log_u, log_normalizer = self.estimate(batch)
        slopes = temperature_slopes(batch, log_normalizer)
        tau = self.temperature.value()
        log_scale = -torch.log(tau)
        return Decision(
            loss=(log_normalizer[0] + log_normalizer[1]).mean(),
            log_normalizer=log_normalizer,
            log_scale=(log_scale, log_scale),
            tau_gradient=(slopes[0] + slopes[1]).mean(),
            metrics={"tau": tau, **self.estimator_metrics(batch, log_normalizer)},
            update=torch.stack(log_u, 1),
        )


@register("fastclip_v3", FastClipV3Config)
class FastClipV3(_LearnedTemperatureEstimators):
    """RGCL-g: tau mean_i [ log(eps + g1_i) + log(eps + g2_i) ] + 2 tau rho; tau's gradient is NeuCLIP's (13)."""

    def __init__(self, config: FastClipV3Config, context: ObjectiveContext) -> None:
        super().__init__(config, context)
        warn_of_large_rho(config, context)

    def decide(self, batch: AnchorBatch) -> Decision:
        log_u, log_normalizer = self.estimate(batch)
        slopes = temperature_slopes(batch, log_normalizer)
        tau = self.temperature.value()
        inside = (log_normalizer[0] + log_normalizer[1]).mean() + 2 * self.config.rho
        zero = torch.zeros_like(tau)
        return Decision(
            loss=tau * inside,
            log_normalizer=log_normalizer,
            log_scale=(zero, zero),
            tau_gradient=inside + tau * (slopes[0] + slopes[1]).mean(),
            metrics={"tau": tau, **self.estimator_metrics(batch, log_normalizer)},
            update=torch.stack(log_u, 1),
        )
