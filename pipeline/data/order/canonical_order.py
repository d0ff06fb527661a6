"""The order of a whole run: its inputs, the sample ids of any batch, and a hash to compare orders."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.data.order.hashing import Purpose, draws, key
from pipeline.data.order.mixture import Mixture, shared_epoch
from pipeline.data.order.streams import BLOCK, Layout, StreamOrder, stream_order

Int64 = NDArray[np.int64]
LOOKED_UP = 1024


@dataclass(frozen=True)
class Order:
    """Everything that determines the order of samples, apart from the epoch."""

    mixture: Mixture
    layout: Layout
    seed: int
    shuffle_buffer: int

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


def planned_ids(order: Order, *, epoch: int, first: int, last: int, streams: range | None = None) -> Int64:
    """Sample ids of the batches [first, last) if no sample is corrupt; reads no data.

    Args:
        order: the run's order.
        epoch: number of the epoch.
        first: the first batch.
        last: the batch after the last.
        streams: those whose rows are computed; all by default.

    Returns:
        Ids in row order, [last - first, b len(streams)].
    """
    layout = order.layout
    streams = range(layout.streams) if streams is None else streams
    segments = shared_epoch(order.mixture, seed=order.seed, epoch=epoch)
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
