"""The objective compared with `npn/reference.py`, Algorithm 1 with autograd, over several steps with restarts."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.objectives import build_objective
from pipeline.objectives.npn.reference import ReferenceNeuClip
from tests.unit.objectives_reference import context, relative_error, unit_features

BATCH = 8


@pytest.mark.parametrize("seed", [0, 1])
def test_the_objective_is_algorithm_1(seed):
    """Features, temperature and prototypes are all trained; m = B, with the full gradient of (12) as in the paper."""
    shared = {"rho": 2.0, "eps": 1e-10, "restart_every": 3, "inner_steps": 4}
    settings = {"name": "neuclip", "prototypes": BATCH, "npn_lr": 0.05, "ratio_cap": 0, "stop_gradient": False}
    objective = build_objective(settings | shared, context=context(BATCH, seed=seed))
    reference = ReferenceNeuClip(**shared, lr=0.05)
    log_scale = torch.tensor(math.log(1 / 0.07), dtype=torch.float64, requires_grad=True)
    c = objective.config
    peer = torch.optim.Adam([log_scale], lr=c.tau_lr, betas=(0.9, 0.98), eps=1e-8)
    for step in range(8):
        image, text = (f.requires_grad_() for f in unit_features(BATCH, seed=10 * seed + step))
        loss = reference.step(image, text, torch.exp(-log_scale))
        peer.zero_grad()
        loss.backward()
        peer.step()
        output = objective.compute(image.detach(), text.detach(), sample_ids=torch.arange(BATCH))
        assert relative_error(output.loss, loss) < 1e-9, step
        assert relative_error(output.grad_image, image.grad) < 1e-8, step
        assert relative_error(output.grad_text, text.grad) < 1e-8, step
        for side in (0, 1):
            assert relative_error(objective.npn.weight(side), reference.weights[side]) < 1e-8, step
        objective.commit()
        assert objective.logit_parameters()[0] == pytest.approx(float(log_scale), rel=1e-7)  # the rate is fp32
