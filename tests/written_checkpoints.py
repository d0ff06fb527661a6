"""Checkpoints that tests write, without training."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipeline.checkpoint.writer import CheckpointConfig, CheckpointWriter, Snapshot
from pipeline.distributed.world import World
from pipeline.model.architectures import Architecture

Towers = tuple[dict[str, torch.Tensor], Architecture]

FACTS = {
    "config": {"batch_size": 8},
    "data": {
        "epoch": 0,
        "batch": 1,
        "order_hash": "0f",
        "corrupt": [["image is missing", "00000.tar", 2]],
        "proof": "0f",
        "order": {},
        "pixels": {},
    },
}
"""What every checkpoint needs beside its step."""


def write(
    run: Path, towers: Towers, steps: list[int], *, events: list[str] | None = None, **settings: int
) -> list[str]:
    events = [] if events is None else events
    config = CheckpointConfig(every=1, **settings)
    writer = CheckpointWriter(run, config=config, world=World(), architecture=towers[1], on_event=events.append)
    for step in steps:
        writer.save(snapshot(towers, step))
    writer.wait()
    return events


def snapshot(towers: Towers, step: int) -> Snapshot:
    return Snapshot(
        step=step,
        weights=towers[0],
        moments={("visual.proj", "exp_avg"): torch.full((2, 3), float(step))},
        counter=step,
        objective={"log_scale.value": torch.tensor(2.5)},
        rows={"u": (0, iter([torch.arange(4.0), torch.arange(4.0, 10.0)]))},
        logit=(2.5, 0.0),
        facts={**FACTS, "samples": 8 * step},
    )


def failing(times: int) -> Callable[..., None]:
    """Return a `save_file` that fails the given number of times before it works."""
    left = times

    def save(*args: Any, **kwargs: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(*args, **kwargs)

    return save
