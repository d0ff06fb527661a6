"""`isogclr` and `fastclip_v2`: robust global contrastive loss (RGCL) with a learned temperature for every sample."""

from __future__ import annotations

import math
from typing import Any, Literal

import pydantic
import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.base import ObjectiveContext
from pipeline.objectives.estimators import EstimatorConfig, EstimatorObjective, temperature_slopes
from pipeline.objectives.registry import register
from pipeline.objectives.softmax import AnchorBatch, Decision, Pair
from pipeline.objectives.temperature import TauSchedule, tau_lr_at, warn_of_large_rho


@section
class ISogClrConfig(EstimatorConfig):
    """Per-sample temperatures, learned as tau itself; `tau_schedule`: as for global temperatures.

    tau_optimizer: "adam" with moments per sample (FastCLIP) or "momentum" (iSogCLR's own Algorithm 2). The gradient is
    written without the papers' 1/n, which only rescales the learning rate.
    """

    name: str = "isogclr"
    rho: float = Field(default=9.0, gt=0)
    tau_init: float = Field(default=0.03, gt=0)
    tau_min: float = Field(default=0.005, gt=0)
    tau_max: float = Field(default=1.0, gt=0)
    tau_lr: float = Field(default=1e-2, ge=0)
    tau_schedule: TauSchedule = "encoders"
    tau_optimizer: Literal["adam", "momentum"] = "adam"
    tau_beta1: float = Field(default=0.9, ge=0, lt=1)
    tau_beta2: float = Field(default=0.98, ge=0, lt=1)
    tau_eps: float = Field(default=1e-8, gt=0)

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> ISogClrConfig:
        if not self.tau_min <= self.tau_init <= self.tau_max:
            raise ValueError(
                f"tau_init = {self.tau_init} must lie within [tau_min, tau_max] = [{self.tau_min}, {self.tau_max}]"
            )
        return self


@section
class FastClipV2Config(ISogClrConfig):
    """iSogCLR with a cosine schedule of gamma (FastCLIP-v2)."""

    name: str = "fastclip_v2"
    rho: float = Field(default=7.0, gt=0)
    gamma_schedule: Literal["constant", "cosine"] = "cosine"


@register("isogclr", ISogClrConfig)
@register("fastclip_v2", FastClipV2Config)
class ISogClr(EstimatorObjective):
    """RGCL: mean_i [ tau1_i (log(eps + g1_i) + rho) + tau2_i (log(eps + g2_i) + rho) ].

    Row layout: log u (2 columns), tau (2), first moments (2) and, with Adam, second moments (2) and the number of
    updates: 36 bytes per sample with Adam, 24 with momentum.
    """

    def __init__(self, config: Any, context: ObjectiveContext) -> None:
        super().__init__(config, context)
        warn_of_large_rho(config, context)
        # Of the latest batch: the one number that a file with a single logit scale can hold.
        self.batch_tau = torch.tensor(config.tau_init, dtype=context.dtype, device=context.device)

    def further_columns(self) -> dict[str, float]:
        start = self.config.tau_init
        columns = {"image_tau": start, "text_tau": start, "image_moment1": 0.0, "text_moment1": 0.0}
        if self.config.tau_optimizer == "adam":
            columns |= {"image_moment2": 0.0, "text_moment2": 0.0, "updates": 0.0}
        return columns

    def temperatures(self, size: int, fetched: Any) -> Pair:
        return fetched[:, 2].contiguous(), fetched[:, 3].contiguous()

    def decide(self, batch: AnchorBatch) -> Decision:
        log_u, log_normalizer = self.estimate(batch)
        slopes = temperature_slopes(batch, log_normalizer)
        loss, gradients = torch.zeros_like(batch.positive[0]), []
        for side in (0, 1):
            inside = log_normalizer[side] + self.config.rho
            loss = loss + (batch.tau[side] * inside).mean()
            gradients.append(inside + batch.tau[side] * slopes[side])
        zero = torch.zeros_like(loss)
        tau = torch.stack(batch.tau, 1)
        metrics = {"tau": tau.mean(), "tau_lowest": tau.min(), "tau_highest": tau.max()}
        return Decision(
            loss=loss,
            log_normalizer=log_normalizer,
            log_scale=(zero, zero),
            metrics={**metrics, **self.estimator_metrics(batch, log_normalizer)},
            update=(torch.stack(log_u, 1), torch.stack(gradients, 1), batch.fetched),
        )

    def apply(self, pending: Decision, *, lr_scale: float) -> None:
        log_u, gradient, rows = pending.update
        tau_rows = self._step(rows[:, 2:], gradient, lr=tau_lr_at(self.config, lr_scale=lr_scale))
        self.batch_tau.copy_(tau_rows[:, :2].mean())
        self.table.write(torch.cat([log_u, tau_rows], 1))

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        return {"tau_lr": tau_lr_at(self.config, lr_scale=lr_scale)}

    def _step(self, rows: Tensor, gradient: Tensor, *, lr: float) -> Tensor:
        """One optimizer step on [tau, moments, ...] rows of the batch; tau stays within [tau_min, tau_max]."""
        c = self.config
        tau, moment1 = rows[:, :2], torch.lerp(rows[:, 2:4], gradient, 1 - c.tau_beta1)
        if c.tau_optimizer == "momentum":
            return torch.cat([(tau - lr * moment1).clamp(c.tau_min, c.tau_max), moment1], 1)
        moment2, updates = torch.lerp(rows[:, 4:6], gradient.square(), 1 - c.tau_beta2), rows[:, 6:7] + 1
        first, second = moment1 / (1 - c.tau_beta1**updates), moment2 / (1 - c.tau_beta2**updates)
        tau = (tau - lr * first / (second.sqrt() + c.tau_eps)).clamp(c.tau_min, c.tau_max)
        return torch.cat([tau, moment1, moment2, updates], 1)

    def logit_parameters(self) -> tuple[float, float]:
        return -math.log(float(self.batch_tau)), 0.0

    def own_state(self) -> dict[str, Tensor]:
        return {"batch_tau": self.batch_tau}
