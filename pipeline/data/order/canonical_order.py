"""The order of a whole run: its inputs, the sample ids of any batch, and a hash to compare orders."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.data.order.hashing import Purpose, draws, key
from pipeline.data.order.mixture import Mixture, plan_epoch
from pipeline.data.order.streams import Layout, StreamOrder, stream_order

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Order:
    """Everything that determines the order of samples, apart from the epoch."""

    mixture: Mixture
    layout: Layout
    seed: int
    shuffle_buffer: int

    def stream(self, *, epoch: int, stream: int) -> StreamOrder:
        """The shuffle of one stream in one epoch."""
        return stream_order(
            seed=self.seed,
            epoch=epoch,
            stream=stream,
            length=self.layout.stream_length,
            buffer=self.shuffle_buffer,
        )


def planned_ids(order: Order, *, epoch: int, first: int, last: int) -> Int64:
    """Sample ids of the batches [first, last) if no sample is corrupt; reads no data.

    Returns:
        Ids in row order, [last - first, B].
    """
    layout = order.layout
    segments = plan_epoch(order.mixture, seed=order.seed, epoch=epoch)
    offsets = np.array(order.mixture.manifest.offsets)
    b, length = layout.rows, layout.stream_length
    ids = np.empty((last - first, layout.streams, b), dtype=np.int64)
    for c in range(layout.streams):
        places = order.stream(epoch=epoch, stream=c).places(first * b, last * b) + c * length
        m = np.searchsorted(segments.position, places, side="right") - 1
        ids[:, c] = (offsets[segments.shard[m]] + segments.start[m] + places - segments.position[m]).reshape(-1, b)
    return ids.reshape(last - first, layout.global_batch)


def order_hash(sample_id: Int64, *, epoch: int, batch: int, first_row: int) -> int:
    """A 64-bit hash of which samples are in which rows; hashes of disjoint rows add up to that of the batch."""
    rows = np.arange(first_row, first_row + len(sample_id), dtype=np.uint64) << np.uint64(40)
    hashes = draws(key(Purpose.ORDER, epoch, batch), rows + sample_id.astype(np.uint64))
    return int(hashes.sum(dtype=np.uint64))
