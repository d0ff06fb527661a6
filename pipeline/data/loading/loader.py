"""The loader that a trainer iterates: this rank's rows of each global batch, and the position in the data."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import psutil
import torch
from torch import Tensor

from pipeline.data.data_config import MAX_PIXELS, NO_COLOURS, PREFETCH, DataConfig, default_workers
from pipeline.data.loading.blocks import Blocks
from pipeline.data.loading.decode import ImageDecoder
from pipeline.data.loading.gpu_decode import gpu_that_decodes, whole_batch
from pipeline.data.loading.position import (
    Counts,
    DataReport,
    Position,
    check_place,
    differences,
    has_too_many,
    merged,
    pixel_identity,
    place_of,
    report,
)
from pipeline.data.loading.stored_features import FeatureFile
from pipeline.data.loading.worker import Part, StreamDataset, Tokenize, prepare_workers, start_parts
from pipeline.data.order.canonical_order import make_order
from pipeline.data.order.mixture import MASK
from pipeline.data.shards.check_shards import check_shards
from pipeline.data.shards.tar_reader import CaptionField
from pipeline.distributed.exit_record import EXIT_STALLED, record_exit
from pipeline.distributed.processes import means_worker_died, worker_died_message
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.pictures.pixels import colour_of

PATIENCE_SECONDS = 2.0
"""After a stop signal, a batch that does not come within this time is given up: nothing is lost by that."""
MEMORY = (
    f"Each worker keeps about half of data.shuffle_buffer encoded samples for each of its streams, and {PREFETCH} "
    "batches: lower data.shuffle_buffer or data.workers. `neuclip plan` estimates the memory."
)
log = logging.getLogger(__name__)


class NoBatch(Exception):
    """The run is to stop, and no batch has come."""


@dataclass(frozen=True)
class Batch:
    """This rank's rows of one global batch."""

    image: Tensor
    """uint8 [b, 3, H, W], channels last in memory; no rows after `Loader.use_features`. On the GPU with
    `data.decoding=gpu`, otherwise on the CPU."""
    text: Tensor
    """Token ids, int64 [b, L]."""
    sample_id: Tensor
    """int64 [b]."""
    position: Position
    """Of the run after this batch."""
    replaced: int
    """Rows whose own sample was corrupt."""


def build_loader(
    config: DataConfig, *, world: World, global_batch: int, seed: int, image_size: int, tokenize: Tokenize
) -> Loader:
    """The loader of this rank, at the start of epoch 0, for batches of `global_batch` samples over all ranks.

    `tokenize` (captions -> int64 [b, L]) runs in the workers, so it must be picklable if there are any. UserError if
    the settings do not fit together, shards do not match their manifest, or this machine cannot run the workers.
    """
    order = make_order(config, ranks=world.size, global_batch=global_batch, seed=seed)
    share = config.streams // world.size
    workers = min(share, default_workers(world.cores) if config.workers is None else config.workers)
    decoder = ImageDecoder(
        size=image_size,
        crop=config.crop,
        augment=None if config.augment == NO_COLOURS else config.augment,
        mode="fast" if config.decoding == "gpu" else config.decoding,
        max_pixels=MAX_PIXELS,
        background=colour_of(config.background),
        gpu=gpu_that_decodes(world) if config.decoding == "gpu" else None,
    )
    if workers:
        prepare_workers(workers, tokenize=tokenize, streams=share)
    check_shards(order.mixture.manifest, world)
    dataset = StreamDataset(
        order=order,
        streams=range(world.rank * share, (world.rank + 1) * share),
        decoder=decoder,
        tokenize=tokenize,
        retries=config.retries,
        captions=tuple(CaptionField.parse(source.caption or config.caption) for source in config.sources),
        altered_shards=config.altered_shards,
    )
    return Loader(config, world=world, dataset=dataset, workers=workers)


