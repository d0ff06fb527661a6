"""The canonical order of samples: which sample is in which row of which global batch, as a pure function.

Shape legend: n samples in an epoch, B global batch, C streams, b = B / C rows per stream and batch, L = n // C samples
per stream, T = L // b steps per epoch, S shuffle buffer. A *place* is an index into a stream before its shuffle, a
*turn* an index after it: batch t consists of turns [t b, (t + 1) b) of every stream. Stream c reads samples
[c L, (c + 1) L) of the epoch, which may begin and end inside a shard, and fills rows [c b, (c + 1) b) of every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.data_config import DataConfig
from pipeline.data.order.mixture import Mixture, Purpose, Segments, draws, key, load_mixture, plan_epoch
from pipeline.errors import UserError
from pipeline.registries import Registry

Int64 = NDArray[np.int64]
BLOCK = 1024
"""Places whose keys are sorted at a time; without influence on the order."""
CANONICAL = "canonical"


@dataclass(frozen=True)
class Layout:
    """The sizes of an epoch, of which fewer than B samples are dropped."""

    samples: int
    global_batch: int
    streams: int

    @cached_property
    def rows(self) -> int:
        """b: rows of a global batch that one stream fills."""
        return self.global_batch // self.streams

    @cached_property
    def stream_length(self) -> int:
        """L: samples of one stream."""
        return self.samples // self.streams

    @cached_property
    def steps(self) -> int:
        """T: global batches in an epoch."""
        return self.stream_length // self.rows

    @cached_property
    def dropped(self) -> int:
        """Samples of an epoch that are in no batch."""
        return self.samples - self.steps * self.global_batch


def make_layout(*, samples: int, global_batch: int, streams: int, ranks: int = 1) -> Layout:
    """The sizes of an epoch; UserError if the numbers do not fit together."""
    if global_batch % streams:
        divisors = [d for d in range(1, global_batch + 1) if global_batch % d == 0]
        below, above = [d for d in divisors if d < streams][-1], [d for d in divisors if d > streams][:1]
        raise UserError(
            f"The global batch of {global_batch} is not divisible by data.streams = {streams}: every stream fills the "
            f"same number of rows. The nearest numbers of streams that divide {global_batch} are "
            f"{' or '.join(map(str, [below, *above]))}."
        )
    if streams % ranks:
        raise UserError(
            f"data.streams = {streams} is not divisible by {ranks} ranks: every rank owns the same number of streams. "
            f"Use a number of ranks that divides {streams}, or, in a new run, a multiple of {ranks} as data.streams."
        )
    if samples < global_batch:
        raise UserError(
            f"An epoch has {samples} samples, fewer than the global batch of {global_batch} that a step reads. Use a "
            "smaller batch_size, or more data."
        )
    if samples // streams + 1 >= 1 << 31:
        raise UserError(
            f"{samples} samples in {streams} streams are more than 2^31 per stream: use {(samples >> 30) + 1} or more "
            "streams."
        )
    return Layout(samples=samples, global_batch=global_batch, streams=streams)


def default_streams(global_batch: int) -> int:
    """The largest number of streams up to 64 that divides a batch: `data.streams` where it is not given."""
    return next(streams for streams in range(64, 0, -1) if global_batch % streams == 0)


class StreamOrder:
    """The shuffle of one stream in one epoch: places are sorted by `i + S u_i`, where u_i is a hash in [0, 1).

    A place moves by less than S in either direction. So any range of turns can be computed from about 2 S + range
    places, and a reader that goes through the places in order keeps about S / 2 of them in memory.
    """

    def __init__(self, *, state: int, length: int, buffer: int) -> None:
        self.length, self.buffer = length, min(buffer, length)
        self._state = state
        self._block = max(BLOCK, self.buffer)
        self._cached: tuple[int, int, Int64] = (-1, 0, np.empty(0, dtype=np.int64))

    def places(self, first: int, last: int) -> Int64:
        """The places at turns [first, last), in the order of turns."""
        first, last = max(first, 0), min(last, self.length)
        pieces = [np.empty(0, dtype=np.int64)]
        block = first // self._block  # at most x places have a key below x: the first turn is in this block or later
        if self._cached[1] <= first:
            block = max(block, self._cached[0])
        turn = first
        while turn < last:
            start, members = self._sorted_block(block)
            if turn < start + len(members):
                piece = members[turn - start : last - start]
                pieces.append(piece)
                turn += len(piece)
            block += 1
        return np.concatenate(pieces)

    def resume(self, turn: int) -> tuple[int, set[int]]:
        """Where a reader resumes at `turn`: the first place whose turn has not come, and later ones whose turn has."""
        if turn >= self.length:
            return self.length, set()
        first = int(self.places(turn, turn + 2 * self.buffer + 1).min())
        recent = self.places(turn - 2 * self.buffer, turn)
        return first, set(recent[recent > first].tolist())

    def _sorted_block(self, block: int) -> tuple[int, Int64]:
        """The first turn whose key is in block number `block`, and the places of the block, sorted by key."""
        if self._cached[0] != block:
            low, high = block * self._block, (block + 1) * self._block
            first, last = max(0, low - self.buffer), min(self.length, high)
            # In units of 2^-32 places: exact integers, equal on every machine.
            places = np.arange(first, last)
            shift = (draws(self._state, places) >> np.uint64(32)) * np.uint64(self.buffer)
            keys = (places.astype(np.uint64) << np.uint64(32)) + shift
            below = keys < np.uint64(low << 32)
            inside = np.flatnonzero(~below & (keys < np.uint64(high << 32)))
            ordered = inside[np.argsort(keys[inside], kind="stable")]
            self._cached = (block, first + int(below.sum()), ordered + first)
        return self._cached[1:]


def stream_order(*, seed: int, epoch: int, stream: int, length: int, buffer: int) -> StreamOrder:
    """The shuffle of stream number `stream` in an epoch, of its L = `length` samples with a shuffle buffer S."""
    return StreamOrder(state=key(seed, Purpose.SHUFFLE, epoch, stream), length=length, buffer=buffer)


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
        """The `mixture.epoch_samples` of an epoch in reading order, of which stream c reads `[c L, (c + 1) L)`."""
        return plan_epoch(self.mixture, seed=self.seed, epoch=epoch)

    def stream(self, *, epoch: int, stream: int) -> StreamOrder:
        """The shuffle of one stream in one epoch."""
        buffer, length = self.shuffle_buffer, self.layout.stream_length
        return stream_order(seed=self.seed, epoch=epoch, stream=stream, length=length, buffer=buffer)

    def epoch_segments(self, epoch: int) -> Segments:
        """`segments`; UserError if what another order returns is not `mixture.epoch_samples` samples that exist."""
        whole, sizes = self.segments(epoch), self.mixture.sizes
        if type(self).segments is not Order.segments:
            counts = np.diff(whole.position, append=whole.length)
            known = len(whole.shard) > 0 and 0 <= whole.shard.min() <= whole.shard.max() < len(sizes)
            exist = known and bool(((whole.start >= 0) & (whole.start + counts <= sizes[whole.shard])).all())
            if not exist or (counts < 1).any() or int(counts.sum()) != self.mixture.epoch_samples:
                raise UserError(
                    f"data.order = {self.name!r}: segments({epoch}) gave {int(counts.sum()):,} samples in "
                    f"{len(counts):,} segments. They must be the {self.mixture.epoch_samples:,} of an epoch, in "
                    f"segments that begin and end within the {len(sizes):,} shards."
                )
        return whole

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the order of samples, as plain values by the names of the settings."""
        return {
            "data.order": self.name,
            "seed": self.seed,
            "global batch": self.layout.global_batch,
            "data.streams": self.layout.streams,
            "data.shuffle_buffer": self.shuffle_buffer,
            "weights": list(self.mixture.weights),
            "contents of the shards": list(self.mixture.digests),
        }


