"""`amorlip`: partition functions predicted by MLPs, after AmorLIP (Sun et al., 2025).

Written from NeuCLIP's description (sections 2 and 5.2) and the settings published with AmorLIP's code; what these leave
open is this project's own choice, marked "ours" below. Not a reproduction of AmorLIP.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.base import ObjectiveContext
from pipeline.objectives.npn import mlp
from pipeline.objectives.npn.inner_optimizer import Adam, Buffered
from pipeline.objectives.npn.prototypes import MAX_LOG_RATIO
from pipeline.objectives.registry import register
from pipeline.objectives.softmax import AnchorBatch, Decision, Pair
from pipeline.objectives.temperature import GlobalTemperatureObjective, TemperatureConfig

Divergence = Literal["squared_log", "kl", "js"]


@section
class AmorLipConfig(TemperatureConfig):
    """Settings as published with AmorLIP's code (rho and tau_lr: its CC12M values).

    Ours: ratio_cap, and that the rate of tau follows the encoders' and never falls (AmorLIP's is constant, and a third
    below 0.03, as in the recipes of the papers' datasets).

    divergence: what the networks minimize, see `slope`: the squared error of the logs, or the Kullback-Leibler or
    Jensen-Shannon divergence of the distributions that prediction and target define.
    positive_weight: weight of the own pair in the batch's mean. target_share: what the previous epoch's network gives
    to the target in the end; it rises by a cosine over half of the epochs. ema_decay, ema_every: the network in use is
    a moving average of the trained one. ratio_cap: upper bound of q = E[exp(s / tau)] / lambda, 0 = none but
    exp(30), so that fp32 stays finite.
    """

    name: str = "amorlip"
    tau_lr: float = Field(default=1e-4, ge=0)
    rho: float = Field(default=8.5, gt=0)
    npn_lr: float = Field(default=1e-3, gt=0)
    inner_steps: int = Field(default=3, ge=1)
    divergence: Divergence = "squared_log"
    positive_weight: float = Field(default=1e-3, ge=0)
    target_share: float = Field(default=0.8, ge=0, lt=1)
    ema_decay: float = Field(default=0.92, ge=0, lt=1)
    ema_every: int = Field(default=2, ge=1)
    ratio_cap: float = Field(default=5.0, ge=0)


def target_share_at(epoch: int, *, highest: float, epochs: int) -> float:
    """Share of the previous epoch's network in the target: 0 in the first epoch, `highest` from the middle one on."""
    half = max(1, epochs // 2)
    return highest * 0.5 * (1 - math.cos(math.pi * min(epoch, half) / half))


def slope(divergence: Divergence, log_lambda: Tensor, log_target: Tensor) -> Tensor:
    """Derivative of each anchor's divergence by log lambda, [B]; it is 0 where lambda equals the target T.

    squared_log: (log lambda - log T)^2. The others compare q_j = w_j exp(s_j / tau) / lambda with the same over T, p_j,
    which sums to 1: kl: sum_j q_j log(q_j / p_j) - q_j + p_j; js: sum_j q_j log(q_j / m_j) / 2 + p_j log(p_j / m_j) / 2
    with m = (q + p) / 2. Since q_j / p_j = T / lambda for every j, both are functions of that ratio alone; it is held
    below exp(30). Ours: the last two terms of kl. q need not sum to 1, and without them the least value is not at T but
    at e T; AmorLIP's code has them not and adds a share of the squared error.
    """
    difference = log_lambda - log_target
    if divergence == "squared_log":
        return 2 * difference
    ratio = torch.exp(-difference.clamp(min=-MAX_LOG_RATIO))
    if divergence == "kl":
        return difference * ratio
    return -0.5 * ratio * (math.log(2) + F.logsigmoid(-difference))


class PartitionNetworks:
    """Per side a trained MLP, its moving average (in use) and the previous epoch's average; stacked as [2, ...].

    Ours: at an epoch's start the fresh network's last bias is the batch's mean target, so that its first predictions
    have the right level, and the moving average starts from there.
    """

    def __init__(self, config: AmorLipConfig, context: ObjectiveContext) -> None:
        self.config, self.context, self.optimizer = config, context, Adam(config.npn_lr)
        self.epochs = context.epochs(wanted_by="objective.name = 'amorlip'")
        parameters = mlp.initial_parameters(context)
        self.names = tuple(parameters)
        tensors = dict(parameters)
        for copy in (*self.optimizer.slots, "average", "previous"):
            tensors |= {f"{name}.{copy}": torch.zeros_like(value) for name, value in parameters.items()}
        self.state = Buffered(tensors)
        self.updates = torch.zeros((), dtype=torch.int64)  # of the optimizer since the restart; on the host
        self._next_updates = 0

    def advance(self, batch: AnchorBatch, log_means: Pair) -> Pair:
        """Restart if an epoch begins, update on this batch, predict log lambda of each anchor, [B] each; pending.

        Args: log_means: log of the batch's mean of exp(s / tau), [B] each.
        """
        self.state.begin()
        epoch, within = divmod(batch.step, self.context.steps_per_epoch)
        self._next_updates = int(self.updates)
        if within == 0:
            self._restart(epoch, log_means)
        share = target_share_at(epoch, highest=self.config.target_share, epochs=self.epochs)
        for side in (0, 1):
            features, target = batch.features[side], log_means[side]
            if share > 0:
                before = mlp.forward(self._side(side, ".previous"), features)
                target = torch.logaddexp(target + math.log1p(-share), before + math.log(share))
            for inner in range(self.config.inner_steps):
                self._update(side, features, target, number=self._next_updates + inner + 1)
        self._next_updates += self.config.inner_steps
        if batch.step % self.config.ema_every == 0:
            for name in self.names:
                average = self.state.working[f"{name}.average"]
                average.lerp_(self.state.working[name], 1 - self.config.ema_decay)
        first, second = (mlp.forward(self._side(side, ".average"), batch.features[side]) for side in (0, 1))
        return first, second

    def predict(self, features: Pair) -> Pair:
        """log lambda of each anchor from the lasting averages, [B] each."""
        lasting = self.state.lasting
        first, second = (
            mlp.forward({name: lasting[f"{name}.average"][side] for name in self.names}, features[side])
            for side in (0, 1)
        )
        return first, second

    def commit(self) -> None:
        self.state.commit()
        self.updates.fill_(self._next_updates)

    def tensors(self) -> dict[str, Tensor]:
        """The lasting tensors themselves, by name."""
        return {f"npn.{name}": tensor for name, tensor in (self.state.lasting | {"updates": self.updates}).items()}

    def _side(self, side: int, suffix: str = "") -> dict[str, Tensor]:
        return {name: self.state.working[name + suffix][side] for name in self.names}

    def _restart(self, epoch: int, log_means: Pair) -> None:
        working, fresh = self.state.working, mlp.initial_parameters(self.context, restart=epoch)
        fresh["head.bias"] = torch.stack([mean.mean()[None] for mean in log_means])
        for name in self.names:
            working[f"{name}.previous"].copy_(working[f"{name}.average"])
            working[name].copy_(fresh[name])
            working[f"{name}.average"].copy_(fresh[name])
            for slot in self.optimizer.slots:
                working[f"{name}.{slot}"].zero_()
        self._next_updates = 0

    def _update(self, side: int, features: Tensor, target: Tensor, *, number: int) -> None:
        """One step on the batch's mean divergence from the target (the separate objective of NeuCLIP, section 5.2)."""
        with torch.enable_grad():
            parameters = {name: value.detach().requires_grad_() for name, value in self._side(side).items()}
            log_lambda = mlp.forward(parameters, features)
        pull = slope(self.config.divergence, log_lambda.detach(), target) / target.shape[0]
        gradients = torch.autograd.grad(log_lambda, list(parameters.values()), pull)
        for (name, parameter), gradient in zip(self._side(side).items(), gradients, strict=True):
            slots = {slot: self.state.working[f"{name}.{slot}"][side] for slot in self.optimizer.slots}
            self.optimizer.step(parameter, gradient, slots, updates=number)


@register("amorlip", AmorLipConfig)
class AmorLip(GlobalTemperatureObjective):
    """L = tau mean_i [ -2 s_ii / tau + E1_i / lambda1_i + E2_i / lambda2_i ] + rho tau, lambda constant.

    E_i is the batch's mean of exp(s_ij / tau) in which the own pair weighs `positive_weight` and all others 1.
    Metrics: normalizer_gap: mean |log lambda - log E| over both sides; ratio_max: largest q = E / lambda after the cap.
    """

    def __init__(self, config: AmorLipConfig, context: ObjectiveContext) -> None:
        super().__init__(config, context)
        self.networks = PartitionNetworks(config, context)

    def decide(self, batch: AnchorBatch) -> Decision:
        config, tau = self.config, self.temperature.value()
        weight, others = config.positive_weight, batch.size - 1
        logit = batch.positive / tau
        kappa = logit.new_full((), weight / others)  # E_i = exp(s_ii / tau) (g_i + kappa) / (1 + kappa)
        log_means = tuple(logit + torch.logaddexp(g, kappa.log()) - torch.log1p(kappa) for g in batch.log_g)
        with self.world.phase("npn"):
            predicted = self.networks.advance(batch, (log_means[0], log_means[1]))
        bound = math.log(config.ratio_cap) if config.ratio_cap else MAX_LOG_RATIO
        normalizers, pulls, gaps, ratios = [], [], [], []
        tau_gradient = torch.zeros_like(tau) + config.rho
        for side in (0, 1):
            log_lambda = torch.maximum(predicted[side], log_means[side] - bound)
            ratio = torch.exp(log_means[side] - log_lambda)
            positive_share = torch.exp(kappa.log() + logit - torch.log1p(kappa) - log_lambda)  # of the ratio
            mean_logit = logit * ratio + (ratio - positive_share) * batch.mean_h[side]
            tau_gradient = tau_gradient + (ratio - mean_logit).mean()
            normalizers.append(log_lambda - logit + torch.log1p(kappa))
            pulls.append((1.0 - positive_share) / batch.size)
            gaps.append((predicted[side] - log_means[side]).abs().mean())
            ratios.append(ratio)
        zero = torch.zeros_like(tau)
        return Decision(
            loss=-2 * batch.positive.mean() + tau * ((ratios[0] + ratios[1]).mean() + config.rho),
            log_normalizer=(normalizers[0], normalizers[1]),
            log_scale=(zero, zero),
            pull=(pulls[0], pulls[1]),
            tau_gradient=tau_gradient,
            metrics={
                "tau": tau,
                "normalizer_gap": torch.stack(gaps).mean(),
                "ratio_max": torch.maximum(ratios[0].max(), ratios[1].max()),
            },
        )

    def predict(self, batch: AnchorBatch) -> Pair:
        # As the log-normalizer that `decide` uses: lambda predicts E_i = exp(s_ii / tau) (g_i + kappa) / (1 + kappa).
        own = batch.positive / self.temperature.value() - math.log1p(self.config.positive_weight / (batch.size - 1))
        first, second = self.networks.predict(batch.features)
        return first - own, second - own

    def apply(self, pending: Any, *, lr_scale: float) -> None:
        super().apply(pending, lr_scale=lr_scale)
        self.networks.commit()

    def restarts(self) -> bool:
        return self.steps % self.context.steps_per_epoch == 0

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        return {**super().learning_rates(lr_scale=lr_scale), "npn_lr": self.config.npn_lr}

    def own_state(self) -> dict[str, Tensor]:
        return {**super().own_state(), **self.networks.tensors()}
