"""`neuclip`: normalizers predicted by a compact network that is trained alongside the encoders (NeuCLIP)."""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives import prototypes
from pipeline.objectives.base import ObjectiveContext
from pipeline.objectives.frame import Batch, Decision, Pair
from pipeline.objectives.npn import Prediction, PrototypeNpn, anchors_of
from pipeline.objectives.npn_config import NpnConfig
from pipeline.objectives.registry import register
from pipeline.objectives.temperature import GlobalTemperatureObjective


@section
class NeuClipConfig(NpnConfig):
    """NeuCLIP, Algorithm 1 with the unified objective (12).

    From the paper: 4,096 prototypes, restart every 500 steps, 10 inner steps of AdaGrad. What the paper leaves open is
    set to what did best in a study at desk size (20k pairs), not validated at scale: `npn_lr` 0.01 with the accumulator
    kept over restarts, `ratio_cap` 5, no gradient through alpha.

    rho: robustness radius; must stay below log(n - 1), or tau falls to its lower bound.
    eps: the small constant beside g. ratio_cap: upper bound of q = (eps + g) / exp(alpha) in the gradients of encoders
    and temperature, 0 = none. stop_gradient: alpha is a constant for encoders and temperature.
    """

    name: str = "neuclip"
    rho: float = Field(default=2.5, gt=0)
    eps: float = Field(default=1e-14, gt=0)
    ratio_cap: float = Field(default=5.0, ge=0)
    stop_gradient: bool = True


@register("neuclip", NeuClipConfig)
class NeuClip(GlobalTemperatureObjective):
    """L = tau mean_i [ exp(-a1)(eps + g1) + a1 + exp(-a2)(eps + g2) + a2 ] + 2 tau (rho - 1), a from the NPN.

    Metrics: normalizer_gap: mean |alpha - log(eps + g)| over both sides, after the inner updates;
    normalizer_gap_cold: the same before them; ratio_max: largest q after the cap; prototype_norm: mean |W_j|.
    """

    config: Any

    def __init__(self, config: NeuClipConfig, context: ObjectiveContext) -> None:
        super().__init__(config, context)
        self.npn = PrototypeNpn(config, context)

    def decide(self, batch: Batch) -> Decision:
        config, tau = self.config, self.temperature.value()
        anchors = anchors_of(batch, eps=config.eps)
        prediction = self.npn.advance(batch, anchors)
        bound = (
            min(math.log(config.ratio_cap), prototypes.MAX_LOG_RATIO) if config.ratio_cap else prototypes.MAX_LOG_RATIO
        )
        alpha = tuple(
            torch.maximum(a, side.log_target - bound) for a, side in zip(prediction.alpha, anchors, strict=True)
        )
        ratio = [torch.exp(side.log_target - a) for a, side in zip(alpha, anchors, strict=True)]
        inside = [r + a for r, a in zip(ratio, alpha, strict=True)]
        tau_gradient = (inside[0] + inside[1]).mean() + 2 * (config.rho - 1)
        loss = tau * tau_gradient
        for side in (0, 1):
            tau_gradient = tau_gradient - (torch.exp(batch.log_g[side] - alpha[side]) * batch.mean_h[side]).mean()
        through: Pair | None = None
        if not config.stop_gradient:
            through, tau_term = self._through_alpha(batch, anchors, (ratio[0], ratio[1]))
            tau_gradient = tau_gradient + tau * tau_term
        zero = torch.zeros_like(tau)
        return Decision(
            loss=loss,
            log_normalizer=(alpha[0], alpha[1]),
            log_scale=(zero, zero),
            tau_gradient=tau_gradient,
            feature_gradient=through,
            metrics=self._metrics(prediction, anchors, ratio),
            update=batch,
        )

    def _through_alpha(
        self, batch: Batch, anchors: tuple[prototypes.Anchors, prototypes.Anchors], ratio: Pair
    ) -> tuple[Pair, Tensor]:
        """Gradient that flows through alpha: tau r_i / B times d alpha_i, for this rank's features and for tau."""
        gradients = [torch.zeros_like(batch.features[side][batch.rows]) for side in (0, 1)]
        tau_term = torch.zeros_like(batch.positive[0])
        for side in (0, 1):
            partner = batch.features[1 - side]
            to_own, to_partner, to_tau = prototypes.feature_terms(anchors[side], self.npn.pending_weight(side), partner)
            residual = 1.0 - ratio[side]
            tau_term = tau_term + (residual * to_tau).mean()
            share = (batch.tau[side] * residual / batch.size)[batch.rows, None]
            gradients[side] += share * to_own[batch.rows]
            gradients[1 - side] += share * to_partner[batch.rows]
        return (gradients[0], gradients[1]), tau_term

    def _metrics(
        self, prediction: Prediction, anchors: tuple[prototypes.Anchors, prototypes.Anchors], ratio: list[Tensor]
    ) -> dict[str, Tensor]:
        return {
            "tau": self.temperature.value(),
            "normalizer_gap": _gap(prediction.alpha, anchors),
            "normalizer_gap_cold": _gap(prediction.cold, anchors),
            "ratio_max": torch.maximum(ratio[0].max(), ratio[1].max()),
            "prototype_norm": torch.stack([self.npn.pending_weight(side).norm(dim=1).mean() for side in (0, 1)]).mean(),
        }

    def apply(self, pending: Decision, *, lr_scale: float) -> None:
        super().apply(pending, lr_scale=lr_scale)
        self.npn.commit(pending.update)

    def own_state(self) -> dict[str, Tensor]:
        return {**super().own_state(), **self.npn.tensors()}


def _gap(alpha: Pair, anchors: tuple[prototypes.Anchors, prototypes.Anchors]) -> Tensor:
    return torch.stack([(a - s.log_target).abs().mean() for a, s in zip(alpha, anchors, strict=True)]).mean()
