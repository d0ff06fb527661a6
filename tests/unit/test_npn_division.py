"""Prototypes divided among ranks: results and state are the same for any world size."""

import pytest
import torch

from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.objectives import build_objective, parse_objective
from pipeline.objectives.npn.kernels import Division
from pipeline.objectives.npn.prototype_network import is_divided
from tests.thread_world import on_ranks
from tests.unit.objectives_reference import context, relative_error, unit_features

BATCH, DIM, STEPS = 12, 8, 6
NEUCLIP = {"name": "neuclip", "prototypes": 20, "restart_every": 3}
VARIANTS = {
    "default": {},
    "uneven": {"prototypes": 19},
    "subset": {"prototypes": 7},
    "previous": {"restart_with": "previous", "npn_optimizer": "adam"},
    "queue": {"npn": "queue"},
    "queue_previous": {"npn": "queue", "restart_with": "previous", "stop_gradient": False, "ratio_cap": 0},
    "simultaneous": {"npn_schedule": "simultaneous", "inner_steps": 1},
    "separate": {"npn_objective": "separate", "reset_accumulator": True},
    "through_alpha": {"stop_gradient": False, "ratio_cap": 0},
}


def build(settings, world, **facts):
    return build_objective({**NEUCLIP, **settings}, context=context(BATCH, DIM, world=world, **facts))


def run(settings, world, *, first=0, last=STEPS, state=None, dtype=torch.float64):
    """Return the outputs of all steps and the final state; the third batch is discarded once."""
    objective = build(settings, world, dtype=dtype)
    objective.drift.every = 2 * (world.size > 1)
    if state is not None:
        objective.load_state_dict(state)
    rows, found = world.rows(BATCH // world.size), []
    for step in range(first, last):
        image, text = (side[rows].to(dtype) for side in unit_features(BATCH, DIM, seed=step))
        output = objective.compute(image, text, sample_ids=torch.arange(BATCH)[rows])
        if step == 2:
            objective.discard()
            output = objective.compute(image, text, sample_ids=torch.arange(BATCH)[rows])
        objective.commit(lr_scale=0.5)
        found += [output.loss, *map(world.all_gather, (output.grad_image, output.grad_text)), *output.metrics.values()]
    cold, in_use, _ = objective.log_normalizers(image, text, sample_ids=torch.arange(BATCH)[rows])
    return [*found, *map(world.all_gather, (*cold, *in_use))], objective.state_dict()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_results_are_the_same_for_any_world_size(name, size):
    settings = VARIANTS[name]
    outputs, state = run(settings, World())
    ranks = on_ranks(size, lambda world: run(settings, world))
    for found, found_state in ranks:
        # Metrics that are 0 by definition, such as a queue's gap on its first step, are rounding.
        assert all(relative_error(a, b) < 1e-9 or max(a, b) < 1e-14 for a, b in zip(found, outputs, strict=True))
        assert found_state.keys() == state.keys()
        for key, value in state.items():
            assert torch.allclose(found_state[key].double(), value.double(), rtol=1e-7, atol=1e-9), key
            assert torch.equal(found_state[key], ranks[0][1][key]), key  # bit-identical on all ranks


def test_a_run_resumes_with_a_different_world_size():
    settings = VARIANTS["default"]
    _, expected = run(settings, World())
    _, half = on_ranks(4, lambda world: run(settings, world, last=3))[0]
    _, found = on_ranks(3, lambda world: run(settings, world, first=3, state=half))[0]
    for key, value in expected.items():
        assert torch.allclose(found[key].double(), value.double(), rtol=1e-7, atol=1e-9), key


def test_each_rank_holds_its_shard():
    def share(world):
        return build({}, world).npn.network.lasting["weight"].shape[1]

    assert on_ranks(3, share) == [7, 7, 7]
    owners = [Division(World(rank=rank, size=3), 20) for rank in range(3)]
    assert [division.rows for division in owners] == [7, 7, 6]
    numbers = torch.arange(20)[:, None]
    for start in (0, 4, 11):  # features of prototypes start, start + 1, ... are dealt to the three ranks in turn
        for rank, division in enumerate(owners):
            rows, mine = division.own(start, numbers[start:])
            assert mine.flatten().tolist() == [3 * row + rank for row in range(rows.start, rows.stop)]


def test_results_at_the_lowest_temperature_are_finite_in_fp32():
    settings = {"tau_init": 0.002, "tau_min": 0.002, "tau_lr": 0.0}
    for outputs, state in on_ranks(2, lambda world: run(settings, world, dtype=torch.float32)):
        assert all(torch.isfinite(value).all() for value in outputs)
        assert all(torch.isfinite(value.double()).all() for value in state.values())


@pytest.mark.parametrize(
    ("settings", "size", "divided"),
    [
        ({}, 1, False),
        ({}, 2, True),
        ({"npn_update": "replicated"}, 2, False),
        ({"npn_update": "prototypes"}, 1, False),
        ({"prototypes": 3}, 4, False),
        ({"tau_min": 0.001}, 4, False),
    ],
)
def test_prototypes_are_divided_by_default_where_possible(settings, size, divided):
    assert is_divided(parse_objective({**NEUCLIP, **settings}), World(size=size)) is divided
    if not divided and size == 4:  # not possible, which is an error if it is demanded
        with pytest.raises(UserError, match="npn_update=replicated"):
            is_divided(parse_objective({**NEUCLIP, **settings, "npn_update": "prototypes"}), World(size=4))
