"""Moving-average estimators of every sample's normalizer: what the SogCLR family shares.

    u_i <- (1 - gamma) u_i + gamma g_i(batch)        FastCLIP, equation (1); a sample seen for the first time takes g_i

stored as log u, because u leaves fp32's range. Loss weights use log(eps + u). What is differentiated is
(c / B) sum_i g_i / (eps + u_i) with u constant (FastCLIP, Algorithm 1); the reported loss is the objective's value at
u.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.base import ObjectiveConfig, ObjectiveContext
from pipeline.objectives.sample_table import PerSampleTable
from pipeline.objectives.softmax import AnchorBatch, Pair, SoftmaxObjective

ROWS = "per_sample"


@section
class EstimatorConfig(ObjectiveConfig):
    """Settings of the moving averages.

    gamma: weight of the newest value where `gamma_schedule` is "constant"; with "cosine" it falls per epoch from 1 to
    `gamma_min` over `gamma_decay_epochs` (default: half of the run's epochs). table_on: where per-sample rows live.
    """

    eps: float = Field(default=1e-14, gt=0)
    gamma_schedule: Literal["constant", "cosine"] = "constant"
    gamma: float = Field(default=0.6, gt=0, le=1)
    gamma_min: float = Field(default=0.2, gt=0, le=1)
    gamma_decay_epochs: int | None = Field(default=None, ge=1)
    table_on: Literal["host", "device"] = "host"


def cosine_gamma(epoch: int, *, gamma_min: float, decay_epochs: int) -> float:
    """`0.5 (1 + cos(pi min(epoch, E) / E)) (1 - gamma_min) + gamma_min` (FastCLIP, section 5)."""
    return 0.5 * (1 + math.cos(math.pi * min(epoch, decay_epochs) / decay_epochs)) * (1 - gamma_min) + gamma_min


def gamma_at(config: Any, context: ObjectiveContext, *, step: int) -> float:
    """gamma of a step under the configured schedule."""
    if config.gamma_schedule == "constant":
        return float(config.gamma)
    decay_epochs = config.gamma_decay_epochs
    if decay_epochs is None:
        wanted_by = "objective.gamma_schedule = 'cosine' without objective.gamma_decay_epochs"
        decay_epochs = max(1, context.epochs(wanted_by=wanted_by) // 2)
    return cosine_gamma(step // context.steps_per_epoch, gamma_min=config.gamma_min, decay_epochs=decay_epochs)


def moving_average(log_u: Tensor, log_g: Tensor, *, gamma: float) -> Tensor:
    """log of `(1 - gamma) u + gamma g`; where log_u is -inf (never seen) it is log g."""
    if gamma >= 1:
        return log_g
    mixed = torch.logaddexp(log_u + math.log1p(-gamma), log_g + math.log(gamma)) if gamma > 0 else log_u
    return torch.where(torch.isneginf(log_u), log_g, mixed)


class EstimatorObjective(SoftmaxObjective):
    """A softmax objective whose table starts with the columns log u of both sides."""

    needs_sample_ids = True

    def __init__(self, config: Any, context: ObjectiveContext) -> None:
        super().__init__(config, context)
        columns = {"image_log_u": -math.inf, "text_log_u": -math.inf, **self.further_columns()}
        self.table = PerSampleTable(
            columns,
            dataset_size=context.table_rows or context.dataset_size,
            world=context.world,
            device=context.device,
            on_host=config.table_on == "host",
        )
        gamma_at(config, context, step=0)  # what it cannot do without is asked for now

    def further_columns(self) -> dict[str, float]:
        """Columns of the method beyond log u, with their initial values."""
        return {}

    def prefetch(self, sample_ids: Tensor) -> None:
        self.table.prefetch(sample_ids)

    def fetch(self, sample_ids: Tensor) -> Tensor:
        return self.table.lookup(sample_ids).to(self.context.dtype)

    def estimate(self, batch: AnchorBatch) -> tuple[Pair, Pair]:
        """New log u and the log-normalizers log(eps + u), [B] each."""
        gamma = gamma_at(self.config, self.context, step=batch.step)
        first, second = (moving_average(batch.fetched[:, side], batch.log_g[side], gamma=gamma) for side in (0, 1))
        log_eps = first.new_full((), math.log(self.config.eps))
        return (first, second), (torch.logaddexp(first, log_eps), torch.logaddexp(second, log_eps))

    def predict(self, batch: AnchorBatch) -> Pair:
        """log(eps + u); for a sample never seen, the batch's own value."""
        log_eps = batch.positive.new_full((), math.log(self.config.eps))
        first, second = (
            torch.logaddexp(moving_average(batch.fetched[:, side], batch.log_g[side], gamma=0.0), log_eps)
            for side in (0, 1)
        )
        return first, second

    def estimator_metrics(self, batch: AnchorBatch, log_normalizer: Pair) -> dict[str, Tensor]:
        """normalizer_gap: mean |log(eps + u) - log(eps + g)| over both sides; gamma."""
        log_eps = batch.positive.new_full((), math.log(self.config.eps))
        gaps = [
            (a - torch.logaddexp(g, log_eps)).abs().mean() for a, g in zip(log_normalizer, batch.log_g, strict=True)
        ]
        gamma = gamma_at(self.config, self.context, step=batch.step)
        return {"normalizer_gap": torch.stack(gaps).mean(), "gamma": batch.positive.new_full((), gamma)}

    def row_state_dict(self) -> dict[str, tuple[int, Tensor]]:
        return {ROWS: (self.table.start, self.table.owned())}

    def row_blocks(self) -> dict[str, tuple[int, Iterable[Tensor]]]:
        return {ROWS: (self.table.start, self.table.snapshot())}

    def load_row_state_dict(self, read: Callable[[str, int, int], Tensor]) -> None:
        self.table.load(ROWS, read)


def temperature_slopes(batch: AnchorBatch, log_normalizer: Pair) -> Pair:
    """`(dg_i/dtau) / (eps + u_i)` of each anchor, [B] each: -(1/tau) exp(log g - a) mean_h."""
    first, second = (
        -torch.exp(batch.log_g[side] - log_normalizer[side]) * batch.mean_h[side] / batch.tau[side] for side in (0, 1)
    )
    return first, second