def make_order(config: DataConfig, *, ranks: int, global_batch: int, seed: int) -> Order:
    """The order of a run, after reading the manifests; `global_batch` is over all ranks.

    UserError if data, batch size, streams and ranks do not fit together, or there is no such order.
    """
    order, mixture = ORDERS[config.order], load_mixture(config)
    layout = make_layout(samples=mixture.epoch_samples, global_batch=global_batch, streams=config.streams, ranks=ranks)
    return order(mixture, layout, seed, config.shuffle_buffer, config.order)


def planned_ids(order: Order, *, epoch: int, first: int, last: int) -> Int64:
    """Sample ids of an epoch's batches [first, last) in row order, [last - first, B], if no sample is corrupt.

    Reads no data.
    """
    layout, segments, offsets = order.layout, order.epoch_segments(epoch), order.mixture.manifest.shards.offsets
    b, length = layout.rows, layout.stream_length
    ids = np.empty((last - first, layout.streams, b), dtype=np.int64)
    for c in range(layout.streams):
        places = order.stream(epoch=epoch, stream=c).places(first * b, last * b) + c * length
        shards, numbers = segments.locate(places)
        ids[:, c] = (offsets[shards] + numbers).reshape(-1, b)
    return ids.reshape(last - first, layout.global_batch)
