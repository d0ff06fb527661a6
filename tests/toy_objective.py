"""A method that the tests add to a copy of the package: in-batch normalizers at a constant temperature."""

from __future__ import annotations

import torch
from pydantic import Field

from pipeline.config import section
from pipeline.objectives.registry import ObjectiveConfig, ObjectiveContext, register
from pipeline.objectives.softmax import AnchorBatch, AnchorWeights, SoftmaxObjective
from pipeline.objectives.temperature import Temperature


@section
class InBatchToyConfig(ObjectiveConfig):
    """The toy's settings."""

    name: str = "in_batch_toy"
    tau: float = Field(default=0.1, gt=0)
    """The temperature."""


@register("in_batch_toy", InBatchToyConfig)
class InBatchToy(SoftmaxObjective):
    """tau mean_i [ log g1_i + log g2_i ] with g over the batch."""

    def __init__(self, config: InBatchToyConfig, context: ObjectiveContext) -> None:
        super().__init__(config, context, temperature=Temperature(config.tau, context))

    def anchor_weights(self, batch: AnchorBatch) -> AnchorWeights:
        loss = self.config.tau * (batch.log_g[0] + batch.log_g[1]).mean()
        zero = torch.zeros_like(loss)
        return AnchorWeights(loss, log_normalizer=batch.log_g, metrics={"tau": zero + 0.1})
