"""Program run on every rank by the batch-norm test: a few steps of a small network on this rank's rows."""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.distributed.start import start_world
from pipeline.distributed.world import World, leave
from pipeline.model.image_tower import use_fp32_batch_norms
from pipeline.training.step import frozen_statistics

ROWS, STEPS = 12, 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 5, 3, bias=False), nn.Conv2d(5, 4, 3, bias=False)
    layers = nn.Sequential(first, nn.BatchNorm2d(5), nn.ReLU(), second, nn.BatchNorm2d(4))
    for layer in layers:
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)
    return layers


def data(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs whose mean and spread differ between rows, and weights for the outputs."""
    generator = torch.Generator().manual_seed(step)
    scale = torch.rand(ROWS, 1, 1, 1, generator=generator) * 3
    x = torch.randn(ROWS, 3, 8, 8, generator=generator) * scale + torch.arange(ROWS)[:, None, None, None] / 2
    return x, torch.randn(ROWS, 4, 4, 4, generator=generator)


def results(model: nn.Sequential, world: World) -> dict[str, Tensor]:
    """Return outputs, summed gradients and running statistics of all ranks, laid out as on one rank with all rows."""
    rows, found = world.rows(ROWS // world.size), {}
    model.train()
    for step in range(STEPS):
        x, weight = (part[rows] for part in data(step))
        x = x.clone().requires_grad_()
        model.zero_grad()
        norms = [module for module in model if isinstance(module, nn.BatchNorm2d)]
        if step == 1:  # as in the second forward pass of feature-cached accumulation
            with frozen_statistics(norms):
                y = model(x)
        else:
            y = model(x)
        (y * weight).sum().backward()
        assert x.grad is not None
        found[f"{step} output"], found[f"{step} input gradient"] = world.all_gather(y), world.all_gather(x.grad)
        for name, p in model.named_parameters():
            assert p.grad is not None
            found[f"{step} {name}"] = world.all_reduce(p.grad)
    model.eval()
    with torch.no_grad():
        found["eval"] = world.all_gather(model(data(9)[0][rows]))
    return found | {f"state {name}": value.clone() for name, value in model.state_dict().items()}


def main() -> None:
    torch.set_num_threads(1)
    with start_world(device="cpu") as world:
        model = net()
        use_fp32_batch_norms(model, synchronised=True)
        found = results(model, world)
        if world.is_main:
            save_file({name: value.contiguous() for name, value in found.items()}, sys.argv[1])


if __name__ == "__main__":
    main()
    leave(0)
