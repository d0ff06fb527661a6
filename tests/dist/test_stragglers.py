"""What the records of training say of all ranks: the slowest, although all take equally long, and means."""

from __future__ import annotations

import pytest

from pipeline.distributed.world import World
from pipeline.training.observer import slowest_rank
from tests.launch import run
from tests.metrics import metrics
from tests.thread_world import on_ranks
from tests.training import SMALL, prepare, settings_in, train_here

PAUSE = 0.5


@pytest.mark.slow
def test_of_two_ranks_the_one_that_pauses_is_the_slowest(tmp_path):
    settings = settings_in(prepare(tmp_path, [16, 16]), "run", "samples=48", "model.text_batching=packed")
    forward = "pipeline.engine.deepspeed_engine:DeepSpeedEngine.forward"
    run("tests.e2e.doomed_run", forward, "each", f"1:{PAUSE}", *SMALL, *settings, ranks=2)
    records = metrics(tmp_path / "run", "train")
    assert len(records) == 6
    found = [record for record in records if record["slowest_rank"] == 1]
    assert len(found) > len(records) / 2  # another one, if this machine stops rank 0 for as long
    for record in found:
        assert record["slowest_rank_ms"] >= 1e3 * PAUSE
        assert record["median_rank_ms"] <= record["slowest_rank_ms"]
    train_here(*settings, f"output={tmp_path / 'one-rank'}")
    tokens = [record["text_tokens"] for record in metrics(tmp_path / "one-rank", "train")]
    assert len(set(tokens)) > 1
    assert [record["text_tokens"] for record in records] == pytest.approx(tokens)


@pytest.mark.parametrize("waits", ["time_communication", "time_optimizer"])
def test_the_time_in_which_a_rank_waits_for_others_is_not_its_own(waits):
    waiting, loading = [0.5, 0.0, 0.25], [0.0, 0.4, 0.1]

    def program(world: World) -> dict[str, float]:
        rates = {"samples_per_second": 40.0, "data_wait": loading[world.rank], waits: waiting[world.rank]}
        return slowest_rank(world, rates, batch_size=8)

    expected = {"slowest_rank": 1.0, "slowest_rank_ms": 200.0, "median_rank_ms": 150.0, "slowest_rank_data_wait": 0.4}
    for found in on_ranks(3, program):
        assert found == pytest.approx(expected)
    assert slowest_rank(World(), {}, batch_size=8) == {}
