"""`neuclip`: normalizers predicted by a compact network that is trained alongside the encoders (NeuCLIP)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.base import ObjectiveContext
from pipeline.objectives.npn.mlp import MlpNpn
from pipeline.objectives.npn.network import BothSides, Npn, Prediction, PrototypeNpn, anchors_of, prototypes
from pipeline.objectives.npn.npn_config import NpnConfig
from pipeline.objectives.registry import register
from pipeline.objectives.softmax import AnchorBatch, Decision, Pair
from pipeline.objectives.temperature import GlobalTemperatureObjective, warn_of_large_rho


@section
class NeuClipConfig(NpnConfig):
    """NeuCLIP, Algorithm 1 with the unified objective (12).

    From the paper: 4,096 prototypes, restart every 500 steps, 10 inner steps of AdaGrad. All else is ours, chosen at
    desk size (20k pairs, d = 64), not validated at scale. Measured there: `npn_lr` 0.01 with the accumulator kept over
    restarts predicts best. Guards, which scores did not tell apart: `ratio_cap` 5, which lr 1.0 needed in one of two
    runs; no gradient through alpha. `rho`, `eps` and the temperature's settings suit small data: set them as a recipe
    of your size does.

    rho: robustness radius; must stay below log(n - 1), or tau falls to its lower bound (below log(B - 1) where the
    updates bring alpha to the batch's own value).
    eps: the small constant beside g. ratio_cap: upper bound of q = (eps + g) / exp(alpha) in the gradients of encoders
    and temperature, 0 = none but exp(30), so that fp32 stays finite. stop_gradient: alpha is a constant for encoders
    and temperature.
    """

    name: str = "neuclip"
    rho: float = Field(default=2.5, gt=0)
    eps: float = Field(default=1e-14, gt=0)
    ratio_cap: float = Field(default=5.0, ge=0)
    stop_gradient: bool = True


@section
class NeuClipLiteralConfig(NeuClipConfig):
    """NeuCLIP read literally: `npn_lr` 1.0, no cap, the whole gradient of (12), a fresh accumulator at each restart.

    AdaGrad with a zero accumulator moves every coordinate by `npn_lr` in its first step, here the length of a whole
    prototype; at desk size one run of two stalled with it, and in a later study its predictions were worse, its scores
    not. Algorithm 1 speaks of W alone: that a restart clears the accumulator is a guess, `reset_accumulator` false the
    other one. `rho` is as little the paper's as above. Not validated at
    scale.
    """

    name: str = "neuclip_literal"
    npn_lr: float = Field(default=1.0, gt=0)
    reset_accumulator: bool = True
    ratio_cap: float = Field(default=0.0, ge=0)
    stop_gradient: bool = False


@register("neuclip", NeuClipConfig)
@register("neuclip_literal", NeuClipLiteralConfig)
class NeuClip(GlobalTemperatureObjective):
    """L = tau mean_i [ exp(-a1)(eps + g1) + a1 + exp(-a2)(eps + g2) + a2 ] + 2 tau (rho - 1), a from the NPN.

    Metrics: normalizer_gap: mean |alpha - log(eps + g)| over both sides, after the inner updates;
    normalizer_gap_cold: the same before them; ratio_max: largest q after the cap; prototype_norm: mean |W_j|.
    """

    config: Any

    def __init__(self, config: NeuClipConfig, context: ObjectiveContext) -> None:
        super().__init__(config, context)
        self.npn: Npn = MlpNpn(config, context) if config.npn == "mlp" else PrototypeNpn(config, context)
        warn_of_large_rho(config, context)
        if context.world.is_main:
            _warn_of_stalling(config, context.dim)

    def decide(self, batch: AnchorBatch) -> Decision:
        config, tau = self.config, self.temperature.value()
        anchors = anchors_of(batch, config, tau=tau)
        with self.world.phase("npn"):
            prediction = self.npn.advance(batch, anchors)
        alpha, ratio = [], []
        for side in (0, 1):
            alpha.append(torch.maximum(prediction.alpha[side], anchors[side].log_target - self._log_cap))
            ratio.append(torch.exp(anchors[side].log_target - alpha[side]))
        inside = (ratio[0] + alpha[0] + ratio[1] + alpha[1]).mean() + 2 * (config.rho - 1)
        tau_gradient = inside
        for side in (0, 1):
            tau_gradient = tau_gradient - (torch.exp(batch.log_g[side] - alpha[side]) * batch.mean_h[side]).mean()
        through: Pair | None = None
        if not config.stop_gradient:
            through, tau_term = self._through_alpha(batch, anchors, ratio)
            tau_gradient = tau_gradient + tau_term
        zero = torch.zeros_like(tau)
        return Decision(
            loss=tau * inside,
            log_normalizer=(alpha[0], alpha[1]),
            log_scale=(zero, zero),
            tau_gradient=tau_gradient,
            feature_gradient=through,
            metrics=self._metrics(prediction, anchors, ratio),
            update=batch,
        )

    def predict(self, batch: AnchorBatch) -> Pair:
        return self.npn.predict(anchors_of(batch, self.config, tau=self.temperature.value()))

    @property
    def _log_cap(self) -> float:
        cap = self.config.ratio_cap
        return min(math.log(cap), prototypes.MAX_LOG_RATIO) if cap else prototypes.MAX_LOG_RATIO

    def _through_alpha(self, batch: AnchorBatch, anchors: BothSides, ratio: list[Tensor]) -> tuple[Pair, Tensor]:
        """What flows through alpha: (tau / B) r_i d alpha_i, for this rank's features and, over all ranks, for tau.

        Where the cap holds, r_i is that of the cap.
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

    def _metrics(self, prediction: Prediction, anchors: BothSides, ratio: list[Tensor]) -> dict[str, Tensor]:
        return {
            "tau": self.temperature.value(),
            "normalizer_gap": _gap(prediction.alpha, anchors),
            "normalizer_gap_cold": _gap(prediction.cold, anchors),
            "ratio_max": torch.maximum(ratio[0].max(), ratio[1].max()),
            **self.npn.metrics(),
        }

    def apply(self, pending: Decision, *, lr_scale: float) -> None:
        super().apply(pending, lr_scale=lr_scale)
        self.npn.commit(pending.update)

    def restarts(self) -> bool:
        every = self.config.restart_every if self.config.npn == "prototypes" else 0
        return every > 0 and self.steps % every == 0

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        return {**super().learning_rates(lr_scale=lr_scale), "npn_lr": self.config.npn_lr}

    def distributions(self) -> dict[str, Tensor]:
        tensors = self.npn.tensors()
        if "npn.live" not in tensors:
            return {}
        weight = tensors["npn.weight"][:, : int(tensors["npn.live"])]
        return {f"prototype_norm_for_{side}": weight[i].norm(dim=1) for i, side in enumerate(("image", "text"))}

    def own_state(self) -> dict[str, Tensor]:
        return {**super().own_state(), **self.npn.tensors()}


def _gap(alpha: Pair, anchors: BothSides) -> Tensor:
    return torch.stack([(a - s.log_target).abs().mean() for a, s in zip(alpha, anchors, strict=True)]).mean()


def _warn_of_stalling(config: NeuClipConfig, dim: int) -> None:
    """AdaGrad's first step turns a prototype by about lr sqrt(d): 0.02 to 0.08 did best at d = 64, 8 could stall."""
    learns = config.npn == "prototypes" and config.npn_optimizer == "adagrad" and config.inner_steps > 0
    turn = config.npn_lr * math.sqrt(dim)
    if learns and turn > 0.5:
        warnings.warn(
            f"objective.npn_lr = {config.npn_lr} turns each prototype by about {turn:.1f} times its own length in a "
            "first AdaGrad step: training can stall. The default of 0.01 does not.",
            stacklevel=3,
        )