class Loader:
    """An endless iterator of batches, across epochs. Close it, or use it as a context manager, to end its workers."""

    def __init__(self, config: DataConfig, *, world: World, dataset: StreamDataset, workers: int) -> None:
        self._config, self._world, self._dataset, self.workers = config, world, dataset, workers
        self.order, self.mixture, self.layout = dataset.order, dataset.order.mixture, dataset.order.layout
        self.n = self.mixture.manifest.n
        """Number of distinct samples; ids run over [0, n)."""
        self.steps_per_epoch = self.layout.steps
        self.position = Position()
        """Position after the last batch that was returned."""
        self.stopped: Callable[[], bool] = lambda: False
        """Whether the run is to stop, so that a batch which does not come soon is given up."""
        self._blocks: Blocks | None = None
        self._parts: Iterator[Part | UserError] = iter(())
        self._reading: Sequence[int] = []

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        """The next batch; UserError if the data cannot be read, NoBatch if the run is to stop and none has come."""
        if self._blocks is None:
            self._start()
        try:
            parts = [self._next_part() for _ in range(max(1, self.workers))]
        except UserError:
            self.close()
            raise
        at = self.position if self.position.batch < self.layout.steps else Position(epoch=self.position.epoch + 1)
        assert all((part.epoch, part.batch) == (at.epoch, at.batch) for part in parts), "workers are out of step"
        fresh = sum((part.corrupt for part in parts), Counter[tuple[str, str]]())
        position = Position(
            epoch=at.epoch,
            batch=at.batch + 1,
            order_hash=(at.order_hash + sum(part.order_hash for part in parts)) & MASK,
            corrupt=at.corrupt + fresh if fresh else at.corrupt,
            judged=at.judged,
        )
        image = self._blocks.take()  # type: ignore[union-attr]
        if self._dataset.decoder.gpu is not None:
            image = whole_batch(parts, image, device=self._world.device, manifest=self.mixture.manifest)
        text = self._pinned(np.concatenate([part.text for part in parts]))
        sample_id = self._pinned(np.concatenate([part.sample_id for part in parts]))
        self.position = position
        return Batch(image, text, sample_id, position, replaced=fresh.total())

    def stand_in(self) -> Batch:
        """Black images without a caption in place of the next batch, for a step whose result is discarded."""
        data = self._dataset
        rows, first = len(data.streams) * self.layout.rows, data.streams[0] * self.layout.rows
        text = data.tokenize([""] * rows)
        shape = (0 if data.features else rows, data.decoder.size, data.decoder.size, 3)
        image = torch.zeros(shape, dtype=torch.uint8).permute(0, 3, 1, 2)
        return Batch(image, text, torch.arange(first, first + rows), self.position, replaced=0)

    def close(self) -> None:
        """End the workers. Iterating again starts new ones after the last batch."""
        self._blocks = None
        parts, self._parts = self._parts, iter(())
        if hasattr(parts, "_shutdown_workers"):
            parts._shutdown_workers()

    def report(self, position: Position | None = None) -> DataReport:
        """`position.report` of a batch's position (default: the last batch that was returned). Collective."""
        limit = self._config.corrupt_limit
        return report(position or self.position, self.layout, self._world, limit=limit)

    def state_dict(self, position: Position | None = None) -> dict[str, Any]:
        """The state after a batch (default: the last one), as plain values: the same for any ranks. Collective."""
        position = position or self.position
        hashed, corrupt = merged(position, self._world)
        return {
            **place_of(self.order, position),
            "order_hash": hashed,
            "corrupt": [[reason, shard, count] for (reason, shard), count in sorted(corrupt.items())],
            "pixels": self._pixels,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch at which `state_dict` was called; UserError if it was in another order.

        If its counts exceed `corrupt_limit`, the run was stopped for them, and the data may have been mended since:
        only further ones stop it again. Another decoding changes pixels, not the order: it is allowed, with a warning.
        """
        self.close()
        corrupt = Counts({(reason, shard): count for reason, shard, count in state["corrupt"]})
        position, is_main = check_place(state, self.order), self._world.is_main
        stopped = has_too_many(corrupt.total(), position, self.layout, limit=self._config.corrupt_limit)
        self.position = replace(
            position,
            order_hash=int(state["order_hash"], 16) if is_main else 0,
            corrupt=corrupt if is_main else Counts(),
            judged=corrupt.total() if stopped else 0,
        )
        if is_main and (changed := differences(state["pixels"], self._pixels)):
            log.warning("Samples are decoded differently than before the checkpoint: %s.", "; ".join(changed))

    @property
    def _pixels(self) -> dict[str, Any]:
        """Everything that determines pixels and captions but not the order."""
        captions = " ".join(dict.fromkeys(str(field) for field in self._dataset.captions))
        return {**pixel_identity(self._dataset.decoder), "data.caption": captions, "crops are drawn by": "row"}

    def use_features(self, file: FeatureFile) -> None:
        """From the next batch that is loaded on, decode no images: their features are in `file`."""
        self.close()
        self._dataset = replace(self._dataset, features=file)

    def _start(self) -> None:
        data = self._dataset
        rows = 0 if data.features else len(data.streams) * self.layout.rows
        ahead, pin = PREFETCH if self.workers else 0, self._world.device.type == "cuda"
        self._blocks = Blocks(rows, data.decoder.size, ahead=ahead, pin=pin and data.decoder.gpu is None)
        data = replace(data, epoch=self.position.epoch, batch=self.position.batch, blocks=self._blocks)
        self._parts, self._reading = start_parts(data, workers=self.workers)

    def _next_part(self) -> Part:
        """The next part. A wait for a worker that takes too long ends this process."""
        began = time.monotonic()
        while True:
            try:
                part = next(self._parts)
                if isinstance(part, UserError):
                    raise part
                return part
            except (RuntimeError, OSError, EOFError) as error:
                if "DataLoader timed out" not in str(error):  # after that, the same part can be asked for again
                    if not (self.workers and means_worker_died(error)):
                        raise
                    raise UserError(worker_died_message(error, memory=MEMORY)) from error
            waited = time.monotonic() - began
            if waited > PATIENCE_SECONDS and self.stopped():
                self._kill_workers()
                raise NoBatch
            if waited > 60 * self._config.timeout_minutes:
                self._leave()

    def _leave(self) -> NoReturn:
        """Say what the workers are doing, and end them and this process, for which others may wait."""
        lines, manifest = [], self.mixture.manifest
        for number, worker in enumerate(getattr(self._parts, "_workers", [])):
            sample = self._reading[number]
            place = f" at sample {sample} of {manifest.url(manifest.shard_of(sample))}" if sample >= 0 else ""
            state = "gone"
            with suppress(psutil.NoSuchProcess):
                state = psutil.Process(worker.pid).status()
            lines.append(f"Worker {number} (process {worker.pid}) is {state}{place}.")
        self._kill_workers()
        minutes, at = self._config.timeout_minutes, self.position
        text = (
            f"Rank {self._world.rank}: no batch came from the loading workers for {minutes:g} minutes "
            f"(data.timeout_minutes), after batch {at.batch} of epoch {at.epoch}. {' '.join(lines)} Start again with "
            "--resume latest when the cause is removed."
        )
        print(text, file=sys.stderr, flush=True)
        record_exit(EXIT_STALLED, text)
        os._exit(EXIT_STALLED)

    def _kill_workers(self) -> None:
        for worker in getattr(self._parts, "_workers", []):
            worker.kill()  # a stopped process ignores everything else, and would outlive this one

    def _pinned(self, values: np.ndarray) -> Tensor:
        """In page-locked memory if it goes to a GPU: only from there is the copy asynchronous."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self._world.device.type == "cuda" else tensor
