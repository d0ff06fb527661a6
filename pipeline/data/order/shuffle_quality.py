"""How well an order is shuffled, compared with a global shuffle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class ShuffleQuality:
    """Figures of an order; `ideal_` figures are those of a global shuffle of the same data."""

    shards_per_batch: float
    """Mean number of distinct shards in a batch."""
    ideal_shards_per_batch: float
    same_shard_pairs: float
    """Share of the pairs of samples in a batch that come from the same shard."""
    ideal_same_shard_pairs: float


def shuffle_quality(ids: Int64, *, offsets: Int64, samples: int) -> ShuffleQuality:
    """How diverse batches are.

    Args:
        ids: sample ids of global batches, [batches, B].
        offsets: first id of each shard.
        samples: n, the number of all samples.
    """
    shard = np.searchsorted(offsets, ids, side="right") - 1
    batch = ids.shape[1]
    counts = [np.unique(row, return_counts=True)[1] for row in shard]
    share = np.diff(offsets, append=samples) / samples
    pairs = batch * (batch - 1)
    return ShuffleQuality(
        shards_per_batch=float(np.mean([len(c) for c in counts])),
        ideal_shards_per_batch=float((1 - (1 - share) ** batch).sum()),
        same_shard_pairs=float(np.mean([(c * (c - 1)).sum() / pairs for c in counts])) if pairs else 0.0,
        ideal_same_shard_pairs=float((share**2).sum()),
    )


def neighbour_distance(ids: Int64) -> float:
    """Mean distance, in steps, of samples that are stored next to each other, relative to a global shuffle's.

    A global shuffle separates them by a third of all steps on average. 1 is a global shuffle, 0 the order of storage.

    Args:
        ids: sample ids of a whole epoch, [steps, B].
    """
    steps, batch = ids.shape
    order = np.argsort(ids, axis=None, kind="stable")
    stored, step = ids.ravel()[order], order // batch
    adjacent = np.diff(stored) == 1
    return float(np.abs(np.diff(step))[adjacent].mean() / (steps / 3)) if adjacent.any() and steps > 1 else 0.0


def repeats_in_window(ids: Int64, *, window: int) -> float:
    """Share of the samples in a sequence of ids, [n], that also occur among the `window` samples before them."""
    order = np.argsort(ids, kind="stable")
    again = (np.diff(ids[order]) == 0) & (np.diff(order) <= window)
    return float(again.sum() / len(ids))
