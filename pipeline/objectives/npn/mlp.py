"""A residual MLP per side, `f: R^d -> R`, as AmorLIP's code publishes it, and the NPN made of it.

Linear d -> d, ReLU, LayerNorm, twice; plus the input; ReLU; linear d -> 1. It predicts log E_y exp(s / tau), so that
alpha_i = log(eps + exp(f(e_i) - s_ii / tau)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.objectives.base import ObjectiveContext
from pipeline.objectives.npn.inner_optimizer import Buffered
from pipeline.objectives.npn.network import BothSides, Npn, Prediction
from pipeline.objectives.npn.prototypes import MAX_LOG_RATIO, Anchors
from pipeline.objectives.softmax import AnchorBatch, Pair

Parameters = Mapping[str, Tensor]


def initial_parameters(context: ObjectiveContext, *, restart: int = 0) -> dict[str, Tensor]:
    """Both sides' parameters, stacked as [2, ...]: linear layers uniform within 1/sqrt(d), as torch.nn.Linear does.

    Args: restart: number of the initialization; each draws from its own seed.
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
    return {name: value.to(device=context.device, dtype=context.dtype) for name, value in parameters.items()}


def forward(parameters: Parameters, features: Tensor) -> Tensor:
    """f of each feature, [B]. Args: parameters: of one side. features: [B, d]."""
    hidden = features
    for layer in ("1", "2"):
        hidden = F.relu(F.linear(hidden, parameters[f"linear{layer}.weight"], parameters[f"linear{layer}.bias"]))
        norm = parameters[f"norm{layer}.weight"], parameters[f"norm{layer}.bias"]
        hidden = F.layer_norm(hidden, hidden.shape[-1:], *norm)
    hidden = F.relu(hidden + features)
    return F.linear(hidden, parameters["head.weight"], parameters["head.bias"]).squeeze(-1)


def alpha(parameters: Parameters, anchors: Anchors) -> Tensor:
    """log(eps + exp(f(e_i) - s_ii / tau)), [B]."""
    log_mean = forward(parameters, anchors.features) - anchors.positive / anchors.tau
    return torch.logaddexp(log_mean, log_mean.new_full((), anchors.log_eps))


class MlpNpn(Npn):
    """The NPN of NeuCLIP's ablation in section 5.2: randomly initialized MLPs, never restarted."""

    def __init__(self, config: Any, context: ObjectiveContext) -> None:
        super().__init__(config, context)
        parameters = initial_parameters(context)
        self.names = tuple(parameters)
        memory = {f"{name}.{s}": torch.zeros_like(p) for name, p in parameters.items() for s in self.optimizer.slots}
        self.state = Buffered(parameters | memory)
        self.updates = torch.zeros((), dtype=torch.int64)
        self._next_updates = 0
        self._held_back: list[list[Tensor]] = []

    def advance(self, batch: AnchorBatch, anchors: BothSides) -> Prediction:
        self.state.begin()
        self._next_updates, self._held_back = int(self.updates), []
        used, cold = [], []
        for side in (0, 1):
            first = None
            for inner in range(self.config.inner_steps):
                gradients, before = self._gradients(side, anchors[side])
                first = before if first is None else first
                if self.config.npn_schedule == "simultaneous":
                    self._held_back.append(gradients)
                else:
                    self._update(side, gradients, number=self._next_updates + inner + 1)
            used.append(alpha(self._parameters(side), anchors[side]))
            cold.append(used[-1] if first is None else first)
        self._next_updates += self.config.inner_steps
        return Prediction((used[0], used[1]), (cold[0], cold[1]))

    def predict(self, anchors: BothSides) -> Pair:
        lasting = self.state.lasting
        first, second = (alpha({name: lasting[name][s] for name in self.names}, anchors[s]) for s in (0, 1))
        return first, second

    def slopes(self, side: int, anchors: Anchors, partners_bd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            features, positive = anchors.features.clone().requires_grad_(), anchors.positive.clone().requires_grad_()
            tau = anchors.tau.expand_as(positive).clone().requires_grad_()
            log_mean = forward(self._parameters(side), features) - positive / tau
            total = torch.logaddexp(log_mean, log_mean.new_full((), anchors.log_eps)).sum()
        to_feature, to_positive, to_tau = torch.autograd.grad(total, [features, positive, tau])
        to_own = to_feature + to_positive[:, None] * partners_bd
        return to_own, to_positive[:, None] * anchors.features, to_tau

    def commit(self, batch: AnchorBatch) -> None:
        for side, gradients in enumerate(self._held_back):
            self._update(side, gradients, number=self._next_updates)
        self._held_back = []
        self.state.commit()
        self.updates.fill_(self._next_updates)

    def tensors(self) -> dict[str, Tensor]:
        return {f"npn.{name}": tensor for name, tensor in (self.state.lasting | {"updates": self.updates}).items()}

    def _parameters(self, side: int) -> dict[str, Tensor]:
        return {name: self.state.working[name][side] for name in self.names}

    def _gradients(self, side: int, anchors: Anchors) -> tuple[list[Tensor], Tensor]:
        with torch.enable_grad():
            parameters = {name: value.detach().requires_grad_() for name, value in self._parameters(side).items()}
            predicted = alpha(parameters, anchors)
        gap = predicted.detach() - anchors.log_target
        if self.config.npn_objective == "unified":
            gap = anchors.tau * (1.0 - torch.exp((-gap).clamp_(max=MAX_LOG_RATIO)))
        return list(torch.autograd.grad(predicted, list(parameters.values()), gap / len(gap))), predicted.detach()

    def _update(self, side: int, gradients: list[Tensor], *, number: int) -> None:
        for (name, parameter), gradient in zip(self._parameters(side).items(), gradients, strict=True):
            slots = {slot: self.state.working[f"{name}.{slot}"][side] for slot in self.optimizer.slots}
            self.optimizer.step(parameter, gradient, slots, updates=number)
