"""State per sample: the table that ranks share, and the moving averages in it."""

import math

import pytest
import torch

from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.objectives import build_objective, sample_table
from pipeline.objectives.sample_table import PerSampleTable
from tests.unit.objectives_reference import context, normalizers, unit_features

COLUMNS = {"image_log_u": -math.inf, "text_log_u": 0.5}


def table(dataset_size=10, *, rank=0, size=1):
    return PerSampleTable(COLUMNS, dataset_size=dataset_size, world=World(rank, size), device=torch.device("cpu"))


def test_ranks_cover_every_id_once():
    for dataset_size in (1, 2, 7, 8, 1000):
        for size in (1, 2, 3, 8):
            parts = [table(dataset_size, rank=rank, size=size) for rank in range(size)]
            assert [i for part in parts for i in range(part.start, part.stop)] == list(range(dataset_size))


@pytest.mark.parametrize("seed", range(5))
def test_a_table_equals_a_plain_tensor_and_a_snapshot_one_that_stays(seed, monkeypatch):
    """Ids that occur twice (the later row counts), ids fetched ahead of a write, or fetched and not used."""
    monkeypatch.setattr(sample_table, "BLOCK", 7)
    generator = torch.Generator().manual_seed(seed)
    rows, expected = table(50), torch.tensor([[-math.inf, 0.5]] * 50)
    assert rows.values.nbytes == 8 * 51, "4 bytes a column, and a spare row"

    def draw():
        return torch.randint(50, (9,), generator=generator)

    def train(steps):
        ids = draw()
        for step in range(steps):
            assert torch.equal(rows.lookup(ids), expected[ids])
            following = draw()
            if step % 3:
                rows.prefetch(following if step % 3 == 1 else draw())
            written = torch.randn(9, 2, generator=generator)
            rows.write(written)
            for sample, row in zip(ids.tolist(), written, strict=True):
                expected[sample] = row
            ids = following

    train(5)
    before, blocks = expected.clone(), []
    for block in rows.snapshot():
        blocks.append(block)
        train(2)
    assert [len(block) for block in blocks] == [7] * 7 + [1]
    assert torch.equal(torch.cat(blocks), before)
    assert torch.equal(rows.owned(), expected)


def test_ids_out_of_range_and_a_dataset_of_unknown_size_are_rejected():
    for ids in ([0, 10], [-1, 3]):
        with pytest.raises(UserError, match="dataset of 10 samples"):
            table().lookup(torch.tensor(ids))
    with pytest.raises(UserError, match="dataset_size = 0"):
        table(0)


def test_rows_are_redistributed_to_another_world_size():
    """Saved by one rank, read by three: each gets its own range."""
    saved = torch.randn(10, 2)
    parts = [table(rank=rank, size=3) for rank in range(3)]
    for part in parts:
        part.load("per_sample", lambda name, start, stop: saved[start:stop])
    assert torch.equal(torch.cat([part.owned() for part in parts]), saved)


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


def test_loading_discards_unwritten_rows():
    rows, ids = table(), torch.tensor([3, 8])
    rows.lookup(ids)
    rows.write(torch.ones(2, 2))
    rows.prefetch(ids)
    rows.load("per_sample", lambda name, start, stop: torch.zeros(stop - start, 2))
    assert not rows.owned().any()
    assert not rows.lookup(ids).any()


IDS = torch.arange(8)


def test_gamma_decreases_at_the_first_step_of_an_epoch():
    settings = {"name": "fastclip_v3", "gamma_decay_epochs": 4, "gamma_min": 0.2, "tau_lr": 0.0}
    objective = build_objective(settings, context=context(8, steps_per_epoch=4))
    tau = torch.tensor(0.07, dtype=torch.float64)
    estimate = [torch.zeros(8).double() for _ in (0, 1)]
    for step in range(9):
        features = unit_features(8, seed=step)
        output = objective.compute(*features, sample_ids=IDS)
        gamma = (1.0, 0.4 * (1 + math.sqrt(0.5)) + 0.2, 0.6)[step // 4]
        assert float(output.metrics["gamma"]) == pytest.approx(gamma)
        for side, g in enumerate(normalizers(*features, (tau, tau))):
            estimate[side] = (1 - gamma) * estimate[side] + gamma * g
            found = output.distributions[f"log_normalizer_of_{('image', 'text')[side]}"]
            assert torch.allclose(found, estimate[side].log(), rtol=1e-5, atol=1e-5), step  # rows are fp32
        log_u, log_g = (
            torch.stack([output.distributions[f"{kind}_of_{side}"] for side in ("image", "text")])
            for kind in ("log_normalizer", "log_batch_normalizer")
        )
        gap = float((log_u - log_g).abs().mean())
        assert float(output.metrics["normalizer_gap"]) == pytest.approx(gap, rel=1e-9)
        objective.commit()


def test_the_estimate_of_a_new_sample_is_its_in_batch_value():
    objective = build_objective("fastclip_v3", context=context(8))
    features = unit_features(8)
    cold = objective.log_normalizers(*features, sample_ids=IDS)[0]
    tau = torch.tensor(0.07, dtype=torch.float64)
    for side, g in enumerate(normalizers(*features, (tau, tau))):
        assert torch.allclose(cold[side], g.log(), rtol=1e-9)


def test_a_checkpoint_records_the_first_sample_id_of_each_rank():
    ranks = [
        build_objective("sogclr", context=context(8, dataset_size=31, world=World(rank=r, size=2))) for r in (0, 1)
    ]
    for objective, start, count in zip(ranks, (0, 16), (16, 15), strict=True):
        ((first, blocks),) = objective.row_blocks().values()
        assert first == start
        assert sum(map(len, blocks)) == count
    assert math.isinf(float(next(iter(ranks[0].row_blocks()["per_sample"][1]))[0, 0]))
