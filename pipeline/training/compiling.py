"""Whether a run's towers are compiled where `model.compile` leaves that open."""

from __future__ import annotations

from typing import Literal

import torch

from pipeline.distributed.world import World
from pipeline.engine.engine_protocol import EngineFacts
from pipeline.metrics.mfu import known_peak, training_flops
from pipeline.training.recipe import RunConfig

COMPILING_SECONDS = 75.0
"""What compiling the towers of ViT-B/16 took on an H200 (torch 2.11)."""
SAVED = 0.1
"""Share of a step that compiled towers save (ViT-B/16 there, bf16 weights, patches as a product: 203 to 188 ms)."""
USUAL_MFU, UNKNOWN_PEAK = 0.3, 100.0
"""Share of a GPU's peak that training reaches, and the peak in TFLOP/s that is assumed of a GPU outside the table."""


def compiled_towers(run: RunConfig, facts: EngineFacts, *, world: World, steps: int) -> bool | Literal["auto"]:
    """Whether to compile the towers for a number of steps; "auto": if they can be.

    The answer is the same on every rank and after a restart: a resumed run computes what an uninterrupted one does.
    """
    setting = run.model.compile
    if setting != "auto":
        return setting
    if world.device.type != "cuda" or facts.stage == 3 or run.model.lora.rank is not None:
        return False
    return "auto" if _seconds(run, world, steps=steps) * SAVED > COMPILING_SECONDS else False


def _seconds(run: RunConfig, world: World, *, steps: int) -> float:
    """An estimate of what the steps take on this rank's GPU."""
    peak = known_peak(torch.cuda.get_device_name(world.device)) or UNKNOWN_PEAK
    return training_flops(run.model) * run.batch_size * steps / (world.size * USUAL_MFU * peak * 1e12)
