"""The loader a trainer iterates: this rank's rows of global batch after global batch, and where the run stands.

Workers start by `forkserver`: a clean process, started before CUDA or any thread exists in it, imports this package
once and forks every worker. Plain `fork` would copy locks that threads of the training process (CUDA, NCCL, OpenMP)
may hold at that moment; `spawn` would import torch once per worker.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pipeline.data.config import DataConfig
from pipeline.data.corpus import Mixture, load_mixture, plan_epoch
from pipeline.data.decode import ImageDecoder
from pipeline.data.hashing import MASK
from pipeline.data.streams import Layout, make_layout, stream_order
from pipeline.data.worker import Failure, Order, Part, StreamDataset, Tokenize, order_hash
from pipeline.errors import UserError
from pipeline.world import World

Counts = Mapping[tuple[str, str], int]


@dataclass(frozen=True)
class Position:
    """Where a run stands after a batch: the next batch is number `batch` of epoch `epoch`.

    order_hash: of all batches of this epoch so far; this rank's addend. corrupt: (reason, shard) -> corrupt samples of
    this epoch so far, seen by this rank. Each was replaced by another sample.
    """

    epoch: int = 0
    batch: int = 0
    order_hash: int = 0
    corrupt: Counts = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """This rank's rows of one global batch. image: uint8 [b, 3, H, W]. text: int64 [b, L]. sample_id: int64 [b].

    position: where the run stands after this batch. replaced: rows whose own sample was corrupt.
    """

    image: Tensor
    text: Tensor
    sample_id: Tensor
    position: Position
    replaced: int


def build_loader(
    config: DataConfig, *, world: World, global_batch: int, seed: int, image_size: int, tokenize: Tokenize
) -> Loader:
    """The loader of this rank, at the start of epoch 0.

    Args: tokenize: captions -> int64 [b, L]; runs in the workers, so it must be picklable when there are any.
    Raises: UserError with the numbers when data, batch, streams, ranks and workers do not fit together.
    """
    mixture = load_mixture(config)
    layout = make_layout(
        samples=mixture.epoch_samples,
        global_batch=global_batch,
        streams=config.streams,
        ranks=world.size,
        workers=config.workers,
    )
    if config.workers:
        _check_picklable(tokenize)
        _warm_forkserver()
    order = Order(mixture=mixture, layout=layout, seed=seed, shuffle_buffer=config.shuffle_buffer)
    decoder = ImageDecoder(size=image_size, crop=config.crop, mode=config.decoding, max_pixels=config.max_pixels)
    share = config.streams // world.size
    dataset = StreamDataset(
        order=order,
        streams=range(world.rank * share, (world.rank + 1) * share),
        decoder=decoder,
        tokenize=tokenize,
        retries=config.retries,
        epoch=0,
        batch=0,
    )
    return Loader(config, world=world, dataset=dataset)


class Loader:
    """Batches for ever, across epochs. Close it, or use it as a context manager, to end its workers."""

    def __init__(self, config: DataConfig, *, world: World, dataset: StreamDataset) -> None:
        self._config, self._world, self._dataset = config, world, dataset
        self._parts: Iterator[Part | Failure] | None = None
        self._position = Position()

    @property
    def mixture(self) -> Mixture:
        return self._dataset.order.mixture

    @property
    def layout(self) -> Layout:
        return self._dataset.order.layout

    @property
    def n(self) -> int:
        """Number of distinct samples; ids run over [0, n)."""
        return self.mixture.manifest.n

    @property
    def steps_per_epoch(self) -> int:
        return self.layout.steps

    @property
    def local_batch(self) -> int:
        return self.layout.global_batch // self._world.size

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        """The next batch. Raises: UserError when the data can no longer be read."""
        if self._parts is None:
            self._parts = self._start()
        parts = [self._next_part(self._parts) for _ in range(max(1, self._config.workers))]
        at = self._position
        if at.batch == self.layout.steps:
            at = Position(epoch=at.epoch + 1)
        assert all((part.epoch, part.batch) == (at.epoch, at.batch) for part in parts), "workers are out of step"
        corrupt = sum((part.corrupt for part in parts), Counter(at.corrupt))
        total = (at.order_hash + sum(part.order_hash for part in parts)) & MASK
        self._position = Position(epoch=at.epoch, batch=at.batch + 1, order_hash=total, corrupt=corrupt)
        return Batch(
            image=self._join(parts),
            text=torch.from_numpy(np.concatenate([part.text for part in parts])),
            sample_id=torch.from_numpy(np.concatenate([part.sample_id for part in parts])),
            position=self._position,
            replaced=sum(sum(part.corrupt.values()) for part in parts),
        )

    def close(self) -> None:
        """End the workers; iterating again starts new ones where the last batch ended."""
        parts, self._parts = self._parts, None
        if parts is not None and self._config.workers:
            parts._shutdown_workers()  # type: ignore[attr-defined]
        self._dataset = replace(self._dataset, epoch=self._position.epoch, batch=self._position.batch)

    def state_dict(self, position: Position | None = None) -> dict[str, Any]:
        """Where the run stands after the batch that carried `position` (default: the last one given out), as plain
        values.

        A collective: every rank calls it. The result is the same on every rank and for any number of ranks and workers.
        """
        position = position or self._position
        everyone = self._world.gather_objects((position.order_hash, dict(position.corrupt)))
        corrupt = sum((Counter(counts) for _, counts in everyone), Counter())
        return {
            "epoch": position.epoch,
            "batch": position.batch,
            "order_hash": f"{sum(hashed for hashed, _ in everyone) & MASK:016x}",
            "corrupt": [[reason, shard, count] for (reason, shard), count in sorted(corrupt.items())],
            "identity": self._identity(),
            "proof": self._proof(position),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch that `state_dict` was taken at; nothing that came before is decoded again.

        Raises: UserError when this run's order is not the one that the state belongs to.
        """
        saved, own = state["identity"], self._identity()
        changed = [
            f"{name} was {saved.get(name)}, now {value}" for name, value in own.items() if saved.get(name) != value
        ]
        if changed:
            raise UserError(
                f"The checkpoint's data order cannot be continued: {'; '.join(changed)}. "
                "Restore these settings, or start a new run."
            )
        self.close()
        corrupt = {(reason, shard): count for reason, shard, count in state["corrupt"]}
        first = self._world.is_main
        self._position = Position(
            epoch=state["epoch"],
            batch=state["batch"],
            order_hash=int(state["order_hash"], 16) if first else 0,
            corrupt=corrupt if first else {},
        )
        if self._proof(self._position) != state["proof"]:
            raise UserError(
                f"The samples of epoch {state['epoch']} before batch {state['batch']} are not those of the checkpoint "
                "although "
                "all settings agree: the program's order has changed. Resume with the version that wrote the "
                "checkpoint."
            )
        self._dataset = replace(self._dataset, epoch=self._position.epoch, batch=self._position.batch)

    def _identity(self) -> dict[str, Any]:
        """Everything that the order is a function of."""
        order = self._dataset.order
        return {
            "seed": order.seed,
            "global batch": order.layout.global_batch,
            "data.streams": order.layout.streams,
            "data.shuffle_buffer": order.shuffle_buffer,
            "data.replacement": order.mixture.replacement,
            "weights": list(order.mixture.weights),
            "manifest digests": list(order.mixture.digests),
            "data.crop": [*self._config.crop.scale, *self._config.crop.ratio],
            "data.decoding": self._config.decoding,
        }

    def _proof(self, position: Position) -> str:
        """The order hash of the last batch before a position as planned, computed from the plan alone."""
        order, layout = self._dataset.order, self.layout
        epoch, batch = (
            (position.epoch, position.batch - 1) if position.batch else (position.epoch - 1, layout.steps - 1)
        )
        if epoch < 0:
            return ""
        return f"{planned_hash(order, epoch=epoch, batch=batch):016x}"

    def _start(self) -> Iterator[Part | Failure]:
        if not self._config.workers:
            return iter(self._dataset)
        loader = DataLoader(
            self._dataset,
            batch_size=None,
            num_workers=self._config.workers,
            prefetch_factor=self._config.prefetch,
            multiprocessing_context=_warm_forkserver(),
            collate_fn=_as_is,
        )
        return iter(loader)

    def _next_part(self, parts: Iterator[Part | Failure]) -> Part:
        part = next(parts)
        if isinstance(part, Failure):
            self.close()
            raise UserError(part.message)
        return part

    def _join(self, parts: list[Part]) -> Tensor:
        """The parts' images as one tensor, in page-locked memory when they go to a GPU."""
        pin = self._world.device.type == "cuda"
        if len(parts) == 1 and not pin:
            return parts[0].image
        rows = sum(len(part.image) for part in parts)
        joined = torch.empty((rows, *parts[0].image.shape[1:]), dtype=torch.uint8, pin_memory=pin)
        return torch.cat([part.image for part in parts], out=joined)


