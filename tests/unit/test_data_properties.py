"""Property tests over layouts, corrupt samples and resume points: sample order, and each sample once."""

from __future__ import annotations

import json
import statistics
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.data.order.canonical_order import planned_ids
from pipeline.data.order.mixture import order_hash
from pipeline.distributed.world import World
from pipeline.errors import UserError
from tests.shards import jpeg, open_loader, write_shards

BROKEN: dict[str, dict[str, bytes]] = {
    "image is missing": {"txt": b"caption 1"},
    "image cannot be decoded": {"jpg": jpeg(0)[:200], "txt": b"caption 1"},
    "caption is missing": {"jpg": jpeg(0)},
    "caption is empty": {"jpg": jpeg(0), "txt": b" \n"},
    "caption is not UTF-8": {"jpg": jpeg(0), "txt": b"caf\xe9 1"},
}


@st.composite
def cases(draw):
    """Draw shards, a layout, broken samples (at most a tenth) and a batch to resume at."""
    streams = draw(st.sampled_from([1, 2, 3, 4, 6]))
    rows = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 17), min_size=1, max_size=8).filter(lambda s: sum(s) >= 2 * streams * rows))
    n = sum(sizes)
    broken = draw(st.dictionaries(st.integers(0, n - 1), st.sampled_from(sorted(BROKEN)), max_size=max(1, n // 10)))
    divisors = [k for k in range(1, streams + 1) if streams % k == 0]
    return {
        "sizes": sizes,
        "broken": broken,
        "batch": streams * rows,
        "options": {"streams": streams, "shuffle_buffer": draw(st.integers(1, 30)), "corrupt_limit": 1.0},
        "ranks": draw(st.sampled_from(divisors)),
        "stop": draw(st.integers(0, 12)),
    }


def rows_of(group, steps):
    """The id, and the sum of the pixels, of every row."""
    batches = [[next(one) for one in group] for _ in range(steps)]
    return [
        [row for one in ranks for row in zip(one.sample_id.tolist(), one.image.sum((1, 2, 3)).tolist(), strict=True)]
        for ranks in batches
    ]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(case=cases())
def test_order_resume_and_counts(case, tmp_path_factory):
    folder = tmp_path_factory.mktemp("case")
    write_shards(folder, case["sizes"], replace={i: BROKEN[reason] for i, reason in case["broken"].items()})
    options, batch = case["options"], case["batch"]
    whole = open_loader(folder, batch=batch, **options)
    steps = whole.steps_per_epoch
    first_epoch = rows_of([whole], steps)
    _check_counts([[i for i, _ in batch] for batch in first_epoch], whole, case["broken"])

    # Resume at any batch on another number of ranks, from the state of a single rank.
    total = steps + 3
    expected = first_epoch + rows_of([whole], total - steps)
    stop = min(case["stop"], total)
    writer = open_loader(folder, batch=batch, **options)
    rows_of([writer], stop)
    state = json.loads(json.dumps(writer.state_dict()))
    group = [
        open_loader(folder, world=World(rank=k, size=case["ranks"]), batch=batch, **options)
        for k in range(case["ranks"])
    ]
    for one in group:
        one.load_state_dict(state)
    assert rows_of(group, total - stop) == expected[stop:]
    assert sum((one.position.corrupt for one in group), Counter()) == whole.position.corrupt
    assert sum(one.position.order_hash for one in group) % 2**64 == whole.position.order_hash


def _check_counts(batches, whole, broken):
    order = whole._dataset.order
    planned = planned_ids(order, epoch=0, first=0, last=len(batches)).ravel().tolist()
    assert len(set(planned)) == len(planned) == whole.n - whole.layout.dropped
    assert whole.layout.dropped < whole.layout.global_batch
    bad = [i for i in planned if i in broken]
    shown = Counter(i for batch in batches for i in batch)
    assert not set(shown) & set(broken), "a corrupt sample was shown"
    assert {i for i in planned if i not in broken} <= set(shown), "a good sample was left out"
    for nominal, found in zip(planned, [i for batch in batches for i in batch], strict=True):
        assert nominal == found or nominal in broken, "a good sample is not in its planned row"
    report = whole.report()
    hashes = [order_hash(np.array(ids), epoch=0, batch=t, first_row=0) for t, ids in enumerate(batches)]
    assert report.order_hash == f"{sum(hashes) % 2**64:016x}"
    assert report.replaced == len(bad) == sum(shown.values()) - sum(1 for i in planned if i not in broken)
    assert report.corrupt_by_reason == Counter(broken[i] for i in bad)
    assert report.samples == report.planned_samples == len(planned)
    assert report.dropped == whole.n - len(planned)


def test_substitutes_are_never_from_the_same_batch(tmp_path):
    sizes = [50] * 12
    broken = dict.fromkeys(range(0, 600, 5), BROKEN["image cannot be decoded"])
    write_shards(tmp_path, sizes, replace=broken)
    one = open_loader(tmp_path, batch=24, streams=4, shuffle_buffer=20, corrupt_limit=0.5)
    repeats: list[int] = []
    last_seen: dict[int, int] = {}
    for t in range(one.steps_per_epoch):
        batch = next(one).sample_id.tolist()
        assert len(set(batch)) == 24
        repeats += [t - last_seen[i] for i in batch if i in last_seen]
        last_seen |= dict.fromkeys(batch, t)
    assert 90 < len(repeats) <= 120
    assert statistics.median(repeats) <= 8, "substitutes must come from nearby batches"


def test_every_time_that_a_sample_is_shown_it_gets_another_crop(tmp_path):
    write_shards(tmp_path, [8])
    source = [{"manifest": str(tmp_path), "weight": 2}]
    one = open_loader(tmp_path, batch=16, streams=1, crop={"scale": [0.2, 1.0]}, sources=source)
    batch = next(one)
    assert one.steps_per_epoch == 1
    order = batch.sample_id.argsort(stable=True)
    again = next(one)  # the next epoch
    later = again.image[again.sample_id.argsort(stable=True)[::2]]
    first, second = batch.image[order[::2]], batch.image[order[1::2]]
    for a, b in ((first, second), (first, later)):
        assert (a != b).flatten(1).any(dim=1).all()


def test_captions_of_a_json_list_are_redrawn_every_epoch(tmp_path):
    """The first token of `count_tokens` is the caption's number."""
    body = json.dumps({"all": ["caption 1", "caption 2", "caption 3", "", 7], "one": "caption 4"}).encode()
    write_shards(tmp_path, [24], replace={i: {"jpg": jpeg(i), "json": body} for i in range(24)})

    def start(caption):
        return open_loader(tmp_path, batch=24, streams=1, caption=caption)

    one = start("json:all")
    first, second = next(one), next(one)
    assert set(first.text[:, 0].tolist()) == {1, 2, 3}
    a, b = (batch.text[batch.sample_id.argsort(), 0] for batch in (first, second))
    assert 0 < (a != b).sum() < 24
    assert torch.equal(next(start("json:all")).text, first.text)
    assert set(next(start("json:one")).text[:, 0].tolist()) == {4}
    with pytest.raises(UserError, match=r"no readable sample .*caption is missing \(\d+\)"):
        next(start("json:none"))
    with pytest.raises(UserError, match="caption"):
        start("json:")


@pytest.mark.parametrize("workers", [0, 1])
def test_sources_may_store_captions_differently(tmp_path, workers):
    """Sample i has caption i in the first source (text file) and caption 100 + i in the second (JSON field)."""
    write_shards(tmp_path / "a", [8])
    bodies = {i: {"jpg": jpeg(i), "json": json.dumps({"title": f"caption {108 + i}"}).encode()} for i in range(8)}
    write_shards(tmp_path / "b", [5, 3], replace=bodies)
    sources = [str(tmp_path / "a"), {"manifest": str(tmp_path / "b"), "caption": "json:title"}]
    with open_loader(tmp_path, batch=16, streams=2, sources=sources, workers=workers) as one:
        batch = next(one)
    expected = {i: i if i < 8 else 100 + i for i in range(16)}
    assert dict(zip(batch.sample_id.tolist(), batch.text[:, 0].tolist(), strict=True)) == expected
    with pytest.raises(UserError, match="caption"):
        open_loader(tmp_path, batch=16, streams=2, sources=[{**sources[1], "caption": "json:"}])
