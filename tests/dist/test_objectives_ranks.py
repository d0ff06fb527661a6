"""Every objective on one and on four real ranks: equal results, little communication, drift checks."""

import pytest
import torch

from pipeline.distributed.world import World
from tests.dist.objectives_ranks import BATCH, DIM, VARIANTS, everything, own_loop
from tests.launch import run
from tests.unit.objectives_reference import relative_error

pytestmark = pytest.mark.slow

SIZE = 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the results of every rank."""
    out = tmp_path_factory.mktemp("objectives")
    run("tests.dist.objectives_ranks", str(out), ranks=SIZE)
    return [torch.load(out / f"{rank}.pt") for rank in range(SIZE)]


@pytest.fixture(scope="module")
def alone():
    return everything(World())


@pytest.mark.parametrize("name", VARIANTS)
def test_results_are_the_same_for_any_world_size(ranks, alone, name):
    # float64 arithmetic; the tolerance is for per-sample rows, which are fp32. In fp32, AdaGrad's first step at lr 1
    # moves prototypes by the sign of a rounding error.
    tolerance = 3e-5 if name == "neuclip_literal" else 2e-6
    for rank, result in enumerate(ranks):
        for key, expected in alone[name].items():
            found = result["everything"][name][key].double()
            assert torch.allclose(found, expected.double(), rtol=1e-6, atol=1e-9), (rank, key)
        assert result["everything"][name]["same_bits"]
        for key in ("loss0", "image0", "text0"):
            expected = alone[f"{name}.fp32"][key]
            assert relative_error(result["everything"][f"{name}.fp32"][key], expected) < tolerance, (rank, key)


def test_a_step_communicates_the_features_once_plus_scalars(ranks):
    local = BATCH // SIZE
    features = 2 * local * DIM * 4
    for name, moved in ranks[0]["bytes"].items():
        if name.startswith("neuclip") and name not in ("neuclip_replicated", "neuclip_mlp"):
            continue  # covered by the next test
        scalars = sum(moved.values()) - features
        assert 0 <= scalars <= 4 * (5 * local + 9 * BATCH) + 8 * local, name  # O(B): ids, five scalars, table rows
        assert not any("broadcast" in key or "scatter" in key for key in moved), name
    assert ranks[0]["bytes"]["neuclip_replicated"] == {"all_gather.bytes": features + 5 * local * 4}


def test_sharded_prototypes_reduce_one_number_per_anchor_and_update(ranks):
    plain = ranks[0]["bytes"]["neuclip_replicated"]["all_gather.bytes"]
    for name, inner_steps in (("neuclip", 10), ("neuclip_simultaneous", 1)):
        sums = 2 * (inner_steps + 1) * BATCH * 8  # float64, both sides; the last one is for the prediction
        metric = 4  # mean length of the prototypes
        assert ranks[0]["bytes"][name] == {"all_gather.bytes": plain, "all_reduce.bytes": sums + metric}
    # A queue's predictions are for a rank's own anchors: two numbers for each, and how many features they mean.
    assert ranks[0]["bytes"]["neuclip_queue"] == {"all_gather.bytes": plain + 3 * BATCH // SIZE * 4}
    # The gradient through alpha of a rank's own anchors needs all prototypes: each rank sends its shard.
    assert ranks[0]["bytes"]["neuclip_full_gradient"]["all_gather.bytes"] > plain


def test_a_plain_training_loop_gives_the_same_results_for_any_world_size(ranks):
    expected = own_loop(World())
    for result in ranks:
        for key, value in expected.items():  # rows of `fastclip_v3` are fp32
            assert torch.allclose(result["own_loop"][key], value, rtol=1e-5, atol=1e-7), key


def test_drift_is_repaired_and_counted_and_the_third_time_stops_the_run(ranks):
    for result in ranks:
        drift = result["drift"]
        assert drift["events"] == [0, 0, 0, 1, 1, 2, 2, 3]
        assert drift["agreed"] == [True] * 8
        assert "3 times since the start" in drift["error"]
        assert "ranks [1] against rank 0" in drift["error"]
