"""Which samples of one or several sources an epoch shows, and the counter-based random numbers that decide it.

Every random choice about data is a hash of named integers, not a generator's state. The hash is SplitMix64's finalizer
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014). It is defined by integer arithmetic
alone, so the order of a run survives new versions of every library.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from pipeline.data.data_config import DataConfig
from pipeline.data.shards.manifest_format import Manifest, load_manifest, make_manifest

Int64 = NDArray[np.int64]
MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """What a number is drawn for; different purposes never share a draw. The values determine the order: keep them."""

    PERMUTE = 1
    INTERLEAVE = 3
    SHUFFLE = 4
    REFILL = 5
    CROP = 6
    ORDER = 7
    PROBE = 8
    CAPTION = 9
    AUGMENT = 12


def mix(x: int) -> int:
    """SplitMix64's finalizer on one 64-bit integer."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def key(*parts: int) -> int:
    """A 64-bit key from any number of integers; their order matters."""
    state = 0
    for part in parts:
        state = mix((state ^ (part & MASK)) + GAMMA)
    return state


def draws(state: int, counters: NDArray[np.integer]) -> NDArray[np.uint64]:
    """The 64-bit draws of key `state` at `counters`, [n] -> [n]; the same counter always gives the same draw."""
    x = counters.astype(np.uint64)
    x = (x + np.uint64(1)) * np.uint64(GAMMA) + np.uint64(state)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(state: int, counter: int) -> int:
    """`draws` for one counter."""
    return mix((counter + 1) * GAMMA + state)


def uniform(state: int, counter: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return (draw(state, counter) >> 11) * 2.0**-53


def permutation(state: int, n: int) -> Int64:
    """A permutation of range(n): the stable argsort of n draws, int64 [n]."""
    return np.argsort(draws(state, np.arange(n)), kind="stable")


def order_hash(sample_id: Int64, *, epoch: int, batch: int, first_row: int) -> int:
    """A 64-bit hash of which samples are in which rows; hashes of disjoint rows add up to that of the batch."""
    rows = np.arange(first_row, first_row + len(sample_id), dtype=np.uint64) << np.uint64(40)
    hashes = draws(key(Purpose.ORDER, epoch, batch), rows + sample_id.astype(np.uint64))
    return int(hashes.sum(dtype=np.uint64))


@dataclass(frozen=True)
class Mixture:
    """Sources as ranges of shards of one manifest."""

    manifest: Manifest
    bounds: tuple[int, ...]
    """Shard numbers at which sources start, and the number of all shards; [sources + 1]."""
    weights: tuple[float, ...]
    """Passes over each source per epoch."""
    digests: tuple[str, ...]
    """Hash of each source's contents, independent of where the shards are stored."""
    folders: tuple[str, ...]
    """The folder of each source's manifest."""

    @property
    def sizes(self) -> Int64:
        """Samples in each shard."""
        return self.manifest.shards.samples

    @functools.cached_property
    def quotas(self) -> tuple[int, ...]:
        """Samples that every epoch takes from each source."""
        ranges = zip(self.bounds[:-1], self.bounds[1:], self.weights, strict=True)
        return tuple(max(1, int(int(self.sizes[a:b].sum()) * weight)) for a, b, weight in ranges)

    @property
    def epoch_samples(self) -> int:
        """Samples in an epoch before the remainder is dropped; `manifest.n` for one source of weight 1."""
        return sum(self.quotas)


@dataclass(frozen=True)
class Segments:
    """The samples of an epoch as m segments of shards, in reading order."""

    shard: Int64
    """Shard number, [m]."""
    start: Int64
    """The segment's first sample within its shard, [m]."""
    position: Int64
    """The segment's first position within the epoch, [m]."""
    length: int
    """Samples of the epoch."""

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        """Shard number, and number in the shard, of the samples at these positions of the epoch, [k] each."""
        m = self.position.searchsorted(positions, side="right") - 1
        return self.shard[m], self.start[m] + positions - self.position[m]


def load_mixture(config: DataConfig) -> Mixture:
    """Read the manifests of a config, see `load_manifest`. Ids of later sources follow those of earlier ones."""
    manifests = [load_manifest(source.manifest, allow_outside=config.allow_outside) for source in config.sources]
    return make_mixture(manifests, weights=[source.weight for source in config.sources])


def make_mixture(manifests: Sequence[Manifest], *, weights: Sequence[float] | None = None) -> Mixture:
    """Join manifests into one numbering of shards and samples; names of shards become absolute if there are several."""
    whole = manifests[0]
    if len(manifests) > 1:
        whole = make_manifest(
            (m.url(s) if ":" in s.name else os.path.abspath(m.url(s)), s.samples, s.bytes, s.sha256)
            for m in manifests
            for s in m.shards
        )
    return Mixture(
        manifest=whole,
        bounds=(0, *np.cumsum([len(manifest.shards) for manifest in manifests]).tolist()),
        weights=tuple(weights or [1.0] * len(manifests)),
        digests=tuple(manifest.shards.content_digest for manifest in manifests),
        folders=tuple(manifest.root for manifest in manifests),
    )


def plan_epoch(mixture: Mixture, *, seed: int, epoch: int) -> Segments:
    """The samples of an epoch in reading order: every source's quota, in segments that are permuted by hash.

    A source is an endless sequence of passes, each a new permutation of its shards. Epoch e takes samples
    `[e q, (e + 1) q)` of that sequence, where q is the quota, so a weight of 0.5 shows the two halves of a pass in two
    epochs.
    """
    parts = [_source_segments(mixture, source=s, seed=seed, epoch=epoch) for s in range(len(mixture.quotas))]
    shard, start, count = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = permutation(key(seed, Purpose.INTERLEAVE, epoch), len(shard))
    shard, start, count = shard[order], start[order], count[order]
    ends = np.cumsum(count)
    return Segments(shard=shard, start=start, position=ends - count, length=int(ends[-1]))


def _source_segments(mixture: Mixture, *, source: int, seed: int, epoch: int) -> tuple[Int64, Int64, Int64]:
    """`(shard, start, count)` of one source's quota in one epoch."""
    low, high = mixture.bounds[source : source + 2]
    sizes, quota = mixture.sizes[low:high], mixture.quotas[source]
    total, begin = int(sizes.sum()), epoch * quota
    first, last = begin // total, (begin + quota - 1) // total
    passes = [permutation(key(seed, Purpose.PERMUTE, p, source), len(sizes)) for p in range(first, last + 1)]
    chosen = np.concatenate(passes)
    counts = sizes[chosen]
    starts = np.cumsum(counts) - counts + first * total
    cut_low = np.clip(begin - starts, 0, counts)
    cut_high = np.clip(begin + quota - starts, 0, counts)
    kept = cut_high > cut_low
    return chosen[kept] + low, cut_low[kept], (cut_high - cut_low)[kept]
