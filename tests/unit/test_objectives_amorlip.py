"""AmorLIP against autograd of its written loss, and the life of its networks."""

from __future__ import annotations

import pytest
import torch

from pipeline.objectives import build_objective, mlp
from pipeline.objectives.amorlip import target_share_at
from tests.unit.objectives_reference import context, relative_error, unit_features


@pytest.mark.parametrize("positive_weight", [0.0, 1e-3, 0.5])
@pytest.mark.parametrize("batch_size", [2, 3, 17])
def test_loss_and_gradients_are_autograd_of_the_written_loss(batch_size, positive_weight):
    settings = {"name": "amorlip", "positive_weight": positive_weight, "ratio_cap": 0}
    objective = build_objective(settings, context=context(batch_size))
    image, text = (f.requires_grad_() for f in unit_features(batch_size))
    output = objective.compute(image.detach(), text.detach(), sample_ids=torch.arange(batch_size), step=0)
    tau = objective.temperature.value().requires_grad_()
    weights = torch.ones(batch_size, batch_size).double().fill_diagonal_(positive_weight)
    weights = weights / weights.sum(1, keepdim=True)
    loss = -2 * (image * text).sum(1).mean() + objective.config.rho * tau
    for side, s in enumerate((image @ text.T, text @ image.T)):
        log_lambda = mlp.forward(objective.networks._side(side, ".average"), (image, text)[side]).detach()
        loss = loss + tau * ((weights * torch.exp(s / tau)).sum(1) / log_lambda.exp()).mean()
    expected = torch.autograd.grad(loss, [image, text, tau])
    ours = [output.grad_image, output.grad_text, objective._pending.tau_gradient]
    assert relative_error(output.loss, loss) < 1e-10
    assert all(relative_error(a, b) < 1e-10 for a, b in zip(ours, expected, strict=True))


def test_networks_restart_each_epoch_and_remember_the_last_average():
    objective = build_objective("amorlip", context=context(8, steps_per_epoch=3, total_steps=12))
    for step in range(3):
        objective.compute(*unit_features(8, seed=step), sample_ids=torch.arange(8), step=step)
        objective.commit()
    average = objective.networks.state.lasting["linear1.weight.average"].clone()
    assert int(objective.networks.updates) == 9
    objective.compute(*unit_features(8, seed=3), sample_ids=torch.arange(8), step=3)
    objective.commit()
    assert torch.equal(objective.networks.state.lasting["linear1.weight.previous"], average)
    assert int(objective.networks.updates) == 3


def test_share_of_the_previous_network_rises_to_its_highest_by_the_middle():
    shares = [target_share_at(epoch, highest=0.8, epochs=10) for epoch in range(10)]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[5:] == pytest.approx([0.8] * 5)
