"""Moving averages: the gamma schedule, first visits, and checkpoints of several ranks."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.distributed.world import World
from pipeline.objectives import build_objective
from pipeline.objectives.sogclr import cosine_gamma
from tests.unit.objectives_reference import context, normalizers, unit_features

IDS = torch.arange(8)


def test_gamma_decreases_at_the_first_step_of_an_epoch():
    settings = {"name": "fastclip_v3", "gamma_decay_epochs": 4, "gamma_min": 0.2, "tau_lr": 0.0}
    objective = build_objective(settings, context=context(8, steps_per_epoch=4))
    tau = torch.tensor(0.07, dtype=torch.float64)
    estimate = [torch.zeros(8).double() for _ in (0, 1)]
    for step in range(9):
        features = unit_features(8, seed=step)
        output = objective.compute(*features, sample_ids=IDS)
        gamma = cosine_gamma(step // 4, gamma_min=0.2, decay_epochs=4)
        assert float(output.metrics["gamma"]) == pytest.approx(gamma)
        for side, g in enumerate(normalizers(*features, (tau, tau))):
            estimate[side] = (1 - gamma) * estimate[side] + gamma * g
            found = output.distributions[f"log_normalizer_of_{('image', 'text')[side]}"]
            assert torch.allclose(found, estimate[side].log(), rtol=1e-5, atol=1e-5), step  # rows are fp32
        gaps = [
            (
                output.distributions[f"log_normalizer_of_{s}"] - output.distributions[f"log_batch_normalizer_of_{s}"]
            ).abs()
            for s in ("image", "text")
        ]
        assert float(output.metrics["normalizer_gap"]) == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-9)
        objective.commit()
    assert gamma == pytest.approx(cosine_gamma(2, gamma_min=0.2, decay_epochs=4))


def test_the_estimate_of_a_new_sample_is_its_in_batch_value():
    objective = build_objective("fastclip_v3", context=context(8))
    features = unit_features(8)
    estimates = objective.log_normalizers(*features, sample_ids=IDS)
    tau = torch.tensor(0.07, dtype=torch.float64)
    for side, g in enumerate(normalizers(*features, (tau, tau))):
        assert torch.allclose(estimates.cold[side], g.log(), rtol=1e-9)


def test_a_checkpoint_records_the_first_sample_id_of_each_rank():
    ranks = [
        build_objective("sogclr", context=context(8, dataset_size=31, world=World(rank=r, size=2))) for r in (0, 1)
    ]
    for objective, start, count in zip(ranks, (0, 16), (16, 15), strict=True):
        ((first, blocks),) = objective.row_blocks().values()
        assert first == start
        assert sum(map(len, blocks)) == count
    assert math.isinf(float(next(iter(ranks[0].row_blocks()["per_sample"][1]))[0, 0]))
