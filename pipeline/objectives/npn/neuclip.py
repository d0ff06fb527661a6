"""`neuclip`: normalizers predicted by a compact network that is trained alongside the encoders (NeuCLIP).

`neuclip_plus` pools that prediction with the batch's own estimate; it is ours, in no paper.
"""

from __future__ import annotations

import logging
import math
from typing import Annotated, Any, Literal

import pydantic
import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.npn.network import NPNS, BothSides, Npn, NpnConfig, Prediction, anchors_of
from pipeline.objectives.npn.prototypes import MAX_LOG_RATIO
from pipeline.objectives.registry import ObjectiveContext, Pair, register
from pipeline.objectives.softmax import AnchorBatch, AnchorWeights, SoftmaxObjective
from pipeline.objectives.temperature import LearnedTemperature, warn_of_large_rho

log = logging.getLogger(__name__)


@section
class NeuClipConfig(NpnConfig):
    """NeuCLIP, Algorithm 1 with the unified objective (12).

    From the paper: 4,096 prototypes, restart every 500 steps, 10 inner steps of AdaGrad. All other defaults are ours,
    chosen at desk size (20k pairs, d = 64) and not validated at scale. There, `npn_lr` 0.01 with the accumulator kept
    over restarts predicted best; the guards `ratio_cap` and `stop_gradient` made no measurable difference to scores,
    but `npn_lr` 1.0 needed the cap in one of two runs. `rho`, `eps` and the temperature's settings suit small data.
    """

    name: str = "neuclip"
    rho: float = Field(default=2.5, gt=0)
    """Robustness radius; must stay below log(n - 1), or tau falls to its lower bound (below log(B - 1) where the
    updates bring alpha to the batch's own value)."""
    ratio_cap: float = Field(default=5.0, ge=0)
    """Upper bound of q = (eps + g) / exp(alpha) in the gradients of encoders and temperature; 0 = only the bound
    exp(30) that keeps fp32 finite."""
    stop_gradient: bool = True
    """Treat alpha as a constant in the gradients of encoders and temperature."""


@section
class NeuClipLiteralConfig(NeuClipConfig):
    """NeuCLIP read literally: `npn_lr` 1.0, no cap, the whole gradient of (12), a fresh accumulator at each restart.

    AdaGrad with a zero accumulator moves every coordinate by `npn_lr` in its first step, here by the length of a whole
    prototype. At desk size one of two runs stalled with it, and in a later study its predictions were worse, its scores
    not. Algorithm 1 speaks of W alone: that a restart clears the accumulator is a guess, `reset_accumulator` false the
    other one. `rho` is not the paper's, as above. Not validated at scale.
    """

    name: str = "neuclip_literal"
    npn_lr: float = Field(default=1.0, gt=0)
    reset_accumulator: bool = True
    ratio_cap: float = Field(default=0.0, ge=0)
    stop_gradient: bool = False


