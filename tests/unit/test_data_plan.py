"""How well the canonical order shuffles, and what `neuclip plan` reports about the data of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.config import parse
from pipeline.data.data_config import DataConfig
from pipeline.data.order.canonical_order import Order, make_layout, planned_ids
from pipeline.data.order.mixture import make_mixture
from pipeline.data.shards.manifest_format import make_manifest
from pipeline.errors import UserError
from pipeline.planning.run_costs import plan_data
from tests.shards import write_shards

SHARDS, SAMPLES, BATCH = 120, 100, 256


def order(*, streams: int = 64, buffer: int = 100, replacement: bool = False) -> Order:
    rows = [(f"{i}.tar", SAMPLES, SAMPLES, str(i)) for i in range(SHARDS)]
    mixture = make_mixture([make_manifest(rows)], replacement=replacement)
    layout = make_layout(samples=mixture.epoch_samples, global_batch=BATCH, streams=streams)
    return Order(mixture=mixture, layout=layout, seed=1, shuffle_buffer=buffer)


def epoch(planned: Order, number: int = 0) -> np.ndarray:
    return planned_ids(planned, epoch=number, first=0, last=planned.layout.steps)


def global_shuffle() -> np.ndarray:
    ids = np.random.default_rng(0).permutation(SHARDS * SAMPLES)
    return ids[: len(ids) // BATCH * BATCH].reshape(-1, BATCH)


def neighbour_distance(ids: np.ndarray) -> float:
    """Mean distance, in steps, of samples that are stored next to each other, relative to a global shuffle's.

    A global shuffle separates them by a third of all steps on average. 1 is a global shuffle, 0 the order of storage.

    Args:
        ids: Sample ids of a whole epoch, [steps, B].
    """
    steps, batch = ids.shape
    order = np.argsort(ids, axis=None, kind="stable")
    stored, step = ids.ravel()[order], order // batch
    adjacent = np.diff(stored) == 1
    return float(np.abs(np.diff(step))[adjacent].mean() / (steps / 3)) if adjacent.any() and steps > 1 else 0.0


def repeats_in_window(ids: np.ndarray, *, window: int) -> float:
    """Share of the samples in a sequence of ids, [n], that also occur among the `window` samples before them."""
    order = np.argsort(ids, kind="stable")
    again = (np.diff(ids[order]) == 0) & (np.diff(order) <= window)
    return float(again.sum() / len(ids))


def quality(ids: np.ndarray) -> tuple[float, float]:
    """Mean number of distinct shards in a batch, and the share of its pairs of samples that have the same shard."""
    counts = [np.unique(row, return_counts=True)[1] for row in ids // SAMPLES]
    return np.mean([len(c) for c in counts]), np.mean([(c * (c - 1)).sum() / (BATCH * (BATCH - 1)) for c in counts])


IDEAL = SHARDS * (1 - (1 - 1 / SHARDS) ** BATCH), 1 / SHARDS
"""Of a global shuffle."""


def test_a_global_shuffle_reaches_the_ideal() -> None:
    ids = global_shuffle()
    assert quality(ids) == (pytest.approx(IDEAL[0], rel=0.02), pytest.approx(IDEAL[1], rel=0.05))
    assert neighbour_distance(ids) == pytest.approx(1.0, abs=0.05)


def test_storage_order_is_recognized() -> None:
    ids = np.arange(SHARDS * SAMPLES)[: 46 * BATCH].reshape(-1, BATCH)
    shards, same = quality(ids)
    assert shards < 4
    assert same > 0.3
    assert neighbour_distance(ids) < 0.01


def test_canonical_streams_are_shuffled_well() -> None:
    """A broken shuffle (one stream, or a buffer of one sample) misses the limits by far."""
    ids = epoch(order())
    shards, same = quality(ids)
    assert shards > 0.75 * IDEAL[0]
    assert same < 2 * IDEAL[1]
    assert neighbour_distance(ids) > 0.25
    for broken, limit in ((order(streams=1), 0.1), (order(buffer=1), 0.05)):
        assert neighbour_distance(epoch(broken)) < limit


def test_more_streams_mix_more_shards() -> None:
    found = [quality(epoch(order(streams=c)))[0] for c in (1, 4, 16, 64)]
    assert found == sorted(found)
    assert found[-1] > 10 * found[0]


def test_batches_of_two_epochs_overlap_only_by_chance() -> None:
    first, second = epoch(order(), 0), epoch(order(), 1)
    partners = [{frozenset((a, b)) for row in ids // SAMPLES for a in set(row) for b in set(row) if a < b}
                for ids in (first[:3], second[:3])]  # fmt: skip
    assert len(partners[0] & partners[1]) < 0.9 * len(partners[0])
    overlap = [len(set(a) & set(b)) for a, b in zip(first, second, strict=True)]
    expected = BATCH**2 / (SHARDS * SAMPLES)
    assert np.mean(overlap) < 2 * expected


def test_repeats_in_window() -> None:
    assert repeats_in_window(np.array([1, 2, 3, 1, 2, 3]), window=2) == 0
    assert repeats_in_window(np.array([1, 2, 3, 1, 2, 3]), window=3) == 0.5
    two = np.concatenate([epoch(order(), e).ravel() for e in (0, 1)])
    n = SHARDS * SAMPLES
    assert repeats_in_window(two[: n // 2], window=n) == 0
    assert repeats_in_window(two, window=n // 10) < 0.01
    drawn = epoch(order(replacement=True)).ravel()
    assert repeats_in_window(drawn, window=n) > 0.2


def test_plan_counts_match_the_manifest(tmp_path: Path) -> None:
    manifest = write_shards(tmp_path, [20, 12, 16, 24])
    config = parse(DataConfig, {"sources": str(tmp_path), "streams": 4, "shuffle_buffer": 6, "workers": 2})
    plan = plan_data(config, ranks=2, global_batch=8, image_size=10)
    mean = manifest.bytes / 72
    assert (plan.samples, plan.shards, plan.layout.steps, plan.layout.dropped) == (72, 4, 9, 0)
    assert plan.buffer_bytes == pytest.approx(3 * 2 * mean, abs=1)
    assert plan.batch_bytes == (2 + 3) * 4 * 300
    with pytest.raises(UserError, match="is not divisible by 3 ranks"):
        plan_data(config, ranks=3, global_batch=8, image_size=10)
