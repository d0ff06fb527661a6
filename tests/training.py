"""Training in the process of the test, which takes a tenth of the time of a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from pipeline.training.recipe import load_recipe
from pipeline.training.run import train

SMALL = ("data.streams=4", "data.shuffle_buffer=10", "data.workers=0", "batch_size=8", "schedule.warmup_steps=1",
         "engine.deepspeed=zero1_fp32", "engine.device=cpu", "telemetry.every=1", "telemetry.tensorboard=false",
         "telemetry.progress=quiet", "optimizer.eps=1e-5", "objective.name=openclip")  # fmt: skip


def train_here(*overrides: str, resume: str | None = None, new_batch_size: bool = False) -> None:
    """Train one run on one rank to its end; `SMALL` is below the overrides. ZeRO stage 3 needs a process of its own."""
    with in_this_process():
        run = load_recipe(None, [*SMALL, *overrides])
        assert train(run, resume=resume, new_batch_size=new_batch_size) == 0


@contextmanager
def in_this_process() -> Iterator[None]:
    """Train in this block: environment and DeepSpeed are as in a fresh process, and are restored afterwards."""
    groups, comm = (sys.modules.get(f"deepspeed.{name}") for name in ("utils.groups", "comm.comm"))
    if groups is not None and comm is not None:  # it keeps the process group of an earlier run
        groups._WORLD_GROUP = comm.cdb = None  # type: ignore[attr-defined]
    with mock.patch.dict(os.environ):
        yield
