"""The sample order as pure functions, and what `neuclip plan` reports about a run's data."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import parse
from pipeline.data.data_config import DataConfig
from pipeline.data.order import mixture as hashes
from pipeline.data.order.canonical_order import Order, StreamOrder, make_layout, make_order, planned_ids, stream_order
from pipeline.data.order.mixture import Purpose, draws, key, make_mixture, plan_epoch
from pipeline.data.shards.manifest_format import make_manifest
from pipeline.errors import UserError
from pipeline.planning.run_plan import host_bytes
from tests.shards import write_shards

GOLDEN = [[0, 2, 1, 14, 22, 21, 23, 6], [3, 15, 4, 16, 5, 8, 7, 9], [17, 18, 20, 19, 10, 11, 12, 13]]


def manifest(sizes, name="a"):
    return make_manifest([(f"{name}{i}.tar", size, 100 * size, f"{name}{i}") for i, size in enumerate(sizes)])


def ids_of(mixture, segments):
    shards, numbers = segments.locate(np.arange(segments.length))
    ids: list[int] = (mixture.manifest.shards.offsets[shards] + numbers).tolist()
    return ids


def test_draws_are_splitmix64():
    """The first outputs of the reference generator with seed 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert draws(1234567, np.arange(4)).tolist() == expected
    assert [hashes.draw(1234567, i) for i in range(4)] == expected
    assert hashes.mix(0) == 0


def test_keys_depend_on_every_part_and_their_order():
    assert len({key(1, 2), key(2, 1), key(1), key(1, 2, 0), key(0, 1, 2), key(-1), key(1, 3)}) == 7
    assert sorted(hashes.permutation(key(3), 1000).tolist()) == list(range(1000))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    length=st.integers(1, 400), buffer=st.integers(1, 500), state=st.integers(0, 2**64 - 1), block=st.integers(1, 200)
)
def test_stream_emits_each_position_once_and_moves_it_less_than_its_buffer(length, buffer, state, block):
    order = StreamOrder(state=state, length=length, buffer=buffer)
    whole = order.places(0, length)
    assert sorted(whole.tolist()) == list(range(length))
    assert np.abs(whole - np.arange(length)).max() < max(1, min(buffer, length))
    small = StreamOrder(state=state, length=length, buffer=buffer)
    small._block = max(block, small.buffer)  # several blocks, requested out of order
    for first in (length // 2, 0, length // 3, length - 1):
        last = min(length, first + 37)
        assert small.places(first, last).tolist() == whole[first:last].tolist()
        start, gone = small.resume(first)
        assert start == whole[first:].min()
        assert gone == {i for i in whole[:first].tolist() if i > start}
    assert small.resume(length) == (length, set())


def test_reader_holds_about_half_a_buffer():
    order = stream_order(seed=0, epoch=0, stream=0, length=20000, buffer=1000)
    whole = order.places(0, 20000)
    read = np.maximum.accumulate(whole) + 1
    kept = (read - np.arange(20000))[2000:18000]
    assert 400 < kept.mean() < 600
    assert kept.max() <= 1000


def test_layout_counts():
    layout = make_layout(samples=103, global_batch=12, streams=4, ranks=2)
    assert (layout.rows, layout.stream_length, layout.steps, layout.dropped) == (3, 25, 8, 7)
    with pytest.raises(UserError, match="An epoch has 11 samples, fewer than the global batch of 12"):
        make_layout(samples=11, global_batch=12, streams=4)
    with pytest.raises(UserError, match="more than 2\\^31 per stream"):
        make_layout(samples=1 << 33, global_batch=12, streams=2)


def test_order_matches_recorded_values():
    """A run that an earlier version started must continue in the same order."""
    mixture = make_mixture([manifest([5, 9, 4, 6])])
    layout = make_layout(samples=24, global_batch=8, streams=2)
    order = Order(mixture=mixture, layout=layout, seed=7, shuffle_buffer=4)
    assert planned_ids(order, epoch=2, first=0, last=3).tolist() == GOLDEN


def listed_epoch(mixture, *, seed, epoch):
    """Return `(shard, first sample, samples)` of every segment of an epoch, in reading order."""
    found: list[tuple[int, int, int]] = []
    samples = [shard.samples for shard in mixture.manifest.shards]
    for source, (low, high) in enumerate(itertools.pairwise(mixture.bounds)):
        sizes, quota = samples[low:high], mixture.quotas[source]
        begin, total, at = epoch * quota, sum(sizes), 0
        first, last = begin // total, (begin + quota - 1) // total
        at = first * total
        for number in range(first, last + 1):
            hashes = draws(key(seed, Purpose.PERMUTE, number, source), np.arange(len(sizes))).tolist()
            for shard in sorted(range(len(sizes)), key=hashes.__getitem__):
                cut = max(begin - at, 0), min(begin + quota - at, sizes[shard])
                if cut[0] < cut[1]:
                    found.append((low + shard, cut[0], cut[1] - cut[0]))
                at += sizes[shard]
    hashes = draws(key(seed, Purpose.INTERLEAVE, epoch), np.arange(len(found))).tolist()
    return [found[i] for i in sorted(range(len(found)), key=hashes.__getitem__)]


def listed_ids(order, *, epoch):
    """Return the sample ids of all batches of an epoch."""
    shards, layout = list(order.mixture.manifest.shards), order.layout
    segments = listed_epoch(order.mixture, seed=order.seed, epoch=epoch)
    stored = [shards[shard].offset + k for shard, first, count in segments for k in range(first, first + count)]
    streams, buffer = [], min(order.shuffle_buffer, layout.stream_length)
    for c in range(layout.streams):
        shifts = draws(key(order.seed, Purpose.SHUFFLE, epoch, c), np.arange(layout.stream_length)) >> np.uint64(32)
        keys = [(i << 32) + int(shift) * buffer for i, shift in enumerate(shifts.tolist())]
        places = sorted(range(layout.stream_length), key=keys.__getitem__)
        streams.append([stored[c * layout.stream_length + place] for place in places])
    b = layout.rows
    return [[i for stream in streams for i in stream[t * b : (t + 1) * b]] for t in range(layout.steps)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=9), min_size=1, max_size=3),
    weights=st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0]), min_size=3, max_size=3),
    streams=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
    buffer=st.integers(1, 30),
)
def test_order_matches_the_list_reference(sizes, weights, streams, seed, epoch, buffer):
    sources = [manifest(part, name=str(number)) for number, part in enumerate(sizes)]
    mixture = make_mixture(sources, weights=weights[: len(sources)])
    if mixture.epoch_samples < streams:
        return
    layout = make_layout(samples=mixture.epoch_samples, global_batch=streams, streams=streams)
    order = Order(mixture=mixture, layout=layout, seed=seed, shuffle_buffer=buffer)
    expected = listed_ids(order, epoch=epoch)
    assert planned_ids(order, epoch=epoch, first=0, last=layout.steps).tolist() == expected


