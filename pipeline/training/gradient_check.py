"""The start-up check of the engine's gradient against plain autograd.

DeepSpeed has had configurations with silently wrong gradients. The first step's gradient is therefore computed twice:
by the engine, and by plain autograd on an fp32 copy of the towers. The engine's is recovered from the optimizer's first
moment, after scaling, reduction and clipping, so everything between loss and optimizer is covered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pipeline.data.loading.loader import Batch
from pipeline.engine.optim import decay_in_gradient, gradient_in_moment
from pipeline.errors import UserError
from pipeline.model.towers import Towers
from pipeline.training.step import StepResult, TrainStep, batch_norms_of, frozen_statistics, seeded

TOLERANCE = {False: 1e-3, True: 0.15}
"""Largest relative distance allowed, by `engine.bf16` (measured on random inputs: below 1e-6, and 1.1 to 1.6%)."""


class GradientCheck:
    """Checks the first step that is applied: `begin` before it, `reference` between backward and update, and a call, as
    a hook, after every step.

    `plain` are fp32 towers of the check's own, which take the engine's weights. Their backward pass should recompute
    activations: an fp32 copy of the model leaves little memory. `report` gets a sentence after the check.
    """

    def __init__(
        self, step: TrainStep, plain: Towers, *, clipping: float = 0.0, report: Callable[[str], None] = print
    ) -> None:
        self._step, self._engine, self._world = step, step.engine, step.world
        self._clipping, self._report = clipping, report
        self._plain: Towers | None = plain
        step.on_gradients = self.reference
        self._before: dict[tuple[str, str], Tensor] = {}
        self._expected: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Copy the engine's weights and moments. Collective."""
        assert self._plain is not None
        self._plain.clip.load_state_dict(dict(self._engine.state.weights()))
        self._plain.to(self._world.device).train()
        self._before = self._moments()

    def reference(self, inputs: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor], step: int) -> None:
        """Compute the gradient by plain autograd, over the same micro-batches and random streams, summed over ranks.

        `inputs` are this rank's images [b, 3, H, W] and whole tokens [b, L], on any device, and `gradients`
        d(global loss)/d(features) of this rank, twice [b, d].
        """
        if self._plain is None:
            return
        self._plain.zero_grad(set_to_none=True)  # the gradient of a skipped step
        norms, text = batch_norms_of(self._plain), inputs[1].to(self._world.device)
        for index, rows in enumerate(self._step.chunks):
            with seeded(self._step.seed, step, self._world.rank, index), frozen_statistics(norms):
                features = self._plain(inputs[0][rows].float(), text[rows])
                trained = [(f, g[rows]) for f, g in zip(features, gradients, strict=True) if f.requires_grad]
                torch.autograd.backward([f for f, _ in trained], [g for _, g in trained])
        named = [(name, p) for name, p in self._plain.clip.named_parameters() if p.requires_grad]
        self._expected = {name: self._world.all_reduce(p.grad).cpu() for name, p in named if p.grad is not None}

    def __call__(self, batch: Batch, result: StepResult) -> None:
        """Check the first step that was applied, and report the difference. Collective."""
        if self._plain is not None and result.applied:
            allowed = TOLERANCE[self._engine.bf16]
            self._report(
                f"Gradient probe: engine and plain autograd differ by {self.finish():.1e} ({allowed:g} allowed)."
            )

    def finish(self) -> float:
        """Free the copy of the towers, and `compare_gradients`: the one that was applied, and the reference."""
        assert self._plain is not None
        after, optimizer = self._moments(), self._engine.optimizer_config
        moments = gradient_in_moment(optimizer)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in self._expected.values()))
        clip = min(1.0, self._clipping / norm) if self._clipping and norm else 1.0
        applied, expected = {}, {}
        for name, weight in self._plain.clip.named_parameters():
            if name in self._expected:
                key = next(key for key in moments if (name, key) in after)
                decay, scale = moments[key]
                applied[name] = (after[name, key] - decay * self._before.get((name, key), torch.tensor(0.0))) / scale
                expected[name] = clip * self._expected[name] + decay_in_gradient(optimizer, weight).cpu()
        self._plain, self._before, self._expected = None, {}, {}
        del weight
        if self._world.device.type == "cuda":  # exclude the copy from the run's memory statistics
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return compare_gradients(applied, expected, tolerance=TOLERANCE[self._engine.bf16])

    def _moments(self) -> dict[tuple[str, str], Tensor]:
        return {(name, key): value for name, key, value in self._engine.state.moments()}


def compare_gradients(applied: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, tolerance: float) -> float:
    """Relative L2 distance of two gradients, given by parameter name.

    Raises:
        UserError: It is above `tolerance`. The message names the parameter that differs most.
    """
    errors = {name: float((applied[name].double() - g.double()).square().sum()) for name, g in expected.items()}
    size = sum(float(g.double().square().sum()) for g in expected.values())
    distance = math.sqrt(sum(errors.values()) / size) if size else 0.0
    if not distance <= tolerance:
        worst = max(errors, key=lambda name: errors[name])
        share = errors[worst] / sum(errors.values())
        own = math.sqrt(errors[worst] / max(float(expected[worst].double().square().sum()), 1e-300))
        raise UserError(
            f"The engine's gradient differs from plain autograd by {distance:.2%} (allowed {tolerance:.2%}). The layer "
            f"with the largest difference is {worst}: {own:.2%} of its own gradient, {share:.0%} of the whole squared "
            "difference. The run stops before such a step is in a checkpoint. If one layer makes up most of it, its "
            "kernel in this precision is the likely cause: try engine.deepspeed=zero2_fp32. If all layers differ, this "
            "version or configuration of DeepSpeed computes wrong gradients: try another ZeRO stage "
            "(engine.deepspeed) or version. engine.probe=false trains without this check."
        )
    return distance
