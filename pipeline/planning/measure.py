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
PARTS = 4
"""Of the training, because the spread among them says how far to trust the figure."""
PHASES = ("forward", "objective", "backward", "optimizer")
WARM_UP = 2
"""Steps before any that count."""
WAITING = 0.1
"""From this share of waiting for data on, data is the bottleneck."""


@dataclass(frozen=True)
class RunMeasurement:
    """Figures of one rank, which has its share of the batch, on this machine; rates are samples per second."""

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
    rates: list[float]
    """Of training, loader and steps together, in each part of the time."""
    data_wait: float
    """Share of the training time that waited for data."""
    checkpoint: tuple[float, float]
    """Seconds that training stops for a checkpoint, and until its files are written in the background."""
    evaluation: float
    """Rate of an evaluation's forward pass."""
    device_gib: float | None
    """Peak memory of the GPU."""

    @property
    def training(self) -> float:
        """Rate of training over the whole time."""
        return len(self.rates) / sum(1 / rate for rate in self.rates)


def measure(run: RunConfig, *, ranks: int, gpus_per_node: int = 8, seconds: float = 60.0) -> dict[str, str]:
    """Measure one rank's part of a recipe, with the recipe's model, data, workers and engine, and forecast the run.

    Args:
        run: the recipe. Its data must be there.
        ranks: of the run that is planned; the one that is measured has its share of batch and streams.
        gpus_per_node: ranks that share the cores of a node.
        seconds: for everything that is repeated; building the model and one checkpoint come on top.

    Returns:
        Figures and forecast as texts by label. Communication between ranks is not in the forecast.

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
            return describe(_measure(trainer, seconds=seconds), run, ranks=ranks)


def cores_of_one(ranks: int) -> int:
    """Cores that each of a node's ranks will have, if this process may use what one or all of them will share.

    A scheduler that has given this process some of the node's cores and one GPU has already divided them.
    """
    gpus = torch.cuda.device_count()
    if gpus == 1 and usable_cores() < (os.cpu_count() or 1):
        return usable_cores()
    return max(1, usable_cores() // (min(ranks, gpus) if gpus > 1 else ranks))


def describe(measured: RunMeasurement, run: RunConfig, *, ranks: int) -> dict[str, str]:
    """The measured figures and the forecast of the whole run, as texts by label."""
    total, (stopped, written) = sum(measured.phases.values()), measured.checkpoint
    phases = ", ".join(f"{name} {part / total:.0%}" for name, part in measured.phases.items())
    memory = f"host {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB without its workers"
    if measured.device_gib is not None:
        memory = f"GPU {measured.device_gib:.2f} GiB, {memory}"
    rate = measured.local_batch / (measured.local_batch / measured.training + stopped / run.checkpoint.every) * ranks
    others = "" if ranks == 1 else f"; {ranks} times one rank's, without communication and the larger gathered batch"
    return {
        "MEASURED": (
            f"one rank, {measured.local_batch} pairs a step, {measured.cores} cores, {measured.workers} workers"
        ),
        "loader alone": f"{measured.loader:,.1f} samples/s",
        "steps alone": f"{measured.step:,.1f} samples/s ({phases})",
        "together": (
            f"{measured.training:,.1f} samples/s ({min(measured.rates):,.1f} to {max(measured.rates):,.1f} in quarters "
            f"of the time), {measured.data_wait:.0%} waiting for data"
        ),
        "checkpoint": f"training stops for {stopped:.2f} s; written after {written:.2f} s",
        "evaluation": f"{measured.evaluation:,.1f} samples/s through the towers",
        "peak memory": memory,
        "FORECAST": f"{rate:,.1f} samples/s, {run.samples / rate / 3600:,.2f} h{others}",
        "bottleneck": _bottleneck(measured),
    }


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


def _measure(trainer: Trainer, *, seconds: float) -> RunMeasurement:
    run, world = trainer.run, trainer.world
    for _ in range(WARM_UP):
        batch = _train(trainer)
    trainer.batches.wait()
    loader = run.batch_size / _mean_seconds(lambda: next(trainer.state.loader), SHARES["loader"] * seconds, world)
    alone, phases = _steps_alone(trainer, batch, seconds=SHARES["step"] * seconds)
    evaluation = run.batch_size / _mean_seconds(lambda: _encode(trainer, batch), SHARES["evaluation"] * seconds, world)
    rates, waits = [], []
    peaks = [phases.get("memory_gib", 0.0)]  # since the reading before
    for _ in range(PARTS):
        trainer.meter.start()
        _mean_seconds(lambda: _train(trainer), TRAINING_SHARE / PARTS * seconds, world)
        read = trainer.meter.read()
        rates.append(read["samples_per_second"])
        waits.append(read["data_wait"])
        peaks.append(read.get("memory_gib", 0.0))
    return RunMeasurement(
        local_batch=run.batch_size,
        cores=world.cores,
        workers=trainer.state.loader.workers,
        loader=loader,
        step=run.batch_size / alone,
        phases={name: share * alone for name in PHASES if (share := phases.get(f"time_{name}")) is not None},
        rates=rates,
        data_wait=sum(waits) / PARTS,
        checkpoint=_checkpoint(trainer, batch),
        evaluation=evaluation,
        device_gib=max(*peaks, torch.cuda.max_memory_allocated() / 2**30) if world.device.type == "cuda" else None,
    )


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
    trainer.state.average(batch, trainer.train_step(batch))
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
