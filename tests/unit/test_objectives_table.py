"""The per-sample table: which rank owns which rows, lookups, writes, checkpoints and size."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.objectives import sample_table
from pipeline.objectives.sample_table import PerSampleTable, owned_range

COLUMNS = {"image_log_u": -math.inf, "text_log_u": 0.5}


def table(dataset_size=10, **kwargs):
    return PerSampleTable(COLUMNS, dataset_size=dataset_size, world=World(), device=torch.device("cpu"), **kwargs)


@pytest.mark.parametrize("dataset_size", [1, 2, 7, 8, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_cover_every_id_once(dataset_size, size):
    ranges = [owned_range(dataset_size, rank=rank, size=size) for rank in range(size)]
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(dataset_size))


def test_rows_have_initial_values_and_keep_written_ones():
    rows = table()
    ids = torch.tensor([7, 2, 9])
    assert torch.equal(rows.lookup(ids), torch.tensor([[-math.inf, 0.5]] * 3))
    rows.write(torch.arange(6.0).reshape(3, 2))
    assert torch.equal(rows.lookup(torch.tensor([9, 7, 0])), torch.tensor([[4.0, 5.0], [0.0, 1.0], [-math.inf, 0.5]]))
    assert torch.equal(rows.owned()[2], torch.tensor([2.0, 3.0]))


def test_the_last_row_of_a_repeated_id_is_kept():
    rows = table()
    rows.lookup(torch.tensor([4, 4, 1, 4]))
    rows.write(torch.arange(8.0).reshape(4, 2))
    assert torch.equal(rows.lookup(torch.tensor([4, 1])), torch.tensor([[6.0, 7.0], [4.0, 5.0]]))


def test_prefetch_includes_a_later_write():
    rows, first, second = table(), torch.tensor([1, 2]), torch.tensor([2, 3])
    rows.lookup(first)
    rows.prefetch(second)
    rows.write(torch.full((2, 2), 8.0))
    assert torch.equal(rows.lookup(second)[0], torch.tensor([8.0, 8.0]))


@pytest.mark.parametrize("ids", [[0, 10], [-1, 3]])
def test_ids_out_of_range_are_rejected(ids):
    with pytest.raises(UserError, match="dataset of 10 samples"):
        table().lookup(torch.tensor(ids))


def test_a_dataset_of_unknown_size_is_rejected():
    with pytest.raises(UserError, match="dataset_size = 0"):
        table(0)


def test_rows_are_redistributed_to_another_world_size():
    """Saved by one rank, read by three: each gets its own range."""
    saved = torch.randn(10, 2)
    parts = []
    for rank in range(3):
        part = PerSampleTable(COLUMNS, dataset_size=10, world=World(rank=rank, size=3), device=torch.device("cpu"))
        part.load("per_sample", lambda name, start, stop: saved[start:stop])
        parts.append(part.owned())
    assert torch.equal(torch.cat(parts), saved)


@pytest.mark.parametrize("seed", range(5))
def test_a_snapshot_is_constant_while_the_table_changes(seed, monkeypatch):
    generator = torch.Generator().manual_seed(seed)
    rows = table(50)

    def change(repeated=False):
        ids = torch.randint(50, (9,), generator=generator) if repeated else torch.randperm(50, generator=generator)[:9]
        rows.lookup(ids)
        rows.write(torch.randn(9, 2, generator=generator))

    change()
    before = rows.owned().clone()
    change()
    expected = rows.owned().clone()
    assert not torch.equal(expected, before)
    snapshot = rows.snapshot()
    monkeypatch.setattr(sample_table, "BLOCK", 7)
    blocks = []
    for block in snapshot:
        blocks.append(block)
        change(repeated=True)
        change()
    assert [len(block) for block in blocks] == [7] * 7 + [1]
    assert torch.equal(torch.cat(blocks), expected)
    assert not torch.equal(rows.owned(), expected)


def test_a_snapshot_read_by_another_thread_is_consistent():
    rows = table(4000)
    ids = torch.arange(4000)

    def write(value):
        rows.lookup(ids)
        rows.write(torch.full((4000, 2), float(value)))
        rows.owned()

    write(-1)
    for value in range(20):
        snapshot, found = rows.snapshot(), []
        snapshot._block = 50
        thread = threading.Thread(target=lambda s=snapshot, f=found: f.extend(s))
        thread.start()
        write(value)
        thread.join()
        assert torch.equal(torch.cat(found), torch.full((4000, 2), float(value - 1)))


def test_an_abandoned_snapshot_is_freed():
    rows = table()
    abandoned = rows.snapshot()
    rows.lookup(torch.tensor([1]))
    rows.write(torch.ones(1, 2))
    rows.owned()
    assert abandoned._kept
    with pytest.raises(RuntimeError, match="wait for the checkpoint"):
        rows.load("per_sample", lambda name, start, stop: torch.zeros(stop - start, 2))
    del abandoned
    rows.load("per_sample", lambda name, start, stop: torch.zeros(stop - start, 2))
    assert not rows._snapshots


@pytest.mark.slow
def test_fifty_million_samples():
    """n = 50 million on one machine: 8 bytes per sample for two columns; a step accesses only its batch."""
    n = 50_000_000
    rows = table(n)
    assert rows.values.numel() * 4 == 8 * (n + 1)
    generator = torch.Generator().manual_seed(0)
    expected = {}
    for step in range(5):
        ids = torch.randint(n, (4096,), generator=generator).unique()
        rows.lookup(ids)
        rows.write(torch.stack([ids.float(), torch.full_like(ids, step, dtype=torch.float32)], 1))
        expected |= dict.fromkeys(ids.tolist(), float(step))
    ids = torch.tensor(list(expected))
    assert torch.equal(rows.lookup(ids), torch.stack([ids.float(), torch.tensor(list(expected.values()))], 1))
    assert int(torch.isneginf(rows.owned()[:, 0]).sum()) == n - len(expected)


def test_a_snapshot_holds_the_latest_values():
    rows, ids = table(), torch.tensor([3, 8])
    rows.lookup(ids)
    rows.write(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert torch.equal(torch.cat(list(rows.snapshot()))[ids], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))


def test_loading_discards_unwritten_rows():
    rows, ids = table(), torch.tensor([3, 8])
    rows.lookup(ids)
    rows.write(torch.ones(2, 2))
    rows.prefetch(ids)
    rows.load("per_sample", lambda name, start, stop: torch.zeros(stop - start, 2))
    assert not rows.owned().any()
    assert not rows.lookup(ids).any()


def test_rows_prefetched_for_another_batch_are_not_used():
    rows, one, other = table(), torch.tensor([1, 2]), torch.tensor([5, 6])
    rows.lookup(torch.arange(10))
    rows.write(torch.arange(20.0).reshape(10, 2))
    rows.prefetch(one)
    assert torch.equal(rows.lookup(other), torch.tensor([[10.0, 11.0], [12.0, 13.0]]))
    rows.write(torch.zeros(2, 2))
    assert torch.equal(rows.owned()[1], torch.tensor([2.0, 3.0]))
    assert not rows.owned()[5:7].any()
