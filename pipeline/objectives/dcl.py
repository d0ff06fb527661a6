"""`dcl`: decoupled contrastive learning (Yeh et al. 2021, arXiv 2110.06848): CLIP's loss without the positive pair in
the denominator."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.registry import ObjectiveContext, register
from pipeline.objectives.softmax import AnchorBatch, AnchorWeights, SoftmaxObjective
from pipeline.objectives.temperature import LearnedTemperature, TemperatureConfig


@section
class DclConfig(TemperatureConfig):
    """Decoupled contrastive loss, by default with a fixed temperature, as in the paper: tune `tau_init`."""

    name: str = "dcl"
    tau_lr: float = Field(default=0.0, ge=0)
    """Adam's learning rate of log(1/tau); 0: the temperature is fixed."""
    rho: float | None = Field(default=None, gt=0)
    """None: a learned temperature follows the loss, and falls to `tau_min` once most pairs are told apart. A number,
    below log(B - 1): it follows tau (loss + rho), as in `fastclip_v3` with gamma 1."""
    eps: float = Field(default=1e-14, gt=0)
    """The small constant beside the normalizer g."""


@register("dcl", DclConfig)
class Dcl(SoftmaxObjective):
    """L = mean_i [ log sum_{j != i} exp(h1_ij) + log sum_{j != i} exp(h2_ij) ] / 2, over the batch."""

    temperature: LearnedTemperature
    config: DclConfig

    def __init__(self, config: DclConfig, context: ObjectiveContext) -> None:
        temperature = LearnedTemperature(config, context)
        super().__init__(config, context, temperature=temperature, eps=config.eps)

    def anchor_weights(self, batch: AnchorBatch) -> AnchorWeights:
        tau, log_normalizer = self.temperature.value(), self.with_eps(batch.log_g)
        total = 0.5 * log_normalizer.mean(1).sum()
        tau_gradient = 0.5 * batch.tau_slopes(log_normalizer).mean(1).sum()
        if self.config.rho is not None:
            tau_gradient = total + self.config.rho + tau * tau_gradient
        return AnchorWeights(
            loss=total + math.log(batch.size - 1),
            log_normalizer=log_normalizer,
            log_scale=-torch.log(2 * tau),
            tau_gradient=tau_gradient,
            metrics={"tau": tau},
        )

    def cold_normalizers(self, batch: AnchorBatch) -> Tensor:
        return self.with_eps(batch.log_g)