@register("neuclip", NeuClipConfig)
@register("neuclip_literal", NeuClipLiteralConfig)
class NeuClip(SoftmaxObjective):
    """L = tau mean_i [ exp(-a1)(eps + g1) + a1 + exp(-a2)(eps + g2) + a2 ] + 2 tau (rho - 1), a from the NPN.

    Metrics: normalizer_gap: mean |alpha - log(eps + g)| over both sides, after the inner updates;
    normalizer_gap_cold: the same before them; ratio_max: largest q after the cap; prototype_norm: mean |W_j|.
    """

    temperature: LearnedTemperature
    config: NeuClipConfig

    def __init__(self, config: NeuClipConfig, context: ObjectiveContext) -> None:
        variant: Any = NPNS[config.npn]  # takes two arguments, unlike `Npn` itself
        self.npn: Npn = variant(config, context)
        tau = LearnedTemperature(config, context)
        super().__init__(config, context, temperature=tau, parts=(self.npn,), eps=config.eps)
        self.needs_ids = self.npn.needs_ids
        self._log_cap = min(math.log(config.ratio_cap), MAX_LOG_RATIO) if config.ratio_cap else MAX_LOG_RATIO
        warn_of_large_rho(config.rho, config, context)

    def anchor_weights(self, batch: AnchorBatch) -> AnchorWeights:
        config, tau = self.config, self.temperature.value()
        anchors = anchors_of(batch, config, tau=tau)
        targets = torch.stack([side.log_target for side in anchors])
        with self.world.phase("npn"):
            prediction = self.npn.advance(batch, anchors)
        alpha = torch.maximum(self.chosen_normalizers(prediction, targets), targets - self._log_cap)
        ratio = torch.exp(targets - alpha)
        inside = (ratio[0] + alpha[0] + ratio[1] + alpha[1]).mean() + 2 * (config.rho - 1)
        within = (torch.exp(batch.log_g - alpha) * batch.mean_h).mean(1)
        tau_gradient = inside - within[0] - within[1]
        through: Pair | None = None
        if not config.stop_gradient:
            through, tau_term = self._through_alpha(batch, anchors, ratio)
            tau_gradient = tau_gradient + tau_term
        return AnchorWeights(
            loss=tau * inside,
            log_normalizer=alpha,
            tau_gradient=tau_gradient,
            feature_gradient=through,
            metrics={
                "tau": tau,
                "normalizer_gap": (torch.stack(prediction.alpha) - targets).abs().mean(),
                "normalizer_gap_cold": (torch.stack(prediction.cold) - targets).abs().mean(),
                "ratio_max": ratio.max(),
                **self.npn.metrics(),
            },
            update=batch,
        )

    def update_state(self, pending: AnchorWeights, *, lr_scale: float) -> None:
        super().update_state(pending, lr_scale=lr_scale)
        self.npn.commit(pending.update)

    def chosen_normalizers(self, prediction: Prediction, targets: Tensor) -> Tensor:
        """The log-normalizers that weigh the batch's anchors, [2, B]; targets: the batch's own log(eps + g), [2, B]."""
        return torch.stack(prediction.alpha)

    def cold_normalizers(self, batch: AnchorBatch) -> Tensor:
        return torch.stack(self.npn.predict(anchors_of(batch, self.config, tau=self.temperature.value())))

    def _through_alpha(self, batch: AnchorBatch, anchors: BothSides, ratio: Tensor) -> tuple[Pair, Tensor]:
        """The gradient through alpha, (tau / B) r_i d alpha_i: for this rank's features and, over all ranks, for tau.

        Where the cap applies, r_i is computed with the capped ratio.
        """
        rows, tau = batch.rows, anchors[0].tau
        gradients = [torch.zeros_like(batch.features[side][rows]) for side in (0, 1)]
        tau_term = torch.zeros_like(tau)
        for side in (0, 1):
            to_own, to_partner, to_tau = self.npn.slopes(side, anchors[side].take(rows), batch.features[1 - side][rows])
            share = tau * (1.0 - ratio[side][rows]) / batch.size
            tau_term = tau_term + (share * to_tau).sum()
            gradients[side] += share[:, None] * to_own
            gradients[1 - side] += share[:, None] * to_partner
        return (gradients[0], gradients[1]), self.world.all_gather(tau_term[None]).sum()


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
                f"objective.prototypes = {m} is more than half of the dataset (n = {n}): the oldest features are "
                f"{m / n:.1f} epochs old, and most samples are in the queue already. Set objective.prototypes to "
                f"{max(1, n // 4)}, a quarter of n, or less."
            )

    def chosen_normalizers(self, prediction: Prediction, targets: Tensor) -> Tensor:
        common = pooled(torch.stack(prediction.alpha), targets, prototypes=prediction.prototypes)
        return torch.lerp(targets, common, self.config.ratio_power)


def pooled(alpha: Tensor, target: Tensor, *, prototypes: int | Tensor) -> Tensor:
    """log of the mean of exp(alpha), with weight m, and exp(target), with weight B - 1, [..., B] each; m may be 0."""
    count = prototypes.to(alpha.dtype) if isinstance(prototypes, Tensor) else alpha.new_full((), prototypes)
    others = alpha.shape[-1] - 1
    total = torch.logaddexp(alpha + count.log(), target + math.log(others))
    return total - (count + others).log()
