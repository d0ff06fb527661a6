"""The interface of an NPN as a component of the objective, and the batch as an NPN sees it."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.objectives.base import ObjectiveContext, Pair
from pipeline.objectives.npn.prototypes import Anchors
from pipeline.objectives.optimizers import AdaGrad, Adam
from pipeline.objectives.replicated_network import ReplicatedNetwork
from pipeline.objectives.softmax import AnchorBatch, Component

BothSides = tuple[Anchors, Anchors]


@dataclass(frozen=True)
class Prediction:
    """Log-normalizers of the batch's anchors, [B] each."""

    alpha: Pair
    """To be used."""
    cold: Pair
    """From before the inner updates."""
    prototypes: int = 0
    """Prototypes that the prediction is a mean over; 0 for a network without any."""


class Npn(Component):
    """A network per side that predicts log-normalizers. The effect of `advance` is pending until `commit`.

    Args:
        config: A `NeuClipConfig`.
        context: The facts of the run.
        parameters: Initial parameters of both sides, [2, ...] each.
        slot_name: See `ReplicatedNetwork`.
    """

    def __init__(
        self,
        config: Any,
        context: ObjectiveContext,
        parameters: dict[str, Tensor],
        *,
        slot_name: str = "{parameter}.{slot}",
    ) -> None:
        self.config, self.context = config, context
        optimizer = AdaGrad(config.npn_lr) if config.npn_optimizer == "adagrad" else Adam(config.npn_lr)
        self.network = ReplicatedNetwork(parameters, optimizer, slot_name=slot_name)

    @abstractmethod
    def advance(self, batch: AnchorBatch, anchors: BothSides) -> Prediction:
        """Restart if due, update on this batch, predict."""

    @abstractmethod
    def predict(self, anchors: BothSides) -> Pair:
        """Log-normalizers from the lasting networks alone, [B] each."""

    @abstractmethod
    def commit(self, update: AnchorBatch) -> None:
        """Make what `advance` did on this batch lasting."""

    @abstractmethod
    def slopes(self, side: int, anchors: Anchors, partners_bd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """d alpha / d (own feature [b, d], partner's feature [b, d], tau [b]) of the prediction in use."""

    def metrics(self) -> dict[str, Tensor]:
        return {}

    def replicated_state(self) -> dict[str, Tensor]:
        return self.network.state()

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        return {"npn_lr": self.config.npn_lr}


def anchors_of(batch: AnchorBatch, config: Any, *, tau: Tensor) -> BothSides:
    """The batch's two sides as an NPN sees them."""
    log_eps = math.log(config.eps)
    low = config.npn_precision == "bf16" or (config.npn_precision == "auto" and batch.positive.is_cuda)
    first, second = (
        Anchors(
            features=batch.features[side],
            positive=batch.positive,
            log_target=torch.logaddexp(batch.log_g[side], batch.log_g[side].new_full((), log_eps)),
            tau=tau,
            log_eps=log_eps,
            low=batch.features[side].bfloat16() if low else None,
        )
        for side in (0, 1)
    )
    return first, second
