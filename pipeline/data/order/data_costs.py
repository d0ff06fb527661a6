"""Estimate reading, memory and shuffle quality of a data configuration from its manifest alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.data.data_config import DataConfig
from pipeline.data.order.canonical_order import Layout, Order, make_order, planned_ids
from pipeline.data.shards.storage import SEEKING_PAYS, is_local

SAMPLED_BATCHES = 8


@dataclass(frozen=True)
class DataPlan:
    """Estimates of a run's data; bytes are of the shards as stored."""

    samples: int
    """Distinct samples."""
    shards: int
    bytes: int
    layout: Layout
    ranks: int
    seeks: bool
    """Whether readers seek over the samples that they skip, as in local files with large samples."""
    epoch_bytes: int
    """Read by all ranks in an epoch."""
    passed_samples: int
    """Samples that streams skip because they start in the middle of a shard."""
    passed_bytes: int
    """Bytes of these samples, which are read unless readers seek."""
    resume_bytes: int
    """Read again by all ranks at a resume, on average."""
    buffer_bytes: int
    """Encoded samples in one rank's shuffle buffers, on average."""
    batch_bytes: int
    """Decoded images that one rank's workers keep ready in shared memory."""
    quality: ShuffleQuality


def plan_data(config: DataConfig, *, ranks: int, global_batch: int, image_size: int, seed: int = 0) -> DataPlan:
    """Plan the first epoch of a run.

    Args:
        config: The `data` section.
        ranks: Of the run.
        global_batch: Samples of a batch over all ranks.
        image_size: Side of the decoded images, in pixels.
        seed: Of the order.

    Raises:
        UserError: Data, batch size, streams, ranks and workers do not fit together.
    """
    order = make_order(config, ranks=ranks, global_batch=global_batch, seed=seed)
    layout, manifest = order.layout, order.mixture.manifest
    sample_bytes = manifest.bytes / manifest.n
    seeks = sample_bytes > SEEKING_PAYS and (
        manifest.shards.all_relative or all(is_local(manifest.url(shard)) for shard in manifest.shards)
    )
    passed_samples, passed_bytes = _passed(order)
    buffered = min(config.shuffle_buffer, layout.stream_length)
    reread = (0 if seeks else passed_bytes) + buffered * layout.streams * sample_bytes
    return DataPlan(
        samples=manifest.n,
        shards=len(manifest.shards),
        bytes=manifest.bytes,
        layout=layout,
        ranks=ranks,
        seeks=seeks,
        epoch_bytes=round(layout.samples * sample_bytes) + (0 if seeks else passed_bytes),
        passed_samples=passed_samples,
        passed_bytes=passed_bytes,
        resume_bytes=round(reread),
        buffer_bytes=round(buffered / 2 * layout.streams / ranks * sample_bytes),
        batch_bytes=(config.prefetch + 1) * global_batch // ranks * 3 * image_size**2,
        quality=_quality(order),
    )


def _passed(order: Order) -> tuple[int, int]:
    """Samples and bytes before the streams' first samples, within the same shards."""
    segments = order.epoch_segments(0)
    samples = total = 0
    for c in range(order.layout.streams):
        number, start, _ = segments.locate(c * order.layout.stream_length)
        shard = order.mixture.manifest.shards[number]
        samples += start
        total += shard.bytes * start // shard.samples
    return samples, total


def _quality(order: Order) -> ShuffleQuality:
    """Shuffle quality of a few consecutive batches in the middle of the epoch."""
    steps, manifest = order.layout.steps, order.mixture.manifest
    first = max(0, steps // 2 - SAMPLED_BATCHES // 2)
    ids = planned_ids(order, epoch=0, first=first, last=min(steps, first + SAMPLED_BATCHES))
    return shuffle_quality(ids, offsets=manifest.offsets, samples=manifest.n)


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
        ids: Sample ids of global batches, [batches, B].
        offsets: First id of each shard.
        samples: N, the number of all samples.
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
