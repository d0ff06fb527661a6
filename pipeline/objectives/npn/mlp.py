"""A residual MLP per side, `f: R^d -> R`, as in AmorLIP's published code, and the NPN that consists of two of them.

Linear d -> d, ReLU, LayerNorm, twice; plus the input; ReLU; linear d -> 1. It predicts log E_y exp(s / tau), so that
alpha_i = log(eps + exp(f(e_i) - s_ii / tau)).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.distributed.devices import to_device
from pipeline.objectives.npn.network import BothSides, Npn, NpnConfig, Prediction, register_npn
from pipeline.objectives.npn.prototypes import MAX_LOG_RATIO, Anchors
from pipeline.objectives.registry import ObjectiveContext, Pair
from pipeline.objectives.softmax import AnchorBatch


def initial_parameters(context: ObjectiveContext, *, restart: int = 0) -> dict[str, Tensor]:
    """Both sides' parameters, stacked as [2, ...]: linear layers uniform within 1/sqrt(d), as torch.nn.Linear does.

    `restart` is the number of the initialization; each draws from its own seed.
    """
    generator = torch.Generator().manual_seed((context.seed * 0x9E3779B97F4A7C15 + restart) % 2**63)
    dim, bound = context.dim, 1 / math.sqrt(context.dim)
    shapes = {
        "linear1.weight": (dim, dim),
        "linear1.bias": (dim,),
        "linear2.weight": (dim, dim),
        "linear2.bias": (dim,),
        "head.weight": (1, dim),
        "head.bias": (1,),
    }
    parameters = {
        name: (torch.rand((2, *shape), generator=generator, dtype=torch.float64) * 2 - 1) * bound
        for name, shape in shapes.items()
    }
    for norm in ("norm1", "norm2"):
        parameters[f"{norm}.weight"], parameters[f"{norm}.bias"] = torch.ones(2, dim), torch.zeros(2, dim)
    return {name: to_device(value.to(context.dtype), context.device) for name, value in parameters.items()}


def forward(parameters: Mapping[str, Tensor], features: Tensor) -> Tensor:
    """f of each of the features [B, d], with one side's parameters: [B]."""
    hidden = features
    for layer in ("1", "2"):
        hidden = F.relu(F.linear(hidden, parameters[f"linear{layer}.weight"], parameters[f"linear{layer}.bias"]))
        norm = parameters[f"norm{layer}.weight"], parameters[f"norm{layer}.bias"]
        hidden = F.layer_norm(hidden, hidden.shape[-1:], *norm)
    hidden = F.relu(hidden + features)
    return F.linear(hidden, parameters["head.weight"], parameters["head.bias"]).squeeze(-1)


def alpha(parameters: Mapping[str, Tensor], anchors: Anchors) -> Tensor:
    """log(eps + exp(f(e_i) - s_ii / tau)), [B]."""
    log_mean = forward(parameters, anchors.features) - anchors.positive / anchors.tau
    return torch.logaddexp(log_mean, log_mean.new_full((), anchors.log_eps))


@register_npn("mlp")
class MlpNpn(Npn):
    """The NPN of NeuCLIP's ablation in section 5.2: randomly initialized MLPs, never restarted."""

    @classmethod
    def check(cls, config: NpnConfig) -> None:
        if config.restart_every:
            raise ValueError("npn = mlp cannot be restarted from features: set restart_every to 0")
        if config.npn_update == "prototypes" or config.npn_compile is True:
            raise ValueError("npn_update = prototypes and npn_compile = true are for npn = prototypes or queue")

    def __init__(self, config: NpnConfig, context: ObjectiveContext) -> None:
        super().__init__(config, context, initial_parameters(context))
        self._held_back: list[list[Tensor]] = []

    def advance(self, batch: AnchorBatch, anchors: BothSides) -> Prediction:
        self.network.begin()
        self._held_back = []
        used, cold = [], []
        for side in (0, 1):
            predict = functools.partial(alpha, anchors=anchors[side])
            slope = functools.partial(self._slope, anchors[side])
            first = None
            for inner in range(self.config.inner_steps):
                gradients, before = self.network.gradients(side, predict, slope)
                first = before if first is None else first
                if self.config.npn_schedule == "simultaneous":
                    self._held_back.append(gradients)
                else:
                    self.network.step(side, gradients, number=self.network.next_updates + inner + 1)
            used.append(alpha(self.network.side(side), anchors[side]))
            cold.append(used[-1] if first is None else first)
        self.network.next_updates += self.config.inner_steps
        return Prediction((used[0], used[1]), (cold[0], cold[1]))

    def predict(self, anchors: BothSides) -> Pair:
        first, second = (alpha(self.network.side(side, lasting=True), anchors[side]) for side in (0, 1))
        return first, second

    def slopes(self, side: int, anchors: Anchors, partners_bd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            features, positive = anchors.features.clone().requires_grad_(), anchors.positive.clone().requires_grad_()
            tau = anchors.tau.expand_as(positive).clone().requires_grad_()
            own = replace(anchors, features=features, positive=positive, tau=tau)
            total = alpha(self.network.side(side), own).sum()
        to_feature, to_positive, to_tau = torch.autograd.grad(total, [features, positive, tau])
        to_own = to_feature + to_positive[:, None] * partners_bd
        return to_own, to_positive[:, None] * anchors.features, to_tau

    def commit(self, update: AnchorBatch) -> None:
        for side, gradients in enumerate(self._held_back):
            self.network.step(side, gradients, number=self.network.next_updates)
        self._held_back = []
        self.network.commit()

    def _slope(self, anchors: Anchors, predicted: Tensor) -> Tensor:
        """d loss / d alpha of the network's own objective."""
        if self.config.npn_objective == "separate":
            return (predicted - anchors.log_target) / len(anchors)
        log_ratio = (anchors.log_target - predicted).clamp_(max=MAX_LOG_RATIO)
        return anchors.tau * (1.0 - torch.exp(log_ratio)) / len(anchors)