def planned_ids(order: Order, *, epoch: int, batch: int) -> np.ndarray:
    """Sample ids of a global batch in row order, [B], as they are when no sample is corrupt; reads no data."""
    layout, mixture = order.layout, order.mixture
    segments = plan_epoch(mixture, seed=order.seed, epoch=epoch)
    offsets = np.array(mixture.manifest.offsets)
    length, b = layout.stream_length, layout.rows
    positions = np.concatenate(
        [
            c * length
            + stream_order(seed=order.seed, epoch=epoch, stream=c, length=length, buffer=order.shuffle_buffer).places(
                batch * b, (batch + 1) * b
            )
            for c in range(layout.streams)
        ]
    )
    m = np.searchsorted(segments.position, positions, side="right") - 1
    return offsets[segments.shard[m]] + segments.start[m] + positions - segments.position[m]


def planned_hash(order: Order, *, epoch: int, batch: int) -> int:
    """`order_hash` of a global batch as planned."""
    return order_hash(planned_ids(order, epoch=epoch, batch=batch), epoch=epoch, batch=batch, first_row=0)


def _as_is(part: Any) -> Any:
    return part


def _check_picklable(tokenize: Tokenize) -> None:
    try:
        pickle.dumps(tokenize)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"The tokenizer {tokenize!r} cannot be sent to worker processes ({error}): use data.workers=0, or a "
            "tokenizer "
            "that is an object of a module-level class."
        ) from error


def _warm_forkserver() -> Any:
    """Start the clean process that forks the workers, if there is none; returns at once while it imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pipeline.data.worker", "pipeline.data.tokenize"])
    forkserver.ensure_running()
    return context
