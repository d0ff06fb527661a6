"""`amorlip`: partition functions predicted by MLPs, after AmorLIP (Sun et al., 2025).

Written from NeuCLIP's description (sections 2 and 5.2) and the settings published with AmorLIP's code; what these leave
open is this project's own choice, marked "ours" below. This is not a reproduction of AmorLIP.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.npn import mlp
from pipeline.objectives.npn.network import ReplicatedNetwork
from pipeline.objectives.npn.prototypes import MAX_LOG_RATIO
from pipeline.objectives.registry import ObjectiveContext, Pair, register
from pipeline.objectives.softmax import AnchorBatch, AnchorWeights, SoftmaxObjective
from pipeline.objectives.temperature import Adam, LearnedTemperature, TemperatureConfig

Divergence = Literal["squared_log", "kl", "js"]
# As published with AmorLIP's code.
POSITIVE_WEIGHT = 1e-3
"""Weight of the own pair in the batch's mean."""
TARGET_SHARE = 0.8
"""Final share of the previous epoch's network in the target; it rises by a cosine over half of the epochs."""
EMA_DECAY = 0.92
"""Decay of the moving average of the trained network, which is the network in use."""
EMA_EVERY = 2
"""Steps between two updates of the moving average."""


@section
class AmorLipConfig(TemperatureConfig):
    """Settings as published with AmorLIP's code (rho and tau_lr: its CC12M values).

    Ours: `ratio_cap`, and that the rate of tau follows the encoders' and never falls (AmorLIP's is constant, and a
    third below 0.03, as in the recipes of the papers' datasets).
    """

    name: str = "amorlip"
    tau_lr: float = Field(default=1e-4, ge=0)
    rho: float = Field(default=8.5, gt=0)
    """Weight of tau in the loss."""
    npn_lr: float = Field(default=1e-3, gt=0)
    """Adam's learning rate of the networks."""
    inner_steps: int = Field(default=3, ge=1)
    """Updates of the networks per step."""
    divergence: Divergence = "squared_log"
    """What the networks minimize: the squared error of the logs, or the Kullback-Leibler (`kl`) or Jensen-Shannon
    (`js`) divergence of the distributions that prediction and target define."""
    ratio_cap: float = Field(default=5.0, ge=0)
    """Upper bound of E[exp(s / tau)] / lambda; 0 = only the bound exp(30) that keeps fp32 finite."""


def slope(divergence: Divergence, log_lambda: Tensor, log_target: Tensor) -> Tensor:
    """Derivative of each anchor's divergence by log lambda, [B]; 0 where lambda equals the target T.

    squared_log: (log lambda - log T)^2. The others compare q_j = w_j exp(s_j / tau) / lambda with p_j, the same over T,
    which sums to 1: kl: sum_j q_j log(q_j / p_j) - q_j + p_j; js: sum_j q_j log(q_j / m_j) / 2 + p_j log(p_j / m_j) / 2
    with m = (q + p) / 2. Since q_j / p_j = T / lambda for every j, both are functions of that ratio, which is bounded
    by exp(30). Ours: the last two terms of kl. q need not sum to 1, and without them the minimum is at e T instead of
    T; AmorLIP's code lacks them and adds a share of the squared error.
    """
    difference = log_lambda - log_target
    if divergence == "squared_log":
        return 2 * difference
    ratio = torch.exp(-difference.clamp(min=-MAX_LOG_RATIO))
    if divergence == "kl":
        return difference * ratio
    return -0.5 * ratio * (math.log(2) + F.logsigmoid(-difference))


