"""The order of a whole run: its inputs, the sample ids of any batch, a hash to compare orders, and orders by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config import Registry
from pipeline.data.data_config import DataConfig
from pipeline.data.order.hashing import Purpose, draws, key
from pipeline.data.order.mixture import Mixture, Segments, load_mixture, shared_epoch
from pipeline.data.order.streams import BLOCK, Layout, StreamOrder, make_layout, stream_order

Int64 = NDArray[np.int64]
LOOKED_UP = 1024
CANONICAL = "canonical"
ORDERS: Registry[type[Order]] = Registry(
    "data order", setting="data.order", package="pipeline.data.order", group="neuclip.orders"
)
register_order = ORDERS.register


@register_order(CANONICAL)
@dataclass(frozen=True)
class Order:
    """The canonical order, with everything that determines it apart from the epoch.

    Another order is a subclass with `@register_order(name)` that overrides `segments`, `stream` or both. They must be
    pure functions of the fields, the epoch and the stream: loading, resuming and plans all compute the order anew.
    """

    mixture: Mixture
    layout: Layout
    seed: int
    shuffle_buffer: int
    name: str = CANONICAL
    """Which registered order this is."""

    def segments(self, epoch: int) -> Segments:
        """The samples of an epoch in reading order, `mixture.epoch_samples` in all; of these, stream c reads
        `[c L, (c + 1) L)`."""
        return shared_epoch(self.mixture, seed=self.seed, epoch=epoch)

    def stream(self, *, epoch: int, stream: int, block: int = BLOCK) -> StreamOrder:
        """The shuffle of one stream in one epoch; for `block` see `stream_order`."""
        return stream_order(
            seed=self.seed,
            epoch=epoch,
            stream=stream,
            length=self.layout.stream_length,
            buffer=self.shuffle_buffer,
            block=block,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the order of samples, as plain values by the names of the settings."""
        return {
            "data.order": self.name,
            "seed": self.seed,
            "global batch": self.layout.global_batch,
            "data.streams": self.layout.streams,
            "data.shuffle_buffer": self.shuffle_buffer,
            "data.replacement": self.mixture.replacement,
            "weights": list(self.mixture.weights),
            "contents of the shards": list(self.mixture.digests),
        }


def make_order(config: DataConfig, *, ranks: int, global_batch: int, seed: int) -> Order:
    """The order of a run, after reading the manifests.

    Args:
        config: The `data` section.
        ranks: Of the run.
        global_batch: Samples of a batch over all ranks.
        seed: Of the order.

    Raises:
        UserError: Data, batch size, streams and ranks do not fit together, or there is no such order.
    """
    chosen, mixture = ORDERS[config.order], load_mixture(config)
    layout = make_layout(samples=mixture.epoch_samples, global_batch=global_batch, streams=config.streams, ranks=ranks)
    return chosen(mixture=mixture, layout=layout, seed=seed, shuffle_buffer=config.shuffle_buffer, name=config.order)


def planned_ids(order: Order, *, epoch: int, first: int, last: int, streams: range | None = None) -> Int64:
    """Sample ids of the batches [first, last) if no sample is corrupt; reads no data.

    Args:
        order: The run's order.
        epoch: Number of the epoch.
        first: The first batch.
        last: The batch after the last.
        streams: Those whose rows are computed; all by default.

    Returns:
        Ids in row order, [last - first, b len(streams)].
    """
    layout = order.layout
    streams = range(layout.streams) if streams is None else streams
    segments = order.segments(epoch)
    offsets = order.mixture.manifest.offsets
    b, length = layout.rows, layout.stream_length
    ids = np.empty((last - first, len(streams), b), dtype=np.int64)
    for number, c in enumerate(streams):
        stream = order.stream(epoch=epoch, stream=c, block=max(LOOKED_UP, (last - first) * b))
        places = stream.places(first * b, last * b) + c * length
        m = np.searchsorted(segments.position, places, side="right") - 1
        ids[:, number] = (offsets[segments.shard[m]] + segments.start[m] + places - segments.position[m]).reshape(-1, b)
    return ids.reshape(last - first, len(streams) * b)


def order_hash(sample_id: Int64, *, epoch: int, batch: int, first_row: int) -> int:
    """A 64-bit hash of which samples are in which rows; hashes of disjoint rows add up to that of the batch."""
    rows = np.arange(first_row, first_row + len(sample_id), dtype=np.uint64) << np.uint64(40)
    hashes = draws(key(Purpose.ORDER, epoch, batch), rows + sample_id.astype(np.uint64))
    return int(hashes.sum(dtype=np.uint64))
