"""Which features fill the prototypes: small batches, few or many prototypes, previous batches only."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.objectives import build_objective
from tests.unit.objectives_reference import context, unit_features


def build(batch_size: int, **settings):
    return build_objective({"name": "neuclip", "inner_steps": 0, **settings}, context=context(batch_size))


def step(objective, seed: int, *, size: int) -> list[Tensor]:
    """Take and commit one step; return the features that may fill W1 and W2: texts and images."""
    image, text = unit_features(size, seed=seed)
    objective.compute(image, text, sample_ids=torch.arange(size))
    objective.commit()
    return [text, image]


def rows_in(weight: Tensor, features: Tensor) -> list[int]:
    """Return the index in `features` of each row of `weight`, or -1 where it does not occur."""
    equal = (weight[:, None] == features[None]).all(2)
    return torch.where(equal.any(1), equal.int().argmax(1), -1).tolist()


def test_few_prototypes_come_from_previous_batches_if_configured():
    objective = build(8, prototypes=5, restart_every=1, restart_with="previous")
    first, second = (step(objective, seed, size=8) for seed in (0, 1))
    for side in (0, 1):
        weight = objective.npn.network.lasting["weight"][side]
        assert -1 not in rows_in(weight, first[side])
        assert rows_in(weight, second[side]) == [-1] * 5


def test_every_restart_draws_a_different_subset():
    objective, drawn = build(32, prototypes=5, restart_every=1), []
    for seed in (0, 1):
        features = step(objective, seed, size=32)
        drawn.append(rows_in(objective.npn.network.lasting["weight"][0], features[0]))
    assert -1 not in drawn[0] + drawn[1]
    assert drawn[0] != drawn[1]


def test_a_smaller_batch_leaves_no_gap_in_the_queue():
    objective = build(8, prototypes=20, restart_every=0)
    seen = [step(objective, 0, size=5), step(objective, 1, size=8)]
    assert int(objective.npn.queue.written) == int(objective.npn.live) == 13
    for side in (0, 1):
        expected = torch.cat([features[side] for features in seen])
        assert torch.equal(objective.npn.queue.features[side, :13], expected)
        assert torch.equal(objective.npn.network.lasting["weight"][side, :13], expected)


def test_a_restart_with_a_batch_smaller_than_m_starts_with_that_batch():
    objective = build(8, prototypes=6, restart_every=1)
    step(objective, 0, size=6)
    assert int(objective.npn.live) == 6
    features = step(objective, 1, size=4)
    assert int(objective.npn.live) == 4
    for side in (0, 1):
        assert torch.equal(objective.npn.network.lasting["weight"][side, :4], features[side])
