"""Measure a recipe on this machine for a minute, and forecast the run from that."""

from __future__ import annotations

import itertools
import math
import os
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipeline.cores import only_cores, usable_cores
from pipeline.data.loading.loader import Batch
from pipeline.distributed.start import start_world
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import existing_folder
from pipeline.training.loop import Trainer
from pipeline.training.recipe import RunConfig
from pipeline.training.run import setup

SHARES = {"loader": 0.15, "step": 0.25, "evaluation": 0.05}
"""Parts of the time for the loader alone, the step alone and an evaluation's forward pass; the rest is for training."""
TRAINING_SHARE = 1 - sum(SHARES.values())
WARM_UP = 2
"""Steps before any that count."""
WAITING = 0.1
"""From this share of waiting for data on, data is the bottleneck."""


@dataclass(frozen=True)
class RunMeasurement:
    """Figures of one rank on this machine; rates are samples per second, times seconds."""

    ranks: int
    """Ranks that the recipe was planned for; one was measured, with its share of the batch."""
    local_batch: int
    cores: int
    """That the rank had: its share of the node's."""
    workers: int
    loader: float
    """Rate of the loader alone."""
    step: float
    """Rate of the steps alone, on a batch that is there already."""
    phases: dict[str, float]
    """Seconds of a step alone by phase."""
    training: float
    """Rate of training, loader and steps together."""
    slowest: float
    fastest: float
    """Lowest and highest rate of training among the parts of the measurement."""
    data_wait: float
    """Share of the training time that waited for data."""
    snapshot_seconds: float
    """How long training stops for a checkpoint."""
    write_seconds: float
    """How long a checkpoint's files take in the background."""
    evaluation: float
    """Rate of an evaluation's forward pass."""
    device_gib: float | None
    """Peak memory of the GPU."""
    host_gib: float
    """Peak memory of the training process, without its workers."""


@dataclass(frozen=True)
class Forecast:
    """What a measurement means for the whole run. Communication between ranks is not in it."""

    samples_per_second: float
    """Of all ranks."""
    hours: float
    bottleneck: str


def measure(run: RunConfig, *, ranks: int, gpus_per_node: int = 8, seconds: float = 60.0) -> RunMeasurement:
    """Measure one rank's part of a recipe, with the recipe's model, data, workers and engine.

    Args:
        run: the recipe. Its data must be there.
        ranks: of the run that is planned; the one that is measured has its share of batch and streams.
        gpus_per_node: ranks that share the cores of a node.
        seconds: for everything that is repeated; building the model and one checkpoint come on top.

    Raises:
        UserError: the recipe cannot be trained here, or there is no manifest.
    """
    with tempfile.TemporaryDirectory(prefix=".neuclip-measure-", dir=existing_folder(Path(run.output))) as folder:
        trial = _trial(run, ranks=ranks, folder=Path(folder))
        share = cores_of_one(min(ranks, gpus_per_node))
        with (
            only_cores(share),
            start_world(device=run.engine.device) as world,
            setup(trial, world=world, resume=None) as trainer,
        ):
            return _measure(trainer, ranks=ranks, seconds=seconds)


