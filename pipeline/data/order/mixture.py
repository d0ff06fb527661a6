"""One or several sources under one numbering of samples, and which samples of them an epoch shows."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.data.data_config import DataConfig
from pipeline.data.order.hashing import Purpose, key, permutation
from pipeline.data.shards.manifest_format import Manifest, load_manifest, make_manifest

Int64 = NDArray[np.int64]


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
