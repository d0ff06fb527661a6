"""Program run on every rank by the engine tests: some steps on fixed data with the given DeepSpeed files."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipeline.distributed.start import start_world
from pipeline.distributed.world import leave
from pipeline.engine.deepspeed_engine import DeepSpeedEngine
from pipeline.engine.engine_config import EngineConfig
from pipeline.engine.optim import OptimizerConfig
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.model.trimming import TextChunks
from pipeline.objectives import ObjectiveContext, build_objective, objective_names
from pipeline.training.gradient_check import GradientCheck
from pipeline.training.step import TrainStep, micro_batches

BATCH, STEPS, EACH = 16, 8, 2
EVERY_OBJECTIVE = "zero1_fp32"
"""The file with which micro-batches are compared for every objective: these know nothing of ZeRO stages."""
CALM: dict[str, dict[str, Any]] = {"neuclip_literal": {"npn_lr": 0.01}}
"""AdaGrad at the paper's rate of 1 moves each coordinate by 1 in its first step, so that rounding decides the direction
of those whose gradient is near zero: for some batches, losses with and without micro-batches then differ by 1e-4."""
OPTIMIZER = OptimizerConfig(lr=1e-3)
CLIPPING = 1e-3
"""A gradient norm below that of every step."""


def towers(arch):
    return build_towers(ModelConfig(arch=arch), seed=0)[0]


def data(step):
    """Return global batch `step`: images [B, 3, 16, 16] and tokens [B, 8]."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(1, 49000, (BATCH, 8), generator=generator)
    text[:, -1] = 49407
    return torch.randn(BATCH, 3, 16, 16, generator=generator), text


def make_objective(settings, world):
    sizes = {"dim": 16, "batch_size": BATCH, "dataset_size": 100, "steps_per_epoch": 6, "total_steps": STEPS}
    return build_objective(settings, context=ObjectiveContext(**sizes, world=world, device=world.device))


def make_step(arch, name, world, micro_batch=None, clipping=0.0):
    config = EngineConfig(deepspeed=name, micro_batch=micro_batch, gradient_clipping=clipping)
    engine = DeepSpeedEngine(towers(arch), config=config, optimizer=OPTIMIZER, world=world, global_batch=BATCH)
    engine.module.train()
    objective = make_objective({"name": "openclip", "tau_lr": 0.0}, world)
    chunks = micro_batches(BATCH // world.size, micro_batch)
    return TrainStep(engine, objective, world=world, seed=0, chunks=chunks)


def losses(step, first, last):
    found, lengths = [], torch.full((BATCH // step.world.size,), 8)
    rows = step.world.rows(BATCH // step.world.size)
    for t in range(first, last):
        image, text = data(t)
        ids = torch.arange(BATCH)[rows]
        texts = TextChunks(text[rows], step.chunks, lengths=lengths)
        result = step((image[rows], texts), sample_ids=ids, step=t, lr_scale=1.0)
        assert result.applied
        found.append(float(result.output.loss))
    return found


def cached_differences(arch, name, world):
    """Return, by objective, the largest relative loss difference between whole batches and micro-batches.

    Both engines are reused for all objectives, and begin each with the same state.
    """
    whole, cached = make_step(arch, name, world), make_step(arch, name, world, micro_batch=2)
    found = {}
    for number, objective in enumerate(objective_names()):
        first, pair = EACH * number, []
        if number:
            state = whole.engine.state
            moments = {(parameter, key): value for parameter, key, value in state.moments()}
            cached.engine.state.load(weights=dict(state.weights()), moments=moments, counter=state.counter())
        for step in (whole, cached):
            step.objective = make_objective({"name": objective, **CALM.get(objective, {})}, world)
            pair.append(losses(step, first, first + EACH))
        found[objective] = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(*pair, strict=True))
    return found


def overflow(step):
    """Let the gradient of one rank overflow in backward, and check that no rank applies the step."""
    rows = step.world.rows(BATCH // step.world.size)
    image, text = data(0)
    features = step.engine.forward(image[rows], text[rows])
    huge = torch.inf if step.world.is_main else 1.0
    gradients = (torch.full_like(features[0], huge), torch.ones_like(features[1]))
    step.engine.backward(features, gradients)
    assert not step.engine.step(lr_scale=1.0)


def not_finite(step):
    """Take a step whose loss is NaN while its feature gradients are finite, and check that it is skipped."""
    rows = step.world.rows(BATCH // step.world.size)
    compute = step.objective.compute
    step.objective.compute = lambda *a, **k: replace(compute(*a, **k), loss=torch.tensor(torch.nan))
    image, text = data(0)
    result = step((image[rows], text[rows]), sample_ids=torch.arange(BATCH)[rows], step=0, lr_scale=1.0)
    assert (result.finite, result.applied) == (False, False)
    step.objective.compute = compute


def scenario(arch, name, world):
    """Train, load the state from halfway into a new engine and continue training; then repeat with micro-batches."""
    half = STEPS // 2
    step = make_step(arch, name, world)
    check = GradientCheck(step, towers(arch))
    check.begin()
    rows, ones = world.rows(BATCH // world.size), torch.ones(BATCH // world.size, 16)
    check.reference((data(0)[0][rows], data(0)[1][rows]), (ones, ones), 0)  # as if the first step had been skipped
    first = losses(step, 0, 1)
    distance = check.finish()
    first += losses(step, 1, half)
    state = step.engine.state
    assert not [*state.weights(keep=False), *state.moments(keep=False)]
    saved = {
        "weights": dict(state.weights()),
        "moments": {(n, key): value for n, key, value in state.moments()},
        "counter": state.counter(),
    }
    second = losses(step, half, STEPS)
    fresh = make_step(arch, name, world)
    fresh.engine.state.load(**saved)
    same = all(torch.equal(value, saved["weights"][n]) for n, value in fresh.engine.state.weights())
    resumed = losses(fresh, half, STEPS)
    overflowed = make_step(arch, name, world)
    overflow(overflowed)
    not_finite(overflowed)
    cached = losses(make_step(arch, name, world, micro_batch=2), 0, half)
    clipped = make_step(arch, name, world, clipping=CLIPPING)
    check_clipped = GradientCheck(clipped, towers(arch), clipping=CLIPPING)
    check_clipped.begin()
    losses(clipped, 0, 1)
    return {
        "losses": first + second,
        "probe": distance,
        "probe with clipping": check_clipped.finish(),
        "weights restored": same,
        "resumed": resumed,
        "cached": cached,
        "cached differences": cached_differences(arch, name, world) if name == EVERY_OBJECTIVE else {},
        "after overflow": losses(overflowed, 0, 3),
        "counter": saved["counter"],
    }


def main():
    arch, out, *names = sys.argv[1:]
    torch.set_num_threads(1)
    with start_world(device="cpu") as world:
        results = {name: scenario(arch, name, world) for name in names}
        if world.is_main:
            Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    leave(0)
