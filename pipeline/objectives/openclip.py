"""`openclip`: the mini-batch contrastive loss (MBCL) of CLIP, equal to open_clip's `ClipLoss`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.registry import ObjectiveContext, register
from pipeline.objectives.softmax import AnchorBatch, AnchorWeights, SoftmaxObjective
from pipeline.objectives.temperature import LearnedTemperature, TemperatureConfig


@section
class OpenClipConfig(TemperatureConfig):
    """Mini-batch contrastive loss; `tau_min` 0.01 is open_clip's bound of 100 on the logit scale."""

    name: str = "openclip"


@register("openclip", OpenClipConfig)
class OpenClip(SoftmaxObjective):
    """Mean of both cross-entropies over the batch: on each side `mean_i log(1 + (B - 1) g_i) / 2`."""

    temperature: LearnedTemperature

    def __init__(self, config: OpenClipConfig, context: ObjectiveContext) -> None:
        super().__init__(config, context, temperature=LearnedTemperature(config, context))

    def anchor_weights(self, batch: AnchorBatch) -> AnchorWeights:
        log_pairs = math.log(batch.size - 1)
        tau = self.temperature.value()
        log_odds = batch.log_g + log_pairs
        return AnchorWeights(
            loss=0.5 * F.softplus(log_odds).mean(1).sum(),
            log_normalizer=torch.logaddexp(batch.log_g, batch.log_g.new_full((), -log_pairs)),
            log_scale=-torch.log(2 * tau),
            tau_gradient=-(0.5 * (torch.sigmoid(log_odds) * batch.mean_h).mean(1) / tau).sum(),
            metrics={"tau": tau},
        )

    def normalizers_in_use(self, batch: AnchorBatch) -> Tensor:
        return batch.log_g  # the positive, which this loss adds to the sum, is no part of g
