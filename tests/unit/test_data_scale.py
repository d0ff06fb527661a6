"""Large manifests: arrays are shared by a node's processes, and the order is the same as from a list of shards."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import parse
from pipeline.data.data_config import DataConfig
from pipeline.data.loading.loader import build_loader
from pipeline.data.order import mixture as mixtures
from pipeline.data.order.canonical_order import Order, make_layout, planned_ids
from pipeline.data.order.hashing import Purpose, draws, key
from pipeline.data.order.mixture import Mixture, load_mixture, make_mixture, plan_epoch, shared_epoch
from pipeline.data.shards import manifest_format, shard_table
from pipeline.data.shards.manifest_format import MANIFEST_NAME, load_manifest, make_manifest
from pipeline.data.shards.shard_table import Arrays, shared
from pipeline.distributed.world import World
from pipeline.errors import UserError
from tests.shards import count_tokens, write_shards


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate node cache, used for every manifest, however small."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    monkeypatch.setattr(manifest_format, "SHARED_BYTES", 0)
    monkeypatch.setattr(mixtures, "SHARED_SHARDS", 0)
    (tmp_path / "t").mkdir()  # short: sockets have names of 108 characters at most
    return tmp_path / "t" / f"neuclip-{os.getuid()}"


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
def test_order_matches_the_list_reference(
    sizes: list[list[int]], weights: list[float], streams: int, seed: int, epoch: int, buffer: int
) -> None:
    sources = [make_manifest(rows(part, name=str(number))) for number, part in enumerate(sizes)]
    mixture = make_mixture(sources, weights=weights[: len(sources)])
    if mixture.epoch_samples < streams:
        return
    layout = make_layout(samples=mixture.epoch_samples, global_batch=streams, streams=streams)
    order = Order(mixture=mixture, layout=layout, seed=seed, shuffle_buffer=buffer)
    expected = listed_ids(order, epoch=epoch)
    assert planned_ids(order, epoch=epoch, first=0, last=layout.steps).tolist() == expected
    half = range(streams // 2, streams)
    part = planned_ids(order, epoch=epoch, first=0, last=layout.steps, streams=half).tolist()
    assert part == [batch[half.start :] for batch in expected]


def test_shared_manifest_equals_one_in_memory(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"source": "[] x", "n": 3}
    written = make_manifest(rows([3, 1, 4]), root=tmp_path, failures={"dns": 2}, facts=facts)
    written.save(tmp_path)
    stored = load_manifest(tmp_path)
    assert len(list(cache.glob("manifest-*/*/name.npy"))) == 1
    assert stored == written
    assert list(stored.shards) == list(written.shards)
    assert [stored.shards[i] for i in (0, 1, -1)] == list(written.shards)
    assert tuple(stored.shards)[1:] == tuple(written.shards)[1:]
    assert (stored.n, stored.bytes, stored.attempted, stored.digest) == (8, 800, 10, written.digest)
    assert [stored.locate(i)[1] for i in range(8)] == [0, 1, 2, 0, 0, 1, 2, 3]
    assert (stored.failures, stored.facts) == ({"dns": 2}, facts)
    monkeypatch.setattr(manifest_format, "_read", lambda path: pytest.fail("it was parsed again"))
    assert load_manifest(tmp_path / MANIFEST_NAME) == written


def test_replaced_manifest_is_read_again(tmp_path: Path, cache: Path) -> None:
    for sizes in ([3, 1], [3, 2], [7]):
        make_manifest(rows(sizes)).save(tmp_path)
        assert load_manifest(tmp_path).shards.samples.tolist() == sizes
    assert len(list(cache.glob("manifest-*/*/name.npy"))) == shard_table.KEPT_VERSIONS


def test_a_damaged_manifest_is_refused_and_not_stored(tmp_path: Path, cache: Path) -> None:
    make_manifest(rows([3, 1])).save(tmp_path)
    path = tmp_path / MANIFEST_NAME
    for old, new, message in [
        ('"samples": 3', '"samples": 2', "contradicts itself"),
        ('"samples": 3', '"samples": 0', "1 are empty"),
        ('"version": 1', '"version": 2', "version 2"),
        ('"sha256"', '"md5"', "it lacks 'sha256'"),
        ("\n ]\n}", "", "is damaged"),
    ]:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(UserError, match=message):
            load_manifest(tmp_path)
        path.write_text(text)
    assert not list(cache.glob("**/*.npy"))


def test_stored_table_is_pickled_as_a_path(tmp_path: Path, cache: Path) -> None:
    make_manifest(rows(list(range(1, 2000)))).save(tmp_path)
    mixture = load_mixture(parse(DataConfig, {"sources": str(tmp_path)}))
    sent = pickle.dumps(mixture)
    assert len(sent) < 2000
    assert pickle.loads(sent) == mixture
    for path in cache.glob("manifest-*/*"):
        os.rename(path, tmp_path / "elsewhere") if path.is_dir() else None
    copied = pickle.loads(pickle.dumps(mixture))
    assert copied == mixture, "without the files, the arrays themselves are sent"


def test_joined_sources_and_epochs_are_shared(tmp_path: Path, cache: Path) -> None:
    for name, sizes in (("one", [3, 1, 4]), ("two", [2, 2])):
        (tmp_path / name).mkdir()
        make_manifest(rows(sizes)).save(tmp_path / name)
    joined = load_mixture(parse(DataConfig, {"sources": [str(tmp_path / "one"), str(tmp_path / "two")]}))
    assert [shard.name for shard in joined.manifest.shards][3] == str(tmp_path / "two" / "a/000é.tar")
    assert joined.manifest.shards.offsets.tolist() == [0, 3, 4, 8, 10]
    places = np.arange(12)
    for epoch in range(4):
        stored, plan = (function(joined, seed=1, epoch=epoch) for function in (shared_epoch, plan_epoch))
        assert [each.tolist() for each in stored.locate(places)] == [each.tolist() for each in plan.locate(places)]
    assert len(list(cache.glob("mixture-*/*/name.npy"))) == 1
    assert sorted(path.parent.name for path in cache.glob("epochs-*/*/shard.npy")) == ["2", "3"]


def test_workers_read_a_shared_manifest(tmp_path: Path, cache: Path) -> None:
    write_shards(tmp_path, [7, 13, 5, 11])
    config = parse(DataConfig, {"sources": str(tmp_path), "streams": 4, "shuffle_buffer": 5, "workers": 2})

    def batches() -> list[torch.Tensor]:
        with build_loader(
            config, world=World(), global_batch=8, seed=3, image_size=16, tokenize=count_tokens
        ) as loader:
            return [next(loader).sample_id for _ in range(9)]

    found = batches()
    assert cache.exists()
    order = Order(
        mixture=load_mixture(config),
        layout=make_layout(samples=36, global_batch=8, streams=4),
        seed=3,
        shuffle_buffer=5,
    )
    expected = [planned_ids(order, epoch=e, first=0, last=4) for e in range(3)]
    assert torch.stack(found).tolist() == np.concatenate(expected)[:9].tolist()


def compute_shared(folder: str, barrier: Any) -> None:
    """Run in a separate process and leave a file each time the arrays are computed."""
    tempfile.tempdir = folder

    def make() -> Arrays:
        (Path(folder) / f"made-{os.getpid()}").touch()
        return Arrays({"x": np.arange(5)}, {"y": 1})

    barrier.wait()
    found = shared("topic", "version", make)
    assert (found.arrays["x"].tolist(), found.facts) == ([0, 1, 2, 3, 4], {"y": 1})


def test_only_one_process_computes_the_shared_arrays(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    processes = [context.Process(target=compute_shared, args=(str(tmp_path), barrier)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(list(tmp_path.glob("made-*"))) == 1


def test_without_a_private_folder_nothing_is_stored(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    found = shared("topic", "version", lambda: Arrays({"x": np.arange(3)}))
    assert found.folder is None
    assert found.arrays["x"].tolist() == [0, 1, 2]
    assert "only this user can write to" in caplog.text
    assert not list(cache.iterdir())


def test_topics_unused_for_a_week_are_deleted(cache: Path) -> None:
    def use(topic: str) -> Path:
        folder = shared(topic, "1", lambda: Arrays({"x": np.arange(3)})).folder
        assert folder is not None
        return folder

    old, recent = use("old"), use("recent")
    os.utime(old.parent, (0, 0))
    use("new")
    assert (old.exists(), recent.exists()) == (False, True)


@pytest.mark.parametrize("block", [1, 3, 10**6])
@pytest.mark.parametrize("count", [1, 5])
def test_manifests_are_written_like_json_and_read_in_any_order_of_keys(
    block: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_table, "_BLOCK", block)
    facts = {"a": {"b": [1, 2.5, None], "c": '[] é "quoted"'}, "empty": {}, "offset": 3}
    manifest = make_manifest([*rows([3] * count), ("b", 2, 5, "")], root=tmp_path, facts=facts)
    path = manifest.save(tmp_path)
    tree = json.loads(path.read_text())
    assert path.read_text() == json.dumps(tree, indent=1) + "\n"
    assert tree["shards"] == [asdict(shard) for shard in manifest.shards]
    path.write_text(json.dumps(dict(reversed(tree.items())), ensure_ascii=False))
    assert load_manifest(path) == manifest
    make_manifest([]).save(tmp_path)
    assert path.read_text() == json.dumps(json.loads(path.read_text()), indent=1) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "is not a manifest") for text in ("", "[]", "{", '{"a" 1}', '{"shards": [1, 2', "a", "[" * 10**5)),
        ('{"format": "neuclip-manifest", "version": 1, "shards": [{}]}', "lacks 'name'"),
        ('{"format": "neuclip-manifest", "version": 1, "shards": 3}', "is damaged"),
    ],
)
def test_what_is_no_manifest_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(UserError, match=message):
        load_manifest(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"a/000', '"' + "a" * 5000 + "/000"),
        ('"a/000', '3, "x": "'),
        ('"samples": 3,\n   "b', '"samples": "3",\n   "b'),
    ],
)
def test_values_of_a_wrong_kind_are_refused(old: str, new: str, tmp_path: Path) -> None:
    path = make_manifest(rows([3])).save(tmp_path)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=r"manifest .*(is damaged|4,096 bytes)"):
        load_manifest(tmp_path)
