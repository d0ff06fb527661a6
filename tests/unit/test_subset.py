"""Subsets are nested, reproducible, of the right size, and read in bounded memory."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.shard_plan import Subset, hashes, load_plan, make_plan, read_shard
from data_prep.download_config import SourceConfig, SubsetConfig
from pipeline.errors import UserError

NAMES = [f"{k:032x}" for k in range(20_000)]


def members(names, fraction, seed=0):
    mask = Subset(SubsetConfig(fraction=fraction, seed=seed)).mask(names)
    return {name for name, inside in zip(names, mask, strict=True) if inside}


@given(
    small=st.floats(1e-6, 1.0), large=st.floats(1e-6, 1.0), seed=st.integers(0, 2**63 - 1), start=st.integers(0, 19_000)
)
def test_a_larger_subset_contains_a_smaller_one(small, large, seed, start):
    small, large = sorted((small, large))
    names = NAMES[start : start + 300]
    assert members(names, small, seed) <= members(names, large, seed)


@pytest.mark.parametrize("fraction", [0.01, 0.5])
def test_subset_size_matches_the_fraction(fraction):
    expected, spread = fraction * len(NAMES), (fraction * (1 - fraction) * len(NAMES)) ** 0.5
    assert abs(len(members(NAMES, fraction)) - expected) < 5 * spread


def test_hash_values_are_those_of_xxh3():
    """XXH3-64 values that any implementation gives: a subset is the same in ten years and in other languages."""
    assert hashes(["", "a", "http://example.org/cat.jpg"], seed=0).tolist() == HASHES_SEED_0
    assert hashes(["a"], seed=1).tolist() != hashes(["a"], seed=0).tolist()


HASHES_SEED_0 = [3244421341483603138, 16629034431890738719, 15909306776136436135]


def test_uid_index_selects_its_members(tmp_path):
    chosen = sorted(NAMES[::7])
    index = np.array([(int(name[:16], 16), int(name[16:], 16)) for name in chosen], np.dtype("u8,u8"))
    np.save(tmp_path / "index.npy", index)
    subset = Subset(SubsetConfig(index=str(tmp_path / "index.npy")))
    assert [n for n, inside in zip(NAMES, subset.mask(NAMES), strict=True) if inside] == chosen
    for name in ("http://example.org/a.jpg", "0" * 31, "0" * 33, "+" + "0" * 31, ""):
        with pytest.raises(UserError, match="32 hexadecimal digits"):
            subset.mask([name])
    np.savez(tmp_path / "several.npz", index)
    path = tmp_path / "wrong.npy"
    one, several = (tmp_path / "index.npy").read_bytes(), (tmp_path / "several.npz").read_bytes()
    for stored in (np.arange(4), index.astype("f8,f8"), index[::-1], index[:0], index[None], several, several[:200],
                   one[:200], one.replace(b"[", b"N", 1), b""):  # fmt: skip
        path.write_bytes(stored) if isinstance(stored, bytes) else np.save(path, stored)
        with pytest.raises(UserError, match=r"must be the published \.npy file, one sorted array"):
            Subset(SubsetConfig(index=str(path)))


def source_in(folder, rows=1_000):
    columns = {
        "URL": [f"http://example.org/{k}.jpg" for k in range(rows)],
        "TEXT": [None if k == 5 else f'a "cat" \t{k}' for k in range(rows)],
        "uid": NAMES[:rows],
        "score": [k / 7 for k in range(rows)],
    }
    pq.write_table(pa.table(columns), folder / "urls.parquet", row_group_size=64)
    return SourceConfig(table=str(folder / "urls.parquet"), url="URL", caption="TEXT", uid="uid", keep=("score",))


def test_the_plan_contains_exactly_the_members(tmp_path):
    source = source_in(tmp_path)
    folder = Folder(tmp_path / "out")
    folder.make()
    subset = SubsetConfig(fraction=0.25, seed=3)
    plan = make_plan(folder, source, subset, shard_size=30, rules={})
    expected = [name for name in NAMES[:1_000] if name in members(NAMES[:1_000], 0.25, 3)]
    rows = [row for shard in range(plan.shards) for row in read_shard(folder, shard).to_pylist()]
    assert [row["uid"] for row in rows] == expected
    assert [row["row"] for row in rows] == list(range(plan.rows)) == list(range(len(expected)))
    assert (plan.seen, list(rows[0])) == (1_000, ["row", "url", "caption", "uid", "score"])
    assert [read_shard(folder, s).num_rows for s in range(plan.shards)] == [plan.rows_of(s) for s in range(plan.shards)]
    assert load_plan(folder) == make_plan(folder, source, subset, shard_size=30, rules={}) == plan
    with pytest.raises(UserError, match="No row is left of the 1,000"):
        make_plan(Folder(tmp_path / "none"), source, SubsetConfig(fraction=1e-9), shard_size=10, rules={})


def test_a_changed_index_is_refused_and_a_missing_one_is_not_needed(tmp_path):
    """Regression test: the folder kept the members of the former one without a word."""
    source, folder, index = source_in(tmp_path), Folder(tmp_path / "out"), tmp_path / "index.npy"
    folder.make()
    subset = SubsetConfig(index=str(index))
    np.save(index, np.array([(0, k) for k in range(10)], np.dtype("u8,u8")))
    plan = make_plan(folder, source, subset, shard_size=4, rules={})
    index.write_bytes(index.read_bytes())  # the same, at another time
    assert make_plan(folder, source, subset, shard_size=4, rules={}) == plan
    np.save(index, np.array([(0, k + 5) for k in range(10)], np.dtype("u8,u8")))
    with pytest.raises(UserError, match=r"subset.index = '.*index.npy' has changed since the URL list was made\. "):
        make_plan(folder, source, subset, shard_size=4, rules={})
    index.unlink()
    assert make_plan(folder, source, subset, shard_size=4, rules={}) == plan


def test_the_list_does_not_depend_on_how_the_table_was_read_and_may_have_parts(tmp_path):
    plans = []
    for name, size in (("one", 64), ("two", 1_000)):
        folder = Folder(tmp_path / name)
        folder.make()
        source = source_in(folder.root)
        pq.write_table(pq.read_table(source.table), source.table, row_group_size=size)
        plans.append(make_plan(folder, source, SubsetConfig(), shard_size=7, rules={}))
    assert plans[0].digest == plans[1].digest
    assert plans[0].shards == 143
    assert len(list(folder.plan.glob("part-*"))) == 2
    assert read_shard(folder, 142)["row"].to_pylist() == [994, 995, 996, 997, 998, 999]


def test_the_published_number_of_rows_is_that_of_the_table_and_not_of_the_subset(tmp_path):
    path, folder, half = tmp_path / "urls.csv", Folder(tmp_path / "out"), SubsetConfig(fraction=0.5)
    path.write_text("\n".join(["url,caption", *(f"http://example.org/{k}.jpg,a cat" for k in range(50))]))
    folder.make()
    with pytest.raises(UserError, match="The table has 50 rows, but table is published with 51"):
        make_plan(folder, SourceConfig(table=str(path), rows=51), half, shard_size=10, rules={})
    assert not (folder.plan / "plan.json").exists()
    plan = make_plan(folder, SourceConfig(table=str(path), rows=50), half, shard_size=10, rules={})
    assert plan.rows < plan.seen == 50
