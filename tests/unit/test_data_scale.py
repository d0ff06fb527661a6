"""Manifests as arrays: the order is the same as from a list of shards."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import parse
from pipeline.data.data_config import DataConfig
from pipeline.data.order.canonical_order import Order, make_layout, planned_ids
from pipeline.data.order.hashing import Purpose, draws, key
from pipeline.data.order.mixture import Mixture, load_mixture, make_mixture
from pipeline.data.shards.manifest_format import load_manifest, make_manifest
from pipeline.errors import UserError


def rows(sizes: list[int], name: str = "a") -> list[tuple[str, int, int, str]]:
    return [(f"{name}/{i:03d}é.tar", size, 100 * size, f"{i:064x}") for i, size in enumerate(sizes)]


# Reference: the order computed from lists of shards, as before manifests became arrays.


def listed_epoch(mixture: Mixture, *, seed: int, epoch: int) -> list[tuple[int, int, int]]:
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


def listed_ids(order: Order, *, epoch: int) -> list[list[int]]:
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
    sources = [make_manifest(rows(part, name=str(number))) for number, part in enumerate(sizes)]
    mixture = make_mixture(sources, weights=weights[: len(sources)])
    if mixture.epoch_samples < streams:
        return
    layout = make_layout(samples=mixture.epoch_samples, global_batch=streams, streams=streams)
    order = Order(mixture=mixture, layout=layout, seed=seed, shuffle_buffer=buffer)
    expected = listed_ids(order, epoch=epoch)
    assert planned_ids(order, epoch=epoch, first=0, last=layout.steps).tolist() == expected


def test_a_manifest_that_was_written_is_read(tmp_path):
    facts = {"source": "[] x", "n": 3}
    written = make_manifest(rows([3, 1, 4]), root=tmp_path, failures={"dns": 2}, facts=facts)
    written.save(tmp_path)
    stored = load_manifest(tmp_path)
    assert list(stored.shards) == list(pickle.loads(pickle.dumps(stored)).shards) == list(written.shards)
    assert [stored.shards[i] for i in (0, 1, -1)] == list(written.shards)
    assert (stored.n, stored.bytes, stored.attempted, stored.digest) == (8, 800, 10, written.digest)
    assert [stored.locate(i)[1] for i in range(8)] == [0, 1, 2, 0, 0, 1, 2, 3]
    assert (stored.failures, stored.facts) == ({"dns": 2}, facts)


def test_joined_sources_have_absolute_names(tmp_path):
    for name, sizes in (("one", [3, 1, 4]), ("two", [2, 2])):
        (tmp_path / name).mkdir()
        make_manifest(rows(sizes)).save(tmp_path / name)
    joined = load_mixture(parse(DataConfig, {"sources": [str(tmp_path / "one"), str(tmp_path / "two")]}))
    assert [shard.name for shard in joined.manifest.shards][3] == str(tmp_path / "two" / "a/000é.tar")
    assert joined.manifest.shards.offsets.tolist() == [0, 3, 4, 8, 10]
    assert joined.folders == (str(tmp_path / "one"), str(tmp_path / "two"))


def test_manifests_are_written_like_json_and_read_in_any_order_of_keys(tmp_path):
    facts = {"a": {"b": [1, 2.5, None], "c": '[] é "quoted"'}, "empty": {}, "offset": 3}
    manifest = make_manifest([*rows([3] * 5), ("b", 2, 5, "")], root=tmp_path, facts=facts)
    path = manifest.save(tmp_path)
    tree = json.loads(path.read_text())
    assert path.read_text() == json.dumps(tree, indent=1) + "\n"
    assert tree["shards"] == [asdict(shard) for shard in manifest.shards]
    path.write_text(json.dumps(dict(reversed(tree.items())), ensure_ascii=False))
    stored = load_manifest(path)
    assert (list(stored.shards), stored.facts) == (list(manifest.shards), facts)
    make_manifest([]).save(tmp_path)
    assert path.read_text() == json.dumps(json.loads(path.read_text()), indent=1) + "\n"


def test_what_is_no_manifest_is_refused(tmp_path):
    path = make_manifest(rows([3, 1])).save(tmp_path)
    text = path.read_text()
    changed = [
        ('"samples": 3', '"samples": 2', "contradicts itself"),
        ('"samples": 3', '"samples": 0', "1 are empty"),
        ('"version": 1', '"version": 2', "version 2"),
        ('"sha256"', '"md5"', "it lacks 'sha256'"),
        ("\n ]\n}", "", "is damaged"),
        ('"a/000', '"' + "a" * 5000 + "/000", "4,096 bytes"),
        ('"a/000', '3, "x": "', "is damaged"),
        ('"samples": 3,\n   "b', '"samples": "3",\n   "b', "is damaged"),
        ('"samples": 3,\n   "b', f'"samples": {2**63},\n   "b', "is damaged"),
    ]
    cases = [(text.replace(old, new, 1), message) for old, new, message in changed]
    cases += [(t, "is not a manifest") for t in ("", "[]", "{", '{"a" 1}', '{"shards": [1, 2', "a", "[" * 10**5)]
    cases += [
        ('{"format": "neuclip-manifest", "version": 1, "shards": [{}]}', "lacks 'name'"),
        ('{"format": "neuclip-manifest", "version": 1, "shards": 3}', "is damaged"),
    ]
    for damaged, message in cases:
        assert damaged != text
        path.write_text(damaged)
        with pytest.raises(UserError, match=message):
            load_manifest(tmp_path)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        path.unlink()
        make(path)
        with pytest.raises(UserError, match=r"cannot be read: not a regular file"):
            load_manifest(tmp_path)
