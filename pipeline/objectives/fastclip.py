"""`fastclip_v0` and `fastclip_v3`: moving averages of the normalizers, and one learned temperature."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.base import ObjectiveContext, Pair
from pipeline.objectives.estimators import EstimatorConfig, MovingAverages, temperature_slopes
from pipeline.objectives.registry import register
from pipeline.objectives.softmax import AnchorBatch, AnchorWeights, SoftmaxObjective
from pipeline.objectives.temperature import LearnedTemperature, TemperatureConfig, warn_of_large_rho


@section
class FastClipV0Config(TemperatureConfig, EstimatorConfig):
    """The global contrastive loss without the factor tau, whose gradient also moves tau (FastCLIP-v0)."""

    name: str = "fastclip_v0"
    tau_init: float = Field(default=0.03, gt=0)
    gamma_schedule: Literal["constant", "cosine"] = "cosine"


@section
class FastClipV3Config(TemperatureConfig, EstimatorConfig):
    """RGCL with one global temperature (FastCLIP-v3); tau's learning rate falls to a third below tau = 0.03."""

    name: str = "fastclip_v3"
    rho: float = Field(default=6.5, gt=0)
    """Robustness radius; must stay below log(n - 1), or tau falls to its lower bound."""
    tau_gradient: Literal["equation", "published_code"] = "equation"
    """`equation`: dL/dtau as in FastCLIP's equation 10. `published_code`: the derivatives of the normalizers weigh
    twice as much, as in FastCLIP's code, to which the papers' `rho` belongs."""
    tau_lr: float = Field(default=2e-4, ge=0)
    tau_lr_fall: float = Field(default=1 / 3, gt=0, le=1)
    gamma_schedule: Literal["constant", "cosine"] = "cosine"


@register("fastclip_v0", FastClipV0Config)
class FastClipV0(SoftmaxObjective):
    """Unscaled GCL: mean_i [ log(eps + g1_i) + log(eps + g2_i) ], g estimated by moving averages u."""

    temperature: LearnedTemperature
    config: FastClipV0Config | FastClipV3Config

    def __init__(self, config: FastClipV0Config | FastClipV3Config, context: ObjectiveContext) -> None:
        self.averages = MovingAverages(config, context)
        tau = LearnedTemperature(config, context)
        super().__init__(config, context, temperature=tau, estimator=self.averages, eps=config.eps)

    def anchor_weights(self, batch: AnchorBatch) -> AnchorWeights:
        log_u, log_normalizer = self.averages.estimate(batch)
        slopes = temperature_slopes(batch, log_normalizer)
        tau, total = self.temperature.value(), (log_normalizer[0] + log_normalizer[1]).mean()
        loss, tau_gradient, log_scale = self.scaled(tau, total, (slopes[0] + slopes[1]).mean())
        return AnchorWeights(
            loss=loss,
            log_normalizer=log_normalizer,
            log_scale=(log_scale, log_scale),
            tau_gradient=tau_gradient,
            metrics={"tau": tau, **self.averages.metrics(batch, log_normalizer)},
            update=torch.stack(log_u, 1),
        )

    def scaled(self, tau: Tensor, total: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, dL/dtau and log c, scalars.

        Args:
            tau: The temperature.
            total: mean_i [ log(eps + u1_i) + log(eps + u2_i) ].
            slope: Its derivative by tau with u in the denominators constant.
        """
        return total, slope, -torch.log(tau)

    def cold_normalizers(self, batch: AnchorBatch) -> Pair:
        return self.averages.cold_normalizers(batch)


@register("fastclip_v3", FastClipV3Config)
class FastClipV3(FastClipV0):
    """RGCL-g: tau mean_i [ log(eps + g1_i) + log(eps + g2_i) ] + 2 tau rho; tau's gradient is NeuCLIP's (13)."""

    config: FastClipV3Config

    def __init__(self, config: FastClipV3Config, context: ObjectiveContext) -> None:
        super().__init__(config, context)
        warn_of_large_rho(config.rho, config, context)

    def scaled(self, tau: Tensor, total: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inside = total + 2 * self.config.rho
        weight = 2.0 if self.config.tau_gradient == "published_code" else 1.0
        return tau * inside, inside + weight * tau * slope, torch.zeros_like(tau)
