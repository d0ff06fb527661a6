"""`sogclr` and `fastclip_v1`: the global contrastive loss with a constant temperature."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.estimators import EstimatorConfig, EstimatorObjective
from pipeline.objectives.registry import register
from pipeline.objectives.softmax import AnchorBatch, Decision, Pair


@section
class SogClrConfig(EstimatorConfig):
    """Constant gamma and temperature; values of FastCLIP, Table 8 and appendix."""

    name: str = "sogclr"
    tau: float = Field(default=0.03, gt=0)


@section
class FastClipV1Config(SogClrConfig):
    """SogCLR with a cosine schedule of gamma (FastCLIP-v1)."""

    name: str = "fastclip_v1"
    gamma_schedule: Literal["constant", "cosine"] = "cosine"


@register("sogclr", SogClrConfig)
@register("fastclip_v1", FastClipV1Config)
class SogClr(EstimatorObjective):
    """GCL: tau mean_i [ log(eps + g1_i) + log(eps + g2_i) ], g estimated by moving averages u."""

    def temperatures(self, size: int, fetched: Any) -> Pair:
        tau = torch.full((size,), self.config.tau, dtype=self.context.dtype, device=self.context.device)
        return tau, tau

    def decide(self, batch: AnchorBatch) -> Decision:
        log_u, log_normalizer = self.estimate(batch)
        zero = torch.zeros_like(batch.positive[0])
        return Decision(
            loss=self.config.tau * (log_normalizer[0] + log_normalizer[1]).mean(),
            log_normalizer=log_normalizer,
            log_scale=(zero, zero),
            metrics={"tau": zero + self.config.tau, **self.estimator_metrics(batch, log_normalizer)},
            update=torch.stack(log_u, 1),
        )

    def apply(self, pending: Decision, *, lr_scale: float) -> None:
        rows: Tensor = pending.update
        self.table.write(rows)

    def logit_parameters(self) -> tuple[float, float]:
        return -math.log(self.config.tau), 0.0