def cores_of_one(ranks: int) -> int:
    """Cores that each of a node's ranks will have, if this process may use what one or all of them will share.

    A scheduler that has given this process some of the node's cores and one GPU has already divided them.
    """
    gpus = torch.cuda.device_count()
    if gpus == 1 and usable_cores() < (os.cpu_count() or 1):
        return usable_cores()
    return max(1, usable_cores() // (min(ranks, gpus) if gpus > 1 else ranks))


def forecast(measured: RunMeasurement, run: RunConfig) -> Forecast:
    """The rate, time and bottleneck of a run."""
    per_step = measured.local_batch / measured.training + measured.snapshot_seconds / run.checkpoint.every
    rate = measured.local_batch / per_step * measured.ranks
    return Forecast(rate, run.samples / rate / 3600, _bottleneck(measured))


def _bottleneck(measured: RunMeasurement) -> str:
    """What limits the rate, and what would change it."""
    gain = measured.step / measured.training
    if measured.data_wait >= WAITING and gain > 1.05:
        more = max(1, math.ceil(measured.workers * measured.step / measured.loader) - measured.workers)
        if measured.workers + 1 >= measured.cores:
            return (
                f"data: steps alone are {gain:.1f}x as fast, but this rank's {measured.cores} cores are in use: store "
                "smaller images, or use more cores per GPU"
            )
        return f"data: {more} more workers would give up to {gain:.1f}x"
    total = sum(measured.phases.values())
    name, longest = max(measured.phases.items(), key=lambda item: item[1])
    text = f"compute: {name} takes {longest / total:.0%} of a step"
    if gain > 1.05:
        text += f"; steps alone are {gain:.2f}x as fast, because loader and steps share this machine's cores"
    return text


def _trial(run: RunConfig, *, ranks: int, folder: Path) -> RunConfig:
    """One rank's share of the recipe, which trains for as long as needed and leaves no trace, here or elsewhere."""
    if run.batch_size % ranks or run.data.streams % ranks:
        raise UserError(
            f"{ranks} ranks must divide batch_size = {run.batch_size} and data.streams = {run.data.streams}."
        )
    return replace(
        run,
        output=str(folder),
        batch_size=run.batch_size // ranks,
        samples=max(run.samples, run.batch_size * 10**6),
        data=replace(run.data, streams=run.data.streams // ranks),
        engine=replace(run.engine, probe=False),
        checkpoint=replace(run.checkpoint, mirror=None),
        telemetry=replace(run.telemetry, tensorboard=False, trackers=(), progress="quiet", profile=None),
        evaluation=replace(run.evaluation, suite=None),
    )


def _measure(trainer: Trainer, *, ranks: int, seconds: float) -> RunMeasurement:
    run, world = trainer.run, trainer.world
    for _ in range(WARM_UP):
        batch = _train(trainer)
    trainer.batches.wait()
    loader = run.batch_size / _mean_seconds(lambda: next(trainer.state.loader), SHARES["loader"] * seconds, world)
    alone, phases = _steps_alone(trainer, batch, seconds=SHARES["step"] * seconds)
    evaluation = run.batch_size / _mean_seconds(lambda: _encode(trainer, batch), SHARES["evaluation"] * seconds, world)
    rates, waits, parts = [], [], 4
    peaks = [phases.get("memory_gib", 0.0)]  # since the reading before
    for _ in range(parts):  # in parts, because the spread among them says how far to trust the figure
        trainer.meter.start()
        _mean_seconds(lambda: _train(trainer), TRAINING_SHARE / parts * seconds, world)
        read = trainer.meter.read()
        rates.append(read["samples_per_second"])
        waits.append(read["data_wait"])
        peaks.append(read.get("memory_gib", 0.0))
    snapshot, write = _checkpoint(trainer, batch)
    return RunMeasurement(
        ranks=ranks,
        local_batch=run.batch_size,
        cores=world.cores,
        workers=trainer.state.loader.workers,
        loader=loader,
        step=run.batch_size / alone,
        phases={name.removeprefix("time_"): share * alone for name, share in phases.items()
                if name in ("time_forward", "time_objective", "time_backward", "time_optimizer")},
        training=parts / sum(1 / rate for rate in rates),
        slowest=min(rates),
        fastest=max(rates),
        data_wait=sum(waits) / parts,
        snapshot_seconds=snapshot,
        write_seconds=write,
        evaluation=evaluation,
        device_gib=max(*peaks, torch.cuda.max_memory_allocated() / 2**30) if world.device.type == "cuda" else None,
        host_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )  # fmt: skip


def _mean_seconds(call: Callable[[], object], seconds: float, world: World) -> float:
    """Mean time of a call, repeated for some seconds and at least three times."""
    count, start = 0, time.perf_counter()
    while count < 3 or time.perf_counter() - start < seconds:
        call()
        count += 1
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def _steps_alone(trainer: Trainer, batch: Batch, *, seconds: float) -> tuple[float, dict[str, float]]:
    """Mean seconds of a step on the same batch again and again, and the shares of its phases."""
    batches = trainer.batches
    batches._loader, loader = itertools.repeat(batch), batches._loader  # a step fetches the batch after it
    try:
        trainer.meter.start()
        # At a learning rate of 0: after many updates on one batch, values can be so small that a CPU is slow with them.
        alone = _mean_seconds(lambda: trainer.train_step(batches.next(), lr_scale=0.0), seconds, trainer.world)
        return alone, trainer.meter.read()
    finally:
        batches._loader = loader


def _train(trainer: Trainer) -> Batch:
    batch = trainer.batches.next()
    trainer.train_step(batch)
    trainer.state.step += 1
    return batch


def _encode(trainer: Trainer, batch: Batch) -> None:
    device = trainer.world.device
    image = trainer.normalized(batch.image.to(device))
    with torch.inference_mode():
        trainer.state.engine.forward(image, batch.text.to(device))


def _checkpoint(trainer: Trainer, batch: Batch) -> tuple[float, float]:
    start = time.perf_counter()
    trainer.writer.save(trainer.state.snapshot())
    stopped = time.perf_counter() - start
    trainer.writer.wait()
    return stopped, time.perf_counter() - start