@register("amorlip", AmorLipConfig)
class AmorLip(SoftmaxObjective):
    """L = tau mean_i [ -2 s_ii / tau + E1_i / lambda1_i + E2_i / lambda2_i ] + rho tau, lambda constant.

    E_i is the batch's mean of exp(s_ij / tau) in which the own pair weighs `POSITIVE_WEIGHT` and all others 1. Per side
    there are a trained MLP, its moving average (in use) and the previous epoch's average, stacked as [2, ...]. Ours: at
    the start of an epoch the new network's last bias is the batch's mean target, so that its first predictions have the
    right level, and the moving average starts from there.

    Metrics: normalizer_gap: mean |log lambda - log E| over both sides; ratio_max: largest q = E / lambda after the cap.
    """

    temperature: LearnedTemperature
    config: AmorLipConfig

    def __init__(self, config: AmorLipConfig, context: ObjectiveContext) -> None:
        self.epochs = context.epochs(needed_by="objective.name = 'amorlip'")
        self.network = ReplicatedNetwork(
            mlp.initial_parameters(context), Adam(config.npn_lr), copies=("average", "previous")
        )
        super().__init__(config, context, temperature=LearnedTemperature(config, context), parts=(self.network,))

    def anchor_weights(self, batch: AnchorBatch) -> AnchorWeights:
        config, tau = self.config, self.temperature.value()
        weight, others = POSITIVE_WEIGHT, batch.size - 1
        logit = batch.positive / tau
        kappa = logit.new_full((), weight / others)  # E_i = exp(s_ii / tau) (g_i + kappa) / (1 + kappa)
        log_means = logit + torch.logaddexp(batch.log_g, kappa.log()) - torch.log1p(kappa)
        with self.world.phase("npn"):
            predicted = self._advance(batch, log_means)
        bound = math.log(config.ratio_cap) if config.ratio_cap else MAX_LOG_RATIO
        log_lambda = torch.maximum(predicted, log_means - bound)
        ratio = torch.exp(log_means - log_lambda)
        positive_share = torch.exp(kappa.log() + logit - torch.log1p(kappa) - log_lambda)  # of the ratio
        mean_logit = logit * ratio + (ratio - positive_share) * batch.mean_h
        return AnchorWeights(
            loss=-2 * batch.positive.mean() + tau * (ratio.sum(0).mean() + config.rho),
            log_normalizer=log_lambda - logit + torch.log1p(kappa),
            pull=(1.0 - positive_share) / batch.size,
            tau_gradient=config.rho + (ratio - mean_logit).mean(1).sum(),
            metrics={"tau": tau, "normalizer_gap": (predicted - log_means).abs().mean(), "ratio_max": ratio.max()},
        )

    def update_state(self, pending: AnchorWeights, *, lr_scale: float) -> None:
        super().update_state(pending, lr_scale=lr_scale)
        self.network.commit()

    def cold_normalizers(self, batch: AnchorBatch) -> Tensor:
        # As in `anchor_weights`: lambda predicts E_i = exp(s_ii / tau) (g_i + kappa) / (1 + kappa).
        own = batch.positive / self.temperature.value() - math.log1p(POSITIVE_WEIGHT / (batch.size - 1))
        return self.predict(batch.features) - own

    def predict(self, features: Pair, *, lasting: bool = True) -> Tensor:
        """log lambda of each anchor from the averages, lasting or pending, [2, B]."""
        averages = (self.network.side(side, copy="average", lasting=lasting) for side in (0, 1))
        return torch.stack([mlp.forward(average, own) for average, own in zip(averages, features, strict=True)])

    def _advance(self, batch: AnchorBatch, log_means: Tensor) -> Tensor:
        """Restart if an epoch begins, update on this batch, predict log lambda of each anchor, [2, B]; pending.

        `log_means` are log E, [2, B]. The derivative of the batch's mean divergence is that of the separate objective
        of NeuCLIP, section 5.2.
        """
        config, network = self.config, self.network
        network.begin()
        epoch, within = divmod(batch.step, self.context.steps_per_epoch)
        if within == 0:
            self._restart(epoch, log_means)
        half = max(1, self.epochs // 2)
        share = TARGET_SHARE * 0.5 * (1 - math.cos(math.pi * min(epoch, half) / half))
        for side in (0, 1):
            features, target = batch.features[side], log_means[side]
            if share > 0:
                before = mlp.forward(network.side(side, copy="previous"), features)
                target = torch.logaddexp(target + math.log1p(-share), before + math.log(share))
            predict = functools.partial(mlp.forward, features=features)

            def pull(log_lambda: Tensor, target: Tensor = target) -> Tensor:
                return slope(config.divergence, log_lambda, target) / batch.size

            for inner in range(config.inner_steps):
                gradients, _ = network.gradients(side, predict, pull)
                network.step(side, gradients, number=network.next_updates + inner + 1)
        network.next_updates += config.inner_steps
        if batch.step % EMA_EVERY == 0:
            for side in (0, 1):
                for name, average in network.side(side, copy="average").items():
                    average.lerp_(network.side(side)[name], 1 - EMA_DECAY)
        return self.predict(batch.features, lasting=False)

    def _restart(self, epoch: int, log_means: Tensor) -> None:
        fresh = mlp.initial_parameters(self.context, restart=epoch)
        fresh["head.bias"] = log_means.mean(1, keepdim=True)
        for side in (0, 1):
            average, previous = (self.network.side(side, copy=copy) for copy in ("average", "previous"))
            for name, parameter in self.network.side(side).items():
                previous[name].copy_(average[name])
                parameter.copy_(fresh[name][side])
                average[name].copy_(fresh[name][side])
        self.network.clear_slots()
