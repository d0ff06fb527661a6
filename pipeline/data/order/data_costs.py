"""Estimate reading, memory and shuffle quality of a data configuration from its manifest alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.data.data_config import MOST_WORKERS, DataConfig
from pipeline.data.order.canonical_order import Order, planned_ids
from pipeline.data.order.mixture import Mixture, load_mixture, shared_epoch
from pipeline.data.order.shuffle_quality import ShuffleQuality, shuffle_quality
from pipeline.data.order.streams import Layout, make_layout
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
    workers: int
    """Per rank; no more than the rank has streams."""
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
        config: the `data` section.
        ranks: of the run.
        global_batch: samples of a batch over all ranks.
        image_size: side of the decoded images, in pixels.
        seed: of the order.

    Raises:
        UserError: data, batch size, streams, ranks and workers do not fit together.
    """
    mixture = load_mixture(config)
    layout = make_layout(
        samples=mixture.epoch_samples,
        global_batch=global_batch,
        streams=config.streams,
        ranks=ranks,
    )
    manifest = mixture.manifest
    order = Order(mixture=mixture, layout=layout, seed=seed, shuffle_buffer=config.shuffle_buffer)
    sample_bytes = manifest.bytes / manifest.n
    seeks = sample_bytes > SEEKING_PAYS and (
        manifest.shards.all_relative or all(is_local(manifest.url(shard)) for shard in manifest.shards)
    )
    passed_samples, passed_bytes = _passed(mixture, layout, seed=seed)
    buffered = min(config.shuffle_buffer, layout.stream_length)
    reread = (0 if seeks else passed_bytes) + buffered * layout.streams * sample_bytes
    return DataPlan(
        samples=manifest.n,
        shards=len(manifest.shards),
        bytes=manifest.bytes,
        layout=layout,
        ranks=ranks,
        workers=min(MOST_WORKERS if config.workers is None else config.workers, layout.streams // ranks),
        seeks=seeks,
        epoch_bytes=round(layout.samples * sample_bytes) + (0 if seeks else passed_bytes),
        passed_samples=passed_samples,
        passed_bytes=passed_bytes,
        resume_bytes=round(reread),
        buffer_bytes=round(buffered / 2 * layout.streams / ranks * sample_bytes),
        batch_bytes=(config.prefetch + 1) * global_batch // ranks * 3 * image_size**2,
        quality=_quality(order),
    )


def _passed(mixture: Mixture, layout: Layout, *, seed: int) -> tuple[int, int]:
    """Samples and bytes before the streams' first samples, within the same shards."""
    segments = shared_epoch(mixture, seed=seed, epoch=0)
    samples = total = 0
    for c in range(layout.streams):
        number, start, _ = segments.locate(c * layout.stream_length)
        shard = mixture.manifest.shards[number]
        samples += start
        total += shard.bytes * start // shard.samples
    return samples, total


def _quality(order: Order) -> ShuffleQuality:
    """Shuffle quality of a few consecutive batches in the middle of the epoch."""
    steps, manifest = order.layout.steps, order.mixture.manifest
    first = max(0, steps // 2 - SAMPLED_BATCHES // 2)
    ids = planned_ids(order, epoch=0, first=first, last=min(steps, first + SAMPLED_BATCHES))
    return shuffle_quality(np.asarray(ids), offsets=manifest.offsets, samples=manifest.n)
