"""`neuclip_plus` equals its equations over several steps: a queue of earlier features, pooled with the batch."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.errors import UserError
from pipeline.objectives import build_objective
from tests.unit.objectives_reference import context, relative_error, unit_features

BATCH, PROTOTYPES, EPS = 6, 16, 1e-3


def normalizers(anchors: torch.Tensor, partners: torch.Tensor, earlier: torch.Tensor, tau: float) -> torch.Tensor:
    """exp(alpha) of the methods page, [B]; earlier: [m, d] features of the partners' side."""
    values = []
    for i in range(len(anchors)):
        own = float(anchors[i] @ partners[i])
        batch = [math.exp((float(anchors[i] @ partners[j]) - own) / tau) for j in range(len(anchors)) if j != i]
        queue = [math.exp((float(anchors[i] @ w) - own) / tau) for w in earlier]
        m, others = len(queue), len(batch)
        values.append((m * (EPS + sum(queue) / m) + others * (EPS + sum(batch) / others)) / (m + others))
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("cap", [0, 2.0])
def test_losses_and_gradients_equal_the_equations(cap: float) -> None:
    settings = {
        "name": "neuclip_plus",
        "prototypes": PROTOTYPES,
        "eps": EPS,
        "ratio_cap": cap,
        "tau_lr": 0.0,
        "rho": 1.5,
    }
    objective = build_objective({**settings, "tau_init": 0.2}, context=context(BATCH))
    history: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(5):
        image, text = (f.requires_grad_() for f in unit_features(BATCH, seed=step))
        output = objective.compute(image.detach(), text.detach(), sample_ids=torch.arange(BATCH))
        loss = torch.zeros((), dtype=torch.float64)
        for a, b, side in ((image, text, 1), (text, image, 0)):
            past = [pair[side] for pair in history] or [(image, text)[side]]  # the first batch has only its own
            earlier = torch.cat(past).detach()[-PROTOTYPES:]
            similarity = a @ b.T
            h = (similarity - similarity.diagonal()[:, None]) / 0.2
            g = h.exp().masked_fill(torch.eye(BATCH, dtype=torch.bool), 0).sum(1) / (BATCH - 1)
            alpha = normalizers(a.detach(), b.detach(), earlier, 0.2).log()
            if cap:
                alpha = torch.maximum(alpha, (EPS + g.detach()).log() - math.log(cap))
            loss = loss + 0.2 * ((EPS + g) * (-alpha).exp() + alpha).mean()
        loss = loss + 2 * 0.2 * 0.5
        loss.backward()
        assert relative_error(output.loss, loss) < 1e-9, step
        assert relative_error(output.grad_image, image.grad) < 1e-8, step
        assert relative_error(output.grad_text, text.grad) < 1e-8, step
        assert float(output.metrics["ratio_max"]) <= (cap or (PROTOTYPES + BATCH) / (BATCH - 1)) * (1 + 1e-9)
        objective.commit()
        history.append((image.detach(), text.detach()))


def test_settings_without_meaning_are_refused() -> None:
    for wrong in ({"npn": "mlp"}, {"stop_gradient": False}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            build_objective({"name": "neuclip_plus", **wrong}, context=context(BATCH))
