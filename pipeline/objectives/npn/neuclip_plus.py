"""`neuclip_plus`: the prediction of NeuCLIP's network, pooled with the batch's own estimate; ours, in no paper."""

from __future__ import annotations

import logging
import math
from typing import Annotated, Literal

import pydantic
import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.facts import ObjectiveContext
from pipeline.objectives.npn.network import NPNS, Prediction
from pipeline.objectives.npn.neuclip import NeuClip, NeuClipConfig
from pipeline.objectives.registry import register

log = logging.getLogger(__name__)


@section
class NeuClipPlusConfig(NeuClipConfig):
    """NeuCLIP with many prototypes that are not learned but are the newest features of earlier batches.

    With ten inner updates, a step of `neuclip` has 21 matrix products with its prototypes per side: two per update and
    one for the prediction. Without updates only the last one is left, here with four times as many prototypes. Chosen
    by the study `separation` (docs/studies.md); not validated at scale.
    """

    name: str = "neuclip_plus"
    npn: Annotated[str, AfterValidator(NPNS.known)] = "queue"
    """`queue`: prototypes that are the newest features of earlier batches, without learning. `prototypes`: learned.
    `mlp` predicts no mean over samples and cannot be pooled."""
    prototypes: int = Field(default=16384, ge=1, le=2**30)
    """Number of prototypes m per side. The larger m, the older the oldest features; the program warns above half of the
    dataset, and the study `separation` (docs/studies.md) tries a quarter of it."""
    restart_with: Literal["current", "previous"] = "previous"
    """`previous` keeps the batch's own features, which the batch's own estimate has already, out of the prediction, and
    with `npn` queue also the features of each anchor's own sample from its last visit."""
    ratio_cap: float = Field(default=2.0, ge=0)
    """As in `neuclip`, where it is 5. Pooling alone bounds q by (m + B - 1) / (B - 1). A lower bound adds bias and
    removes variance from the gradients of small batches."""
    ratio_power: float = Field(default=1.0, ge=0, le=1)
    """The gradients weigh an anchor by q to this power. 1: by its share in the global loss. 0: all alike, with the
    batch's own estimate, as `fastclip_v3` with gamma 1. Between them, less bias or less variance."""
    stop_gradient: Literal[True] = True
    """Alpha is a constant in the gradients of encoders and temperature."""

    @pydantic.model_validator(mode="after")
    def _has_prototypes(self) -> NeuClipPlusConfig:
        if not NPNS[self.npn].is_mean:
            fitting = ", ".join(name for name in NPNS.names() if NPNS[name].is_mean)
            raise ValueError(
                f"npn = {self.npn} predicts no mean over samples, which neuclip_plus pools with the batch's own: "
                f"choose one of {fitting}"
            )
        return self


@register("neuclip_plus", NeuClipPlusConfig)
class NeuClipPlus(NeuClip):
    """`neuclip` with exp(alpha) = (m exp(alpha_npn) + (B - 1) (eps + g)) / (m + B - 1) in place of exp(alpha_npn).

    Both estimates are means over samples of the dataset, m prototypes and B - 1 partners: this is their common mean.
    Prototypes of an anchor's own sample are excluded by their ids, and its m is smaller by their number. With
    p = `ratio_power` below 1, alpha is p times this value plus (1 - p) log(eps + g).
    """

    config: NeuClipPlusConfig

    def __init__(self, config: NeuClipPlusConfig, context: ObjectiveContext) -> None:
        super().__init__(config, context)
        m, n = config.prototypes, context.dataset_size
        if context.world.is_main and 0 < n < 2 * m:
            log.warning(
                "objective.prototypes = %d is more than half of the dataset (n = %d): the oldest features are %.1f "
                "epochs old, and most samples are in the queue already. Set objective.prototypes to %d, a quarter of "
                "n, or less.",
                m,
                n,
                m / n,
                max(1, n // 4),
            )

    def chosen_normalizers(self, prediction: Prediction, targets: Tensor) -> Tensor:
        common = pooled(torch.stack(prediction.alpha), targets, prototypes=prediction.prototypes)
        return torch.lerp(targets, common, self.config.ratio_power)


def pooled(alpha: Tensor, target: Tensor, *, prototypes: int | Tensor) -> Tensor:
    """log of the mean of exp(alpha), with weight m, and exp(target), with weight B - 1.

    Args:
        alpha: log-normalizers over m prototypes, [..., B].
        target: log(eps + g) within the batch, [..., B].
        prototypes: m, for each anchor if they differ, [B]; may be 0.
    """
    count = prototypes.to(alpha.dtype) if isinstance(prototypes, Tensor) else alpha.new_full((), prototypes)
    others = alpha.shape[-1] - 1
    total = torch.logaddexp(alpha + count.log(), target + math.log(others))
    return total - (count + others).log()
