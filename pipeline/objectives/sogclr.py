"""The global contrastive loss with moving averages of the normalizers: `sogclr`, `isogclr` and `fastclip_v0` to `_v3`.

    u_i <- (1 - gamma) u_i + gamma g_i(batch)        FastCLIP, equation (1); a sample seen for the first time takes g_i

They are stored as log u, because u leaves fp32's range. Loss weights use log(eps + u). The gradient is that of
(c / B) sum_i g_i / (eps + u_i) with u constant (FastCLIP, Algorithm 1); the reported loss is the objective's value at
u.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.registry import ObjectiveConfig, ObjectiveContext, register
from pipeline.objectives.sample_table import PerSampleTable
from pipeline.objectives.softmax import AnchorBatch, AnchorWeights, SoftmaxObjective
from pipeline.objectives.temperature import (
    TAU_BETA1,
    TAU_MAX,
    Adam,
    LearnedTauConfig,
    LearnedTemperature,
    Temperature,
    TemperatureConfig,
    tau_lr_at,
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


def gamma_at(config: EstimatorConfig, context: ObjectiveContext, *, step: int) -> float:
    """gamma of a step; the cosine is `0.5 (1 + cos(pi min(epoch, E) / E)) (1 - gamma_min) + gamma_min` (FastCLIP,
    section 5). A UserError says that it needs the length of the run."""
    if config.gamma_schedule == "constant":
        return config.gamma
    decay_epochs = config.gamma_decay_epochs
    if decay_epochs is None:
        needed_by = "objective.gamma_schedule = 'cosine' without objective.gamma_decay_epochs"
        decay_epochs = max(1, context.epochs(needed_by=needed_by) // 2)
    share = min(step // context.steps_per_epoch, decay_epochs) / decay_epochs
    return 0.5 * (1 + math.cos(math.pi * share)) * (1 - config.gamma_min) + config.gamma_min


class MovingAverageObjective(SoftmaxObjective):
    """The global contrastive loss with g estimated by moving averages u; a method implements `weights_at`.

    The table has log u of both sides, and behind them `further_columns` of a method, by name and initial value.
    """

    table: PerSampleTable
    config: EstimatorConfig

    def __init__(
        self,
        config: EstimatorConfig,
        context: ObjectiveContext,
        *,
        temperature: Temperature,
        further_columns: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(config, context, temperature=temperature, eps=config.eps)
        self.table = PerSampleTable(
            {"image_log_u": -math.inf, "text_log_u": -math.inf, **(further_columns or {})},
            dataset_size=context.dataset_size,
            world=context.world,
            device=context.device,
        )
        gamma_at(config, context, step=0)  # report missing facts now rather than in the first step

    @abstractmethod
    def weights_at(self, batch: AnchorBatch, log_normalizer: Tensor) -> AnchorWeights:
        """The batch's weights at log(eps + u), [2, B], whose derivatives by tau are those with u in the denominators
        constant."""

    def anchor_weights(self, batch: AnchorBatch) -> AnchorWeights:
        """Metrics: normalizer_gap: mean |log(eps + u) - log(eps + g)| over both sides; gamma."""
        gamma = gamma_at(self.config, self.context, step=batch.step)
        log_u = self._averages(batch, gamma=gamma)
        weights = self.weights_at(batch, self.with_eps(log_u))
        gap = (weights.log_normalizer - self.with_eps(batch.log_g)).abs().mean()
        metrics = {**weights.metrics, "normalizer_gap": gap, "gamma": batch.positive.new_full((), gamma)}
        return replace(weights, metrics=metrics, update=(log_u.T, batch.fetched))

    def cold_normalizers(self, batch: AnchorBatch) -> Tensor:
        return self.with_eps(self._averages(batch, gamma=0.0))  # for a new sample, with the batch's own value

    def update_state(self, pending: AnchorWeights, *, lr_scale: float) -> None:
        super().update_state(pending, lr_scale=lr_scale)
        self.table.write(pending.update[0].contiguous())

    def _averages(self, batch: AnchorBatch, *, gamma: float) -> Tensor:
        """log of `(1 - gamma) u + gamma g`, [2, B]; log g of new samples, whose log u is -inf."""
        log_u, log_g = batch.fetched[:, :2].T.contiguous(), batch.log_g
        if gamma >= 1:
            return log_g
        mixed = torch.logaddexp(log_u + math.log1p(-gamma), log_g + math.log(gamma)) if gamma > 0 else log_u
        return torch.where(torch.isneginf(log_u), log_g, mixed)


def both_sides(values: Tensor) -> Tensor:
    """mean_i [ x1_i + x2_i ] of [2, B]."""
    return values.sum(0).mean()


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
class SogClr(MovingAverageObjective):
    """GCL: tau mean_i [ log(eps + g1_i) + log(eps + g2_i) ]."""

    def __init__(self, config: SogClrConfig, context: ObjectiveContext) -> None:
        super().__init__(config, context, temperature=Temperature(config.tau, context))

    def weights_at(self, batch: AnchorBatch, log_normalizer: Tensor) -> AnchorWeights:
        tau = self.temperature.value()
        return AnchorWeights(tau * both_sides(log_normalizer), log_normalizer, metrics={"tau": tau})


@section
class FastClipV0Config(TemperatureConfig, EstimatorConfig):
    """The global contrastive loss without the factor tau, whose gradient also moves tau (FastCLIP-v0)."""

    name: str = "fastclip_v0"
    tau_init: float = Field(default=0.03, gt=0)
    gamma_schedule: Literal["constant", "cosine"] = "cosine"


@register("fastclip_v0", FastClipV0Config)
class FastClipV0(MovingAverageObjective):
    """Unscaled GCL: mean_i [ log(eps + g1_i) + log(eps + g2_i) ]."""

    def __init__(self, config: FastClipV0Config, context: ObjectiveContext) -> None:
        super().__init__(config, context, temperature=LearnedTemperature(config, context))

    def weights_at(self, batch: AnchorBatch, log_normalizer: Tensor) -> AnchorWeights:
        tau = self.temperature.value()
        return AnchorWeights(
            loss=both_sides(log_normalizer),
            log_normalizer=log_normalizer,
            log_scale=-torch.log(tau),
            tau_gradient=both_sides(batch.tau_slopes(log_normalizer)),
            metrics={"tau": tau},
        )


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


@register("fastclip_v3", FastClipV3Config)
class FastClipV3(MovingAverageObjective):
    """RGCL-g: tau mean_i [ log(eps + g1_i) + log(eps + g2_i) ] + 2 tau rho; tau's gradient is NeuCLIP's (13)."""

    config: FastClipV3Config

    def __init__(self, config: FastClipV3Config, context: ObjectiveContext) -> None:
        super().__init__(config, context, temperature=LearnedTemperature(config, context))
        warn_of_large_rho(config.rho, config, context)

    def weights_at(self, batch: AnchorBatch, log_normalizer: Tensor) -> AnchorWeights:
        tau = self.temperature.value()
        inside = both_sides(log_normalizer) + 2 * self.config.rho
        weight = 2.0 if self.config.tau_gradient == "published_code" else 1.0
        return AnchorWeights(
            loss=tau * inside,
            log_normalizer=log_normalizer,
            tau_gradient=inside + weight * tau * both_sides(batch.tau_slopes(log_normalizer)),
            metrics={"tau": tau},
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
    """A learned temperature per sample and side, in the table behind the columns of log u; the state is the mean of the
    latest batch, since an open_clip file has room for one logit scale only."""

    def __init__(self, config: ISogClrConfig, context: ObjectiveContext) -> None:
        self.config = config
        self.batch_tau = torch.tensor(config.tau_init, dtype=context.dtype, device=context.device)

    def of_anchors(self, size: int, fetched: Tensor | None) -> Tensor:
        assert fetched is not None
        return fetched[:, 2:4].T.contiguous()

    def logit_scale(self) -> float:
        return -math.log(float(self.batch_tau))

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        return {"tau_lr": tau_lr_at(self.config, lr_scale=lr_scale)}

    def replicated_state(self) -> dict[str, Tensor]:
        return {"batch_tau": self.batch_tau}


@register("isogclr", ISogClrConfig)
@register("fastclip_v2", FastClipV2Config)
class ISogClr(MovingAverageObjective):
    """Robust global contrastive loss (RGCL) with a learned temperature for every sample:
    mean_i [ tau1_i (log(eps + g1_i) + rho) + tau2_i (log(eps + g2_i) + rho) ].

    A row of the table has log u, tau, first moments and, with Adam, second moments (2 columns each) and the number of
    updates: 36 bytes with Adam, 24 with momentum.
    """

    temperature: SampleTemperatures
    config: ISogClrConfig

    def __init__(self, config: ISogClrConfig, context: ObjectiveContext) -> None:
        columns = {"image_tau": config.tau_init, "text_tau": config.tau_init, "image_moment1": 0.0, "text_moment1": 0.0}
        if config.tau_optimizer != "momentum":
            columns |= {"image_moment2": 0.0, "text_moment2": 0.0, "updates": 0.0}
        temperature = SampleTemperatures(config, context)
        super().__init__(config, context, temperature=temperature, further_columns=columns)
        warn_of_large_rho(config.rho, config, context)

    def weights_at(self, batch: AnchorBatch, log_normalizer: Tensor) -> AnchorWeights:
        inside, tau = log_normalizer + self.config.rho, batch.tau
        return AnchorWeights(
            loss=(tau * inside).mean(1).sum(),
            log_normalizer=log_normalizer,
            tau_gradient=(inside + tau * batch.tau_slopes(log_normalizer)).T.contiguous(),
            metrics={"tau": tau.mean(), "tau_lowest": tau.min(), "tau_highest": tau.max()},
        )

    def update_state(self, pending: AnchorWeights, *, lr_scale: float) -> None:
        """Write log u and the temperatures after one step of their optimizer, within [tau_min, 1]."""
        (log_u, fetched), gradient = pending.update, pending.tau_gradient
        assert gradient is not None
        c, lr, rows = self.config, tau_lr_at(self.config, lr_scale=lr_scale), fetched[:, 2:].clone()
        tau, moment1, moment2, updates = rows[:, :2], rows[:, 2:4], rows[:, 4:6], rows[:, 6:]
        if c.tau_optimizer == "momentum":
            tau -= lr * moment1.lerp_(gradient, 1 - TAU_BETA1)
        else:
            updates += 1
            slots = {"moment1": moment1, "moment2": moment2}
            adam = Adam(lr, (TAU_BETA1, self.context.beta2), self.context.adam_eps, root=c.tau_optimizer == "adam")
            adam.step(tau, gradient, slots, updates=updates)
        tau.clamp_(c.tau_min, TAU_MAX)
        self.temperature.batch_tau.copy_(tau.mean())
        self.table.write(torch.cat([log_u, rows], 1))