@pytest.mark.parametrize(("weight", "epochs", "times"), [(0.5, 2, 1), (0.25, 4, 1), (2.0, 1, 2), (1.5, 2, 3)])
def test_weight_is_the_number_of_passes_over_a_source(weight, epochs, times):
    """Over enough epochs, samples of the weighted source are seen equally often, other samples once per epoch."""
    mixture = make_mixture([manifest([8, 4, 8], "a"), manifest([7, 5], "b")], weights=[weight, 1.0])
    assert mixture.quotas == (int(20 * weight), 12)
    seen: Counter[int] = Counter()
    for epoch in range(epochs):
        ids = ids_of(mixture, plan_epoch(mixture, seed=3, epoch=epoch))
        assert len(ids) == mixture.epoch_samples
        low, high = int(weight), -(-int(20 * weight) // 20)
        counted = Counter(i for i in ids if i < 20)
        assert {counted[i] for i in range(20)} <= set(range(low, high + 2))
        seen.update(ids)
    assert {seen[i] for i in range(20)} == {times}
    assert {seen[i] for i in range(20, 32)} == {epochs}


def test_config_accepts_paths_and_refuses_invalid_values():
    one = parse(DataConfig, {"sources": "x"})
    assert [(s.manifest, s.weight) for s in one.sources] == [("x", 1.0)]
    two = parse(DataConfig, {"sources": ["x", {"manifest": "y", "weight": 0.5}]})
    assert [(s.manifest, s.weight) for s in two.sources] == [("x", 1.0), ("y", 0.5)]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"sources": []}, "sources"),
        ({"sources": ["x", "x"]}, "listed twice"),
        ({"sources": "x", "streams": 0}, "streams"),
        ({"sources": "x", "crop": {"scale": [0.9, 0.1]}}, "0 < low <= high <= 1"),
        ({"sources": "x", "decoding": "cv2"}, "decoding"),
        ({}, "data.sources is required"),
    ]
    for tree, message in bad:
        with pytest.raises(UserError, match=message):
            parse(DataConfig, tree, prefix="data")


def test_plan_counts_match_the_manifest(tmp_path):
    manifest = write_shards(tmp_path, [20, 12, 16, 24])
    config = parse(DataConfig, {"sources": str(tmp_path), "streams": 4, "shuffle_buffer": 6, "workers": 2})
    order = make_order(config, ranks=2, global_batch=8, seed=0)
    assert (order.mixture.manifest.n, order.layout.steps, order.layout.dropped) == (72, 9, 0)
    buffers, batches = host_bytes(config, order, ranks=2, image_size=10)
    assert buffers == pytest.approx(3 * 2 * manifest.bytes / 72, abs=1)
    assert batches == (2 + 3) * 4 * 300
    with pytest.raises(UserError, match="is not divisible by 3 ranks"):
        make_order(config, ranks=3, global_batch=8, seed=0)
