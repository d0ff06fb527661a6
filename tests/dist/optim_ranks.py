"""Program run on every rank by the optimizer tests: some steps with given feature gradients and DeepSpeed files."""

import sys
from pathlib import Path

import torch

from pipeline.distributed.start import start_world
from pipeline.distributed.world import leave
from pipeline.engine.deepspeed_engine import DeepSpeedEngine
from pipeline.engine.engine_config import EngineConfig
from pipeline.engine.optim import OptimizerConfig, build_optimizer, parameter_groups
from pipeline.engine.state import EmaConfig, WeightAverage
from pipeline.errors import UserError
from pipeline.model.towers import ModelConfig, build_towers

BATCH, STEPS, DIM = 8, 4, 16
EMA = EmaConfig(decay=0.3)
DECAYS = (0.1, 2 / 11, 0.25, 4 / 13)
"""(1 + t) / (10 + t), the warm-up of the average; the last one is above the decay."""
# Gradients that are 0 except for rounding: with a small eps, Adam amplifies them to full steps.
CONFIGS = {
    "adamw": OptimizerConfig(name="adamw", lr=1e-3, eps=1e-3),
    "lamb": OptimizerConfig(name="lamb", lr=2e-3, eps=1e-3),
    "lion": OptimizerConfig(name="lion", lr=1e-4),
    "sgd": OptimizerConfig(name="sgd", lr=0.005),
    "muon": OptimizerConfig(name="muon", lr=1e-3, eps=1e-3),
}


def towers(arch):
    """Attention's key biases, whose gradients are 0 except for rounding, get 0: Lion would step by the noise's sign."""
    model = build_towers(ModelConfig(arch=arch), seed=0)[0].train()
    for name, value in model.named_parameters():
        if name.endswith("in_proj_bias"):
            value.register_hook(without_keys)
    return model


def without_keys(gradient):
    query, key, value = gradient.chunk(3)
    return torch.cat([query, torch.zeros_like(key), value])


def batch(step):
    """Return images [B, 3, 16, 16], tokens [B, 8], and gradients of the loss with respect to both features, [B, d]."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(1, 49000, (BATCH, 8), generator=generator)
    text[:, -1] = 49407
    image, *gradients = (torch.randn(s, generator=generator) for s in ((BATCH, 3, 16, 16), (BATCH, DIM), (BATCH, DIM)))
    return image, text, gradients[0], gradients[1]


def plain(arch, config):
    """Return the weights before and after plain PyTorch steps on the whole batch, and their moving average."""
    model = towers(arch)
    before = {name: value.detach().clone() for name, value in model.clip.state_dict().items()}
    optimizer = build_optimizer(config, parameter_groups(model, config))
    average = {name: value.clone() for name, value in before.items()}
    for step in range(STEPS):
        image, text, *gradients = batch(step)
        torch.autograd.backward(model(image, text), gradients)
        optimizer.step()
        optimizer.zero_grad()
        decay = min(0.3, DECAYS[step])
        for name, value in model.clip.named_parameters():
            average[name] = decay * average[name] + (1 - decay) * value.detach()
    return before, {name: value.detach().clone() for name, value in model.clip.state_dict().items()}, average


def under_engine(arch, config, files, world):
    """Return weights and average after the same steps in an engine; halfway, its state is loaded into a new engine."""
    rows = world.rows(BATCH // world.size)

    def make():
        engine = DeepSpeedEngine(
            towers(arch), config=EngineConfig(deepspeed=files), optimizer=config, world=world, global_batch=BATCH
        )
        engine.module.train()
        return engine

    engine = make()
    average = WeightAverage(EMA, engine.state)
    list(engine.state.moments())  # as the gradient probe does, before any moments exist
    for step in range(STEPS):
        if step == STEPS // 2:
            state = engine.state
            saved = dict(state.weights()), {(n, k): v for n, k, v in state.moments()}, state.counter()
            assert saved[2] == step
            averaged, updates = dict(average.weights()), average.updates
            assert all(torch.equal(value, saved[0][name]) for name, value in state.weights())
            engine = make()
            average = WeightAverage(EMA, engine.state)
            average.load(averaged, updates=updates)
            engine.state.load(weights=saved[0], moments=saved[1], counter=saved[2])
            assert all(torch.equal(value, averaged[name]) for name, value in average.weights())
        image, text, *gradients = (x[rows] for x in batch(step))
        engine.backward(engine.forward(image, text), (gradients[0], gradients[1]))
        assert engine.step(lr_scale=1.0)
        average.update()
    return dict(engine.state.weights()), dict(average.weights())


def main(arch, out, files):
    with start_world(device="cpu") as world:
        found = {}
        for name, config in CONFIGS.items():
            for file in files:
                try:
                    found[name, Path(file).stem] = under_engine(arch, config, file, world)
                except UserError as error:
                    found[name, Path(file).stem] = str(error)
        if world.is_main:
            torch.save(found, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    leave(0)
