"""The global contrastive loss with moving averages of the normalizers: `sogclr`, `fastclip_v0`, `_v1` and `_v3`.

    u_i <- (1 - gamma) u_i + gamma g_i(batch)        FastCLIP, equation (1); a sample seen for the first time takes g_i

They are stored as log u, because u leaves fp32's range. Loss weights use log(eps + u). The gradient is that of
(c / B) sum_i g_i / (eps + u_i) with u constant (FastCLIP, Algorithm 1); the reported loss is the objective's value at
u.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.parts import StatefulPart
from pipeline.objectives.registry import ObjectiveConfig, ObjectiveContext, register
from pipeline.objectives.sample_table import PerSampleTable
from pipeline.objectives.softmax import AnchorBatch, AnchorWeights, SoftmaxObjective
from pipeline.objectives.temperature import (
    GlobalTemperature,
    LearnedTemperature,
    TemperatureConfig,
    warn_of_large_rho,
)


@section
class EstimatorConfig(ObjectiveConfig):
    """Settings of the moving averages."""

    eps: float = Field(default=1e-14, gt=0)
    """The small constant beside the normalizer g."""
    gamma_schedule: Literal["constant", "cosine"] = "constant"
    """`constant`: gamma is `gamma`. `cosine`: it falls by epoch from 1 to `gamma_min`."""
    gamma: float = Field(default=0.6, gt=0, le=1)
    """Weight of the newest value in the moving average, for the constant schedule."""
    gamma_min: float = Field(default=0.2, gt=0, le=1)
    """Final gamma of the cosine schedule."""
    gamma_decay_epochs: int | None = Field(default=None, ge=1)
    """Epochs over which the cosine schedule falls; default: half of the run's epochs."""


def cosine_gamma(epoch: int, *, gamma_min: float, decay_epochs: int) -> float:
    """`0.5 (1 + cos(pi min(epoch, E) / E)) (1 - gamma_min) + gamma_min` (FastCLIP, section 5)."""
    return 0.5 * (1 + math.cos(math.pi * min(epoch, decay_epochs) / decay_epochs)) * (1 - gamma_min) + gamma_min


