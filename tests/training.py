"""Training in the process of the test, which takes a tenth of the time of a process of its own."""

import os
import sys
from contextlib import contextmanager
from unittest import mock

from pipeline.training.recipe import load_recipe
from pipeline.training.run import train
from tests.shards import write_shards
from tests.towers import write_tiny

SMALL = ("data.streams=4", "data.shuffle_buffer=10", "data.workers=0", "batch_size=8", "schedule.warmup_steps=1",
         "engine.deepspeed=zero1_fp32", "engine.device=cpu", "telemetry.every=1", "telemetry.tensorboard=false",
         "telemetry.progress=quiet", "optimizer.eps=1e-5", "objective.name=openclip")  # fmt: skip


def prepare(folder, sizes=(40,), *, image_size=16):
    """Write what a small run needs, shards of these sizes and an architecture, to a folder, and return it."""
    write_shards(folder / "shards", sizes)
    write_tiny(folder, image_size=image_size)
    return folder


def settings_in(folder, output, *more):
    """Settings of a run on what `prepare` has written; `output` is in the folder unless it is absolute."""
    inputs = [f"data.sources={folder / 'shards'}", f"model.arch={folder / 'tiny-towers.json'}"]
    return [f"output={folder / output}", *inputs, *more]


def train_here(*overrides, resume=None):
    """Train one run on one rank to its end; `SMALL` is below the overrides. ZeRO stage 3 needs a process of its own."""
    with in_this_process():
        run = load_recipe(None, [*SMALL, *overrides])
        assert train(run, resume=resume) == 0


@contextmanager
def in_this_process():
    """Train in this block: environment and DeepSpeed are as in a fresh process, and are restored afterwards."""
    groups, comm = (sys.modules.get(f"deepspeed.{name}") for name in ("utils.groups", "comm.comm"))
    if groups is not None and comm is not None:  # it keeps the process group of an earlier run
        groups._WORLD_GROUP = comm.cdb = None
    with mock.patch.dict(os.environ):
        yield
