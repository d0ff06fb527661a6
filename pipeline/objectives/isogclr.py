"""`isogclr` and `fastclip_v2`: robust global contrastive loss (RGCL) with a learned temperature for every sample."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.parts import Adam
from pipeline.objectives.registry import ObjectiveContext, register
from pipeline.objectives.softmax import AnchorBatch, AnchorWeights, SoftmaxObjective
from pipeline.objectives.sogclr import EstimatorConfig, MovingAverages, temperature_slopes
from pipeline.objectives.temperature import (
    TAU_BETA1,
    TAU_MAX,
    LearnedTauConfig,
    Temperature,
    tau_lr_at,
    warn_of_large_rho,
)


@section
class ISogClrConfig(LearnedTauConfig, EstimatorConfig):
    """Per-sample temperatures, learned directly rather than as log(1/tau), and constant gamma."""

    name: str = "isogclr"
    rho: float = Field(default=9.0, gt=0)
    """Robustness radius; must stay below log(n - 1), or temperatures fall to their lower bound."""
    tau_init: float = Field(default=0.03, gt=0)
    """Initial temperature of every sample."""
    tau_min: float = Field(default=0.005, gt=0)
    """Lower bound of the temperatures."""
    tau_lr: float = Field(default=3e-3, ge=0)
    """Learning rate of tau; the papers' 1e-2 is for `tau_optimizer` published_code. The gradient is written without the
    papers' 1/n, which only rescales this rate."""
    tau_optimizer: Literal["adam", "momentum", "published_code"] = "adam"
    """`adam`: moments per sample (FastCLIP). `published_code`: the same divided by the second moment instead of by its
    root, as in FastCLIP's code, to which the papers' `tau_lr` belongs. `momentum`: iSogCLR's own Algorithm 2, whose
    decay is 0.9."""


@section
class FastClipV2Config(ISogClrConfig):
    """iSogCLR with a cosine schedule of gamma (FastCLIP-v2)."""

    name: str = "fastclip_v2"
    rho: float = Field(default=7.0, gt=0)
    gamma_schedule: Literal["constant", "cosine"] = "cosine"


class SampleTemperatures(Temperature):
    """A learned temperature per sample and side, in the rows of the estimator's table behind the columns of log u.

    Columns: tau (2), first moments (2) and, with Adam, second moments (2) and the number of updates.
    """

    def __init__(self, config: ISogClrConfig, context: ObjectiveContext) -> None:
        self.config, self.context = config, context
        self.columns = {"image_tau": config.tau_init, "text_tau": config.tau_init}
        self.columns |= {"image_moment1": 0.0, "text_moment1": 0.0}
        if config.tau_optimizer != "momentum":
            self.columns |= {"image_moment2": 0.0, "text_moment2": 0.0, "updates": 0.0}
        # Mean of the latest batch: an open_clip file has room for one logit scale only.
        self.batch_tau = torch.tensor(config.tau_init, dtype=context.dtype, device=context.device)

    def of_anchors(self, size: int, fetched: Tensor | None) -> Tensor:
        assert fetched is not None
        return fetched[:, 2:4].T.contiguous()

    def updated(self, rows: Tensor, gradient: Tensor, *, lr_scale: float) -> Tensor:
        """The batch's columns of this component after one optimizer step; tau stays within [tau_min, 1].

        `rows`, [B, columns], are the batch's whole rows of the table, and `gradient` is dL/dtau, [B, 2].
        """
        c, lr, rows = self.config, tau_lr_at(self.config, lr_scale=lr_scale), rows[:, 2:].clone()
        tau, moment1, moment2, updates = rows[:, :2], rows[:, 2:4], rows[:, 4:6], rows[:, 6:]
        if c.tau_optimizer == "momentum":
            tau -= lr * moment1.lerp_(gradient, 1 - TAU_BETA1)
        else:
            updates += 1
            slots = {"moment1": moment1, "moment2": moment2}
            adam = Adam(lr, (TAU_BETA1, self.context.beta2), self.context.adam_eps, root=c.tau_optimizer == "adam")
            adam.step(tau, gradient, slots, updates=updates)
        tau.clamp_(c.tau_min, TAU_MAX)
        self.batch_tau.copy_(tau.mean())
        return rows

    def logit_scale(self) -> float:
        return -math.log(float(self.batch_tau))

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        return {"tau_lr": tau_lr_at(self.config, lr_scale=lr_scale)}

    def replicated_state(self) -> dict[str, Tensor]:
        return {"batch_tau": self.batch_tau}


@register("isogclr", ISogClrConfig)
@register("fastclip_v2", FastClipV2Config)
class ISogClr(SoftmaxObjective):
    """RGCL: mean_i [ tau1_i (log(eps + g1_i) + rho) + tau2_i (log(eps + g2_i) + rho) ].

    Per-sample state: 36 bytes with Adam, 24 with momentum.
    """

    temperature: SampleTemperatures
    config: ISogClrConfig

    def __init__(self, config: ISogClrConfig, context: ObjectiveContext) -> None:
        temperature = SampleTemperatures(config, context)
        self.averages = MovingAverages(config, context, further_columns=temperature.columns)
        super().__init__(config, context, temperature=temperature, estimator=self.averages, eps=config.eps)
        warn_of_large_rho(config.rho, config, context)

    def anchor_weights(self, batch: AnchorBatch) -> AnchorWeights:
        log_u, log_normalizer = self.averages.estimate(batch)
        inside, tau = log_normalizer + self.config.rho, batch.tau
        metrics = {"tau": tau.mean(), "tau_lowest": tau.min(), "tau_highest": tau.max()}
        return AnchorWeights(
            loss=(tau * inside).mean(1).sum(),
            log_normalizer=log_normalizer,
            tau_gradient=(inside + tau * temperature_slopes(batch, log_normalizer)).T.contiguous(),
            metrics={**metrics, **self.averages.metrics(batch, log_normalizer)},
            update=(log_u.T, batch.fetched),
        )

    def cold_normalizers(self, batch: AnchorBatch) -> Tensor:
        return self.averages.cold_normalizers(batch)

    def update_state(self, pending: AnchorWeights, *, lr_scale: float) -> None:
        log_u, rows = pending.update
        assert pending.tau_gradient is not None
        tau_rows = self.temperature.updated(rows, pending.tau_gradient, lr_scale=lr_scale)
        self.averages.commit(torch.cat([log_u, tau_rows], 1))
