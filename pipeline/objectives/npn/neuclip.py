"""`neuclip`: normalizers predicted by a compact network that is trained alongside the encoders (NeuCLIP)."""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.facts import ObjectiveContext
from pipeline.objectives.npn.network import NPNS, BothSides, Npn, NpnConfig, Prediction, anchors_of
from pipeline.objectives.npn.prototypes import MAX_LOG_RATIO
from pipeline.objectives.parts import Pair
from pipeline.objectives.registry import register
from pipeline.objectives.softmax import AnchorBatch, AnchorWeights, SoftmaxObjective
from pipeline.objectives.temperature import LearnedTemperature, warn_of_large_rho


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
        super().__init__(config, context, temperature=tau, estimator=self.npn, eps=config.eps)
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

    def chosen_normalizers(self, prediction: Prediction, targets: Tensor) -> Tensor:
        """The log-normalizers that weigh the batch's anchors, [2, B]; targets: the batch's own log(eps + g), [2, B]."""
        return torch.stack(prediction.alpha)

    def cold_normalizers(self, batch: AnchorBatch) -> Tensor:
        return torch.stack(self.npn.predict(anchors_of(batch, self.config, tau=self.temperature.value())))

    def restarts(self) -> bool:
        return self.npn.restarts(self.steps)

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
