"""`openclip`: the mini-batch contrastive loss (MBCL) of CLIP, equal to open_clip's `ClipLoss`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from pipeline.config import section
from pipeline.objectives.base import ObjectiveContext, Pair
from pipeline.objectives.registry import register
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
        loss, tau_gradient, normalizers = torch.zeros_like(tau), torch.zeros_like(tau), []
        for log_g, mean_h in zip(batch.log_g, batch.mean_h, strict=True):
            loss = loss + 0.5 * F.softplus(log_g + log_pairs).mean()
            tau_gradient = tau_gradient - 0.5 * (torch.sigmoid(log_g + log_pairs) * mean_h).mean() / tau
            normalizers.append(torch.logaddexp(log_g, log_g.new_full((), -log_pairs)))
        log_scale = -torch.log(2 * tau)
        return AnchorWeights(
            loss=loss,
            log_normalizer=(normalizers[0], normalizers[1]),
            log_scale=(log_scale, log_scale),
            tau_gradient=tau_gradient,
            metrics={"tau": tau},
        )

    def normalizers_in_use(self, batch: AnchorBatch) -> Pair:
        return batch.log_g  # the positive, which this loss adds to the sum, is no part of g
