"""The start-up probe: is the engine's gradient the gradient?

DeepSpeed has had configurations with silently wrong gradients. The first step's gradient is therefore computed twice:
by the engine, and by plain autograd on an fp32 copy of the towers. The engine's is read back from the optimizer's
first moment, after scaling, reduction and clipping, so everything between loss and optimizer is covered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.distributed.world import World
from pipeline.engine.optim import decay_in_gradient, gradient_in_moment
from pipeline.errors import UserError
from pipeline.model.towers import Towers
from pipeline.training.step import TrainStep, frozen_statistics, seeded

TOLERANCE = {False: 1e-3, True: 0.15}
"""Largest relative distance allowed, by `engine.bf16` (measured on random inputs: below 1e-6, and 1.1 to 1.6%)."""


class GradientProbe:
    """Made before the first step; listens to that step; asked after it."""

    def __init__(self, plain: Towers, step: TrainStep, *, world: World) -> None:
        """`plain`: fp32 towers of the probe's own; they take the engine's weights."""
        self._engine, self._step, self._world = step.engine, step, world
        plain.clip.load_state_dict(dict(self._engine.state.weights()))
        self._plain = plain.to(world.device).train()
        self._before = self._moments()
        step.on_gradients = self._reference

    def _reference(self, inputs: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor], step: int) -> None:
        """Plain autograd of the same injection, over the same micro-batches and random streams, summed over ranks."""
        self._plain.zero_grad(set_to_none=True)  # of a step that was skipped
        norms = [m for m in self._plain.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
        for index, rows in enumerate(self._step.chunks):
            with seeded(self._step.seed, step, self._world.rank, index), frozen_statistics(norms):
                features = self._plain(inputs[0][rows], inputs[1][rows])
                torch.autograd.backward(features, [g[rows] for g in gradients])
        named = [(name, p) for name, p in self._plain.clip.named_parameters() if p.requires_grad]
        self._expected = {name: self._world.all_reduce(p.grad).cpu() for name, p in named if p.grad is not None}

    def check(self, *, clipping: float) -> float:
        """Relative distance of the applied gradient from the reference. Raises: UserError when it is too large."""
        self._step.on_gradients = None
        after = self._moments()
        key, decay, scale = gradient_in_moment(self._engine.optimizer_config)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in self._expected.values()))
        clip = min(1.0, clipping / norm) if clipping and norm else 1.0
        applied = {
            name: (after[name, key] - decay * self._before.get((name, key), torch.tensor(0.0))) / scale
            for name in self._expected
        }
        weights = dict(self._plain.clip.named_parameters())
        expected = {
            name: clip * g + decay_in_gradient(self._engine.optimizer_config, weights[name]).cpu()
            for name, g in self._expected.items()
        }
        del self._plain, self._before
        if self._world.device.type == "cuda":  # the copy is no part of what the run needs
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return compare_gradients(applied, expected, tolerance=TOLERANCE[self._engine.bf16])

    def _moments(self) -> dict[tuple[str, str], Tensor]:
        return {(name, key): value for name, key, value in self._engine.state.moments()}


def compare_gradients(applied: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, tolerance: float) -> float:
    """Relative L2 distance of two gradients. Raises: UserError above `tolerance`, naming the worst parameter."""
    errors = {name: float((applied[name].double() - g.double()).square().sum()) for name, g in expected.items()}
    size = sum(float(g.double().square().sum()) for g in expected.values())
    distance = math.sqrt(sum(errors.values()) / size) if size else 0.0
    if not distance <= tolerance:
        worst = max(errors, key=lambda name: errors[name])
        raise UserError(
            f"The engine's gradient differs from plain autograd by {distance:.2%} (allowed {tolerance:.2%}; most in "
            f"{worst}): this version or configuration of DeepSpeed computes wrong gradients here. The run ends before "
            "such a step is in a checkpoint. Try another ZeRO stage (engine.deepspeed) or version; engine.probe=false "
            "trains on regardless."
        )
    return distance
