"""`neuclip_plus`: the prediction of NeuCLIP's network, pooled with the batch's own estimate; ours, in no paper."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field

from pipeline.config import section
from pipeline.objectives.base import Pair
from pipeline.objectives.neuclip import NeuClip, NeuClipConfig
from pipeline.objectives.npn.network import Prediction
from pipeline.objectives.registry import register


@section
class NeuClipPlusConfig(NeuClipConfig):
    """NeuCLIP with many prototypes that are not learned but are the newest features of earlier batches.

    With ten inner updates, a step of `neuclip` has 21 matrix products with its prototypes per side: two per update and
    one for the prediction. Without updates only the last one is left, here with four times as many prototypes. Chosen
    by `neuclip study separation`; not validated at scale.
    """

    name: str = "neuclip_plus"
    npn: Literal["prototypes", "queue"] = "queue"
    """`queue`: prototypes that are the newest features of earlier batches, without learning. `prototypes`: learned."""
    prototypes: int = Field(default=16384, ge=1)
    """Number of prototypes m per side. The larger m, the older the oldest features; `neuclip study separation` tries a
    quarter of the dataset."""
    restart_with: Literal["current", "previous"] = "previous"
    """`previous` keeps the batch's own features, which the batch's own estimate has already, out of the prediction."""
    ratio_cap: float = Field(default=2.0, ge=0)
    """As in `neuclip`, where it is 5. Pooling alone bounds q by (m + B - 1) / (B - 1). A lower bound adds bias and
    removes variance from the gradients of small batches."""
    stop_gradient: Literal[True] = True
    """Alpha is a constant in the gradients of encoders and temperature."""


@register("neuclip_plus", NeuClipPlusConfig)
class NeuClipPlus(NeuClip):
    """`neuclip` with exp(alpha) = (m exp(alpha_npn) + (B - 1) (eps + g)) / (m + B - 1) in place of exp(alpha_npn).

    Both estimates are means over samples of the dataset, m prototypes and B - 1 partners: this is their common mean.
    """

    def chosen_normalizers(self, prediction: Prediction, targets: Pair) -> Pair:
        first, second = (
            pooled(alpha, target, prototypes=prediction.prototypes)
            for alpha, target in zip(prediction.alpha, targets, strict=True)
        )
        return first, second


def pooled(alpha: torch.Tensor, target: torch.Tensor, *, prototypes: int) -> torch.Tensor:
    """log of the mean of exp(alpha), with weight m, and exp(target), with weight B - 1.

    Args:
        alpha: log-normalizers over m prototypes, [B].
        target: log(eps + g) within the batch, [B].
        prototypes: m.
    """
    others = len(alpha) - 1
    total = torch.logaddexp(alpha + math.log(prototypes), target + math.log(others))
    return total - math.log(prototypes + others)
