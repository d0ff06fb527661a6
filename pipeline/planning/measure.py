"""Measure a recipe on this machine for a minute, and forecast the run from that."""

from __future__ import annotations

import itertools
import os
import resource
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from pipeline.cores import usable_cores
from pipeline.data.loading.loader import Batch
from pipeline.distributed.start import start_world
from pipeline.distributed.world import World
from pipeline.files import existing_folder
from pipeline.training.loop import Trainer
from pipeline.training.recipe import RunConfig
from pipeline.training.run import setup

LOADER_SHARE, STEP_SHARE = 0.15, 0.25
"""Parts of the time for the loader alone and the steps alone; the rest is for training."""
PHASES = ("forward", "objective", "backward", "optimizer")
WAITING = 0.1
"""From this share of waiting for data on, data is the bottleneck."""


def measure(run: RunConfig, *, ranks: int, seconds: float = 60.0) -> dict[str, str]:
    """Measure one rank's part of a recipe that `plan_run` has accepted, and forecast the run.

    The rank has its share of batch and streams, and of this machine's cores: one rank for each GPU, or without GPUs all
    ranks, divide them. What is repeated takes `seconds`; building the model and one checkpoint come on top.

    Returns:
        Figures and forecast as texts by label. Communication between ranks is not in the forecast.

    Raises:
        UserError: The recipe cannot be trained here.
    """
    share = max(1, usable_cores() // min(ranks, torch.cuda.device_count() or ranks))
    cores, place = os.sched_getaffinity(0), existing_folder(Path(run.output))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".neuclip-measure-", dir=place))
        stack.callback(os.sched_setaffinity, 0, cores)
        os.sched_setaffinity(0, sorted(cores)[:share])
        world = stack.enter_context(start_world(device=run.engine.device))
        trial = _trial(run, ranks=ranks, folder=Path(folder))
        trainer = stack.enter_context(setup(trial, world=world, resume=None))
        return _measure(trainer, run, ranks=ranks, seconds=seconds)


def _trial(run: RunConfig, *, ranks: int, folder: Path) -> RunConfig:
    """One rank's share of the recipe, which trains for as long as needed and leaves no trace, here or elsewhere."""
    return replace(
        run,
        output=str(folder),
        batch_size=run.batch_size // ranks,
        samples=max(run.samples, run.batch_size * 10**6),
        data=replace(run.data, streams=run.data.streams // ranks),
        engine=replace(run.engine, probe=False),
        checkpoint=replace(run.checkpoint, mirror=None),
        telemetry=replace(run.telemetry, tensorboard=False, trackers=(), progress="quiet"),
        evaluation=replace(run.evaluation, suite=None),
    )


def _measure(trainer: Trainer, run: RunConfig, *, ranks: int, seconds: float) -> dict[str, str]:
    local, world, meter = trainer.run.batch_size, trainer.world, trainer.meter
    for _ in range(2):  # to warm up
        batch = _train(trainer)
    trainer.batches.wait()
    loader = local / _mean_seconds(lambda: next(trainer.state.loader), LOADER_SHARE * seconds, world)
    # The same batch again and again, while the next one is not fetched. At a learning rate of 0: after many updates on
    # one batch, values can be so small that a CPU is slow with them.
    trainer.batches._loader, loading = itertools.repeat(batch), trainer.batches._loader
    meter.start()
    alone = _mean_seconds(lambda: trainer.train_step(trainer.batches.next(), lr_scale=0.0), STEP_SHARE * seconds, world)
    phases = meter.read()
    trainer.batches._loader = loading
    meter.start()
    _mean_seconds(lambda: _train(trainer), (1 - LOADER_SHARE - STEP_SHARE) * seconds, world)
    together = meter.read()
    start = time.perf_counter()
    trainer.writer.save(trainer.state.snapshot())
    stopped = time.perf_counter() - start
    trainer.writer.wait()
    written = time.perf_counter() - start
    memory = f"host {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB without its workers"
    if world.device.type == "cuda":  # a reading is the peak since the one before
        memory = f"GPU {max(phases['memory_gib'], together['memory_gib']):.2f} GiB, {memory}"
    step, training, waited = local / alone, together["samples_per_second"], together["data_wait"]
    parts = {name: part for name in PHASES if (part := phases.get(f"time_{name}")) is not None}
    shares = ", ".join(f"{name} {part / sum(parts.values()):.0%}" for name, part in parts.items())
    rate = local / (local / training + stopped / run.checkpoint.every) * ranks
    others = "" if ranks == 1 else f"; {ranks} times one rank's, without communication and the larger gathered batch"
    bottleneck = f"compute; steps without the loader beside them are {step / training:.2f}x as fast"
    if waited >= WAITING:
        bottleneck = f"data: steps alone are {step / training:.1f}x as fast: more data.workers, if there are cores for "
        bottleneck += "them, or smaller images"
    return {
        "MEASURED": f"one rank, {local} pairs a step, {world.cores} cores, data.workers={trainer.state.loader.workers}",
        "loader alone": f"{loader:,.1f} samples/s",
        "steps alone": f"{step:,.1f} samples/s ({shares})",
        "together": f"{training:,.1f} samples/s, {waited:.0%} waiting for data",
        "checkpoint": f"training stops for {stopped:.2f} s; written after {written:.2f} s",
        "peak memory": memory,
        "FORECAST": f"{rate:,.1f} samples/s, {run.samples / rate / 3600:,.2f} h{others}",
        "bottleneck": bottleneck,
    }


def _mean_seconds(call: Callable[[], object], seconds: float, world: World) -> float:
    """Mean time of a call, repeated for some seconds and at least three times."""
    count, start = 0, time.perf_counter()
    while count < 3 or time.perf_counter() - start < seconds:
        call()
        count += 1
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def _train(trainer: Trainer) -> Batch:
    batch = trainer.batches.next()
    trainer.state.average(batch, trainer.train_step(batch))
    trainer.state.step += 1
    return batch
