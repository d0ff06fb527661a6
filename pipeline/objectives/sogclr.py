"""`sogclr` and `fastclip_v1`: the global contrastive loss (GCL) with a constant temperature."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from pipeline.config import section
from pipeline.objectives.base import ObjectiveContext, Pair
from pipeline.objectives.estimators import EstimatorConfig, MovingAverages
from pipeline.objectives.registry import register
from pipeline.objectives.softmax import AnchorBatch, AnchorWeights, SoftmaxObjective
from pipeline.objectives.temperature import ConstantTemperature


@section
class SogClrConfig(EstimatorConfig):
    """Constant gamma and temperature; values of FastCLIP, Table 8 and appendix."""

    name: str = "sogclr"
    tau: float = Field(default=0.03, gt=0)
    """The temperature."""


@section
class FastClipV1Config(SogClrConfig):
    """SogCLR with a cosine schedule of gamma (FastCLIP-v1)."""

    name: str = "fastclip_v1"
    gamma_schedule: Literal["constant", "cosine"] = "cosine"


@register("sogclr", SogClrConfig)
@register("fastclip_v1", FastClipV1Config)
class SogClr(SoftmaxObjective):
    """GCL: tau mean_i [ log(eps + g1_i) + log(eps + g2_i) ], g estimated by moving averages u."""

    config: SogClrConfig

    def __init__(self, config: SogClrConfig, context: ObjectiveContext) -> None:
        self.averages = MovingAverages(config, context)
        tau = ConstantTemperature(config.tau, context)
        super().__init__(config, context, temperature=tau, estimator=self.averages, eps=config.eps)

    def anchor_weights(self, batch: AnchorBatch) -> AnchorWeights:
        log_u, log_normalizer = self.averages.estimate(batch)
        zero = torch.zeros_like(batch.positive[0])
        return AnchorWeights(
            loss=self.config.tau * (log_normalizer[0] + log_normalizer[1]).mean(),
            log_normalizer=log_normalizer,
            log_scale=(zero, zero),
            metrics={"tau": zero + self.config.tau, **self.averages.metrics(batch, log_normalizer)},
            update=torch.stack(log_u, 1),
        )

    def cold_normalizers(self, batch: AnchorBatch) -> Pair:
        return self.averages.cold_normalizers(batch)
