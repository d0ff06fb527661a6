"""AmorLIP compared with autograd of its loss as written, and the restarts and averages of its networks."""

import pytest
import torch

from pipeline.objectives import build_objective
from pipeline.objectives.npn import amorlip, mlp
from pipeline.objectives.npn.amorlip import slope
from tests.unit.objectives_reference import assert_exact, context, relative_error, unit_features


@pytest.mark.parametrize("positive_weight", [0.0, 1e-3, 0.5])
@pytest.mark.parametrize("batch_size", [2, 3, 17])
def test_loss_and_gradients_equal_autograd_of_the_loss_as_written(batch_size, positive_weight, monkeypatch):
    monkeypatch.setattr(amorlip, "POSITIVE_WEIGHT", positive_weight)
    objective = build_objective({"name": "amorlip", "ratio_cap": 0}, context=context(batch_size))
    image, text = (f.requires_grad_() for f in unit_features(batch_size))
    output = objective.compute(image.detach(), text.detach(), sample_ids=torch.arange(batch_size))
    tau = objective.temperature.value().requires_grad_()
    weights = torch.ones(batch_size, batch_size).double().fill_diagonal_(positive_weight)
    weights = weights / weights.sum(1, keepdim=True)
    loss = -2 * (image * text).sum(1).mean() + objective.config.rho * tau
    for side, s in enumerate((image @ text.T, text @ image.T)):
        log_lambda = mlp.forward(objective.network.side(side, copy="average"), (image, text)[side]).detach()
        loss = loss + tau * ((weights * torch.exp(s / tau)).sum(1) / log_lambda.exp()).mean()
    assert_exact(objective, output, loss, image, text, tau)


def written_divergence(divergence, log_lambda, logits):
    """Sums over the batch's distributions, as `slope` describes them."""
    log_target = logits.logsumexp(1)
    if divergence == "squared_log":
        return (log_lambda - log_target).square().sum()
    p, q = (torch.exp(logits - total[:, None]) for total in (log_target, log_lambda))
    if divergence == "kl":
        return (q * torch.log(q / p) - q + p).sum()
    middle = (p + q) / 2
    return (q * torch.log(q / middle) + p * torch.log(p / middle)).sum() / 2


@pytest.mark.parametrize("divergence", ["squared_log", "kl", "js"])
def test_divergence_slopes_equal_autograd_and_vanish_at_the_target(divergence):
    image, text = unit_features(17)
    logits = image @ text.T / 0.07
    target = logits.logsumexp(1)
    log_lambda = (target + torch.linspace(-6, 6, 17).double()).requires_grad_()
    expected = torch.autograd.grad(written_divergence(divergence, log_lambda, logits), log_lambda)[0]
    ours = slope(divergence, log_lambda.detach(), target)
    assert torch.allclose(ours, expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(ours.sign().diff() >= 0, torch.ones(16, dtype=torch.bool))  # one zero: the minimum
    assert slope(divergence, target, target).abs().max() < 1e-15
    # Finite and of the same sign far from it: at tau = 0.005 the logs can differ by 2 / tau = 400 in fp32.
    difference = torch.tensor([-400.0, -89.0, -31.0, -1.0, 1.0, 31.0, 89.0])
    found = slope(divergence, difference, torch.zeros(7))
    assert torch.isfinite(found.square()).all()
    assert torch.equal(found[:5].sign(), difference[:5].sign())
    assert (found[5:] >= 0).all()


@pytest.mark.parametrize("divergence", ["squared_log", "kl", "js"])
def test_an_update_follows_the_mean_divergence(divergence):
    """Adam's first moment after one update from zero is a tenth of the gradient."""
    settings = {"name": "amorlip", "divergence": divergence, "inner_steps": 1}
    objective = build_objective(settings, context=context(8))
    image, text = unit_features(8)
    objective.compute(image, text, sample_ids=torch.arange(8))
    fresh = mlp.initial_parameters(objective.context, restart=0)
    kappa = amorlip.POSITIVE_WEIGHT
    for side, s in enumerate((image @ text.T, text @ image.T)):
        weights = torch.ones(8, 8).double().fill_diagonal_(kappa) / (7 + kappa)
        logits = s / objective.temperature.value() + weights.log()
        parameters = {name: value[side].clone() for name, value in fresh.items()}
        parameters["head.bias"] = logits.logsumexp(1).mean()[None]
        parameters = {name: value.requires_grad_() for name, value in parameters.items()}
        loss = written_divergence(divergence, mlp.forward(parameters, (image, text)[side]), logits) / 8
        for name, gradient in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
            moment = objective.network.working[f"{name}.moment1"][side]
            assert torch.allclose(moment, 0.1 * gradient, rtol=1e-9, atol=1e-12), name


def test_the_reported_normalizer_is_the_one_used_in_the_gradients(monkeypatch):
    monkeypatch.setattr(amorlip, "POSITIVE_WEIGHT", 3.0)
    objective = build_objective("amorlip", context=context(8))
    image, text = unit_features(8)
    objective.compute(image, text, sample_ids=torch.arange(8))
    objective.commit()
    cold, _, tau = objective.log_normalizers(image, text, sample_ids=torch.arange(8))
    log_lambda = objective.predict((image, text))
    logit = (image * text).sum(1) / tau[0]
    for side in (0, 1):  # lambda predicts E = exp(s_ii / tau) (g + kappa) / (1 + kappa), kappa = 3 / 7
        expected = torch.exp(log_lambda[side] - logit) * (1 + 3 / 7)
        assert relative_error(torch.exp(cold[side]), expected) < 1e-12