def gamma_at(config: EstimatorConfig, context: ObjectiveContext, *, step: int) -> float:
    """gamma of a step under the configured schedule. A UserError says that it needs the length of the run."""
    if config.gamma_schedule == "constant":
        return config.gamma
    decay_epochs = config.gamma_decay_epochs
    if decay_epochs is None:
        needed_by = "objective.gamma_schedule = 'cosine' without objective.gamma_decay_epochs"
        decay_epochs = max(1, context.epochs(needed_by=needed_by) // 2)
    return cosine_gamma(step // context.steps_per_epoch, gamma_min=config.gamma_min, decay_epochs=decay_epochs)


def moving_average(log_u: Tensor, log_g: Tensor, *, gamma: float) -> Tensor:
    """log of `(1 - gamma) u + gamma g`; log g where log_u is -inf (the sample is new)."""
    if gamma >= 1:
        return log_g
    mixed = torch.logaddexp(log_u + math.log1p(-gamma), log_g + math.log(gamma)) if gamma > 0 else log_u
    return torch.where(torch.isneginf(log_u), log_g, mixed)


class MovingAverages(StatefulPart):
    """The estimator: a table of log u of both sides, and of further columns that a method keeps behind them.

    `further_columns` has their names and initial values.
    """

    table: PerSampleTable

    def __init__(
        self, config: EstimatorConfig, context: ObjectiveContext, *, further_columns: Mapping[str, float] | None = None
    ) -> None:
        self.config, self.context = config, context
        self.table = PerSampleTable(
            {"image_log_u": -math.inf, "text_log_u": -math.inf, **(further_columns or {})},
            dataset_size=context.dataset_size,
            world=context.world,
            device=context.device,
        )
        gamma_at(config, context, step=0)  # report missing facts now rather than in the first step

    def estimate(self, batch: AnchorBatch) -> tuple[Tensor, Tensor]:
        """New log u and the log-normalizers log(eps + u), [2, B]."""
        log_u = self._averages(batch, gamma=gamma_at(self.config, self.context, step=batch.step))
        return log_u, self._with_eps(log_u)

    def cold_normalizers(self, batch: AnchorBatch) -> Tensor:
        """log(eps + u) before this batch; for a new sample, with the batch's own value."""
        return self._with_eps(self._averages(batch, gamma=0.0))

    def metrics(self, batch: AnchorBatch, log_normalizer: Tensor) -> dict[str, Tensor]:
        """normalizer_gap: mean |log(eps + u) - log(eps + g)| over both sides; gamma."""
        gamma = gamma_at(self.config, self.context, step=batch.step)
        gap = (log_normalizer - self._with_eps(batch.log_g)).abs().mean()
        return {"normalizer_gap": gap, "gamma": batch.positive.new_full((), gamma)}

    def commit(self, update: Tensor) -> None:
        self.table.write(update)

    def _averages(self, batch: AnchorBatch, *, gamma: float) -> Tensor:
        return moving_average(batch.fetched[:, :2].T.contiguous(), batch.log_g, gamma=gamma)

    def _with_eps(self, values: Tensor) -> Tensor:
        return torch.logaddexp(values, values.new_full((), math.log(self.config.eps)))


def temperature_slopes(batch: AnchorBatch, log_normalizer: Tensor) -> Tensor:
    """`(dg_i/dtau) / (eps + u_i)` of each anchor, [2, B]: -(1/tau) exp(log g - a) mean_h."""
    return -torch.exp(batch.log_g - log_normalizer) * batch.mean_h / batch.tau


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


class MovingAverageObjective(SoftmaxObjective):
    """The global contrastive loss with g estimated by moving averages u; a method implements `scaled`."""

    temperature: GlobalTemperature

    def __init__(self, config: EstimatorConfig, context: ObjectiveContext, *, temperature: GlobalTemperature) -> None:
        self.averages = MovingAverages(config, context)
        super().__init__(config, context, temperature=temperature, estimator=self.averages, eps=config.eps)

    def anchor_weights(self, batch: AnchorBatch) -> AnchorWeights:
        log_u, log_normalizer = self.averages.estimate(batch)
        slopes = temperature_slopes(batch, log_normalizer)
        tau = self.temperature.value()
        loss, tau_gradient, log_scale = self.scaled(tau, log_normalizer.sum(0).mean(), slopes.sum(0).mean())
        return AnchorWeights(
            loss=loss,
            log_normalizer=log_normalizer,
            log_scale=log_scale,
            tau_gradient=tau_gradient,
            metrics={"tau": tau, **self.averages.metrics(batch, log_normalizer)},
            update=log_u.T.contiguous(),
        )

    def cold_normalizers(self, batch: AnchorBatch) -> Tensor:
        return self.averages.cold_normalizers(batch)

    @abstractmethod
    def scaled(self, tau: Tensor, total: Tensor, slope: Tensor) -> tuple[Tensor, Tensor | None, Tensor | float]:
        """Loss, dL/dtau (None: tau is constant) and log c, scalars.

        Args:
            tau: The temperature.
            total: mean_i [ log(eps + u1_i) + log(eps + u2_i) ].
            slope: Its derivative by tau with u in the denominators constant.
        """


@register("sogclr", SogClrConfig)
@register("fastclip_v1", FastClipV1Config)
class SogClr(MovingAverageObjective):
    """GCL: tau mean_i [ log(eps + g1_i) + log(eps + g2_i) ]."""

    def __init__(self, config: SogClrConfig, context: ObjectiveContext) -> None:
        super().__init__(config, context, temperature=GlobalTemperature(config.tau, context))

    def scaled(self, tau: Tensor, total: Tensor, slope: Tensor) -> tuple[Tensor, Tensor | None, Tensor | float]:
        return tau * total, None, 0.0


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
class FastClipV0(MovingAverageObjective):
    """Unscaled GCL: mean_i [ log(eps + g1_i) + log(eps + g2_i) ]."""

    def __init__(self, config: FastClipV0Config, context: ObjectiveContext) -> None:
        super().__init__(config, context, temperature=LearnedTemperature(config, context))

    def scaled(self, tau: Tensor, total: Tensor, slope: Tensor) -> tuple[Tensor, Tensor | None, Tensor | float]:
        return total, slope, -torch.log(tau)


@register("fastclip_v3", FastClipV3Config)
class FastClipV3(MovingAverageObjective):
    """RGCL-g: tau mean_i [ log(eps + g1_i) + log(eps + g2_i) ] + 2 tau rho; tau's gradient is NeuCLIP's (13)."""

    config: FastClipV3Config

    def __init__(self, config: FastClipV3Config, context: ObjectiveContext) -> None:
        super().__init__(config, context, temperature=LearnedTemperature(config, context))
        warn_of_large_rho(config.rho, config, context)

    def scaled(self, tau: Tensor, total: Tensor, slope: Tensor) -> tuple[Tensor, Tensor | None, Tensor | float]:
        inside = total + 2 * self.config.rho
        weight = 2.0 if self.config.tau_gradient == "published_code" else 1.0
        return tau * inside, inside + weight * tau * slope, 0.0
