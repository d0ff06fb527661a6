"""Loss and every gradient in float64, compared with autograd of the loss as written."""

import math

import pytest
import torch

from pipeline.objectives import build_objective
from pipeline.objectives.npn import prototypes
from pipeline.objectives.npn.reference import predicted_log_normalizers
from tests.unit.objectives_reference import assert_exact, context, normalizers, relative_error, unit_features

BATCHES = (2, 3, 17, 64)
EXACT = 1e-10


@pytest.mark.parametrize("batch_size", BATCHES)
@pytest.mark.parametrize("stop_gradient", [True, False])
def test_neuclip_equals_equation_12(batch_size, stop_gradient, monkeypatch):
    monkeypatch.setattr(prototypes, "_CPU_BLOCK", 7 * 5)  # blocks of five anchors
    settings = {"name": "neuclip", "prototypes": 7, "inner_steps": 3, "ratio_cap": 0, "stop_gradient": stop_gradient}
    objective = build_objective(settings, context=context(batch_size))
    image, text = (f.requires_grad_() for f in unit_features(batch_size))
    output = objective.compute(image.detach(), text.detach(), sample_ids=torch.arange(batch_size))

    tau = objective.temperature.value().requires_grad_()
    loss = 2 * tau * (objective.config.rho - 1)
    for side, g in enumerate(normalizers(image, text, (tau, tau))):
        own, partner = ((image, text), (text, image))[side]
        alpha = predicted_log_normalizers(own, partner, objective.npn.weight(side), tau=tau, eps=1e-14)
        alpha = alpha.detach() if stop_gradient else alpha
        loss = loss + tau * (torch.exp(-alpha) * (1e-14 + g) + alpha).mean()
    assert_exact(objective, output, loss, image, text, tau)


@pytest.mark.parametrize("batch_size", BATCHES)
@pytest.mark.parametrize("name", ["sogclr", "isogclr", "fastclip_v0", "fastclip_v1", "fastclip_v2", "fastclip_v3"])
def test_estimator_methods_have_the_gradients_of_their_papers(name, batch_size):
    """The third step on overlapping ids, so that averages, temperatures and first visits all matter."""
    objective = build_objective({"name": name, "gamma_schedule": "constant", "gamma": 0.3}, context=context(batch_size))
    log_u: dict[int, list[float]] = {}
    for step in range(3):
        ids = (torch.arange(batch_size) + step * (batch_size // 2)) % (4 * batch_size)
        image, text = (f.requires_grad_() for f in unit_features(batch_size, seed=step))
        rows = objective.table.owned()[ids].double()
        tau = _temperatures(objective, rows)
        g = normalizers(image, text, tau)
        u = []
        for side in (0, 1):
            old = torch.tensor([log_u.get(int(i), [math.nan] * 2)[side] for i in ids]).double()
            u.append(torch.where(old.isnan(), g[side], 0.7 * old.exp() + 0.3 * g[side]).detach())
        output = objective.compute(image.detach(), text.detach(), sample_ids=ids)
        value, surrogate = _written(objective, tau, g, u)
        expected = torch.autograd.grad(surrogate, [image, text], retain_graph=True)
        assert relative_error(output.loss, value) < EXACT
        assert relative_error(output.grad_image, expected[0]) < EXACT
        assert relative_error(output.grad_text, expected[1]) < EXACT
        _check_temperature_gradient(objective, surrogate, value, tau)
        objective.commit(lr_scale=1.0)
        log_u |= {int(i): row[:2].tolist() for i, row in zip(ids, objective.table.owned()[ids], strict=True)}
        assert torch.allclose(objective.table.owned()[ids][:, :2].double().exp(), torch.stack(u, 1), rtol=2e-6)


def test_the_published_v3_gradient_counts_the_normalizer_derivatives_twice():
    found = {}
    for kind in ("equation", "published_code"):
        objective = build_objective({"name": "fastclip_v3", "tau_gradient": kind, "rho": 2.0}, context=context(17))
        image, text = unit_features(17)
        output = objective.compute(image, text, sample_ids=torch.arange(17))
        found[kind] = output, objective._pending.tau_gradient
    tau = torch.tensor(0.07, dtype=torch.float64, requires_grad=True)  # a first visit: u = g
    log_g = [torch.log(1e-14 + g) for g in normalizers(image, text, (tau, tau))]
    inside = (log_g[0] + log_g[1]).mean() + 2 * 2.0
    slope = torch.autograd.grad(inside, tau)[0]
    assert relative_error(found["equation"][1], inside + 0.07 * slope) < EXACT
    assert relative_error(found["published_code"][1], inside + 2 * 0.07 * slope) < EXACT
    assert torch.equal(found["equation"][0].grad_image, found["published_code"][0].grad_image)


def _temperatures(objective, rows):
    if rows.shape[1] > 2:
        return tuple(rows[:, 2 + side].clone().requires_grad_() for side in (0, 1))
    tau = objective.temperature.of_anchors(1, None)[0][0].clone().requires_grad_()
    return tau, tau


def _written(objective, tau, g, u):
    """Return the reported value, and a function whose gradient is the estimator of the paper (u constant)."""
    scale, rho = (1.0, 1.0), getattr(objective.config, "rho", 0.0)
    scale = scale if objective.config.name == "fastclip_v0" else tau
    value = sum((s * (torch.log(1e-14 + x) + rho)).mean() for s, x in zip(scale, u, strict=True))
    surrogate = value + sum(
        (torch.as_tensor(s).detach() * x / (1e-14 + y)).mean() for s, x, y in zip(scale, g, u, strict=True)
    )
    return value, surrogate


def _check_temperature_gradient(objective, surrogate, value, tau):
    name = objective.config.name
    if name in ("sogclr", "fastclip_v1"):
        return
    if name in ("isogclr", "fastclip_v2"):  # the paper omits the 1/n: the batch mean contributes 1/B
        expected = torch.stack(torch.autograd.grad(surrogate, list(tau)), 1) * len(tau[0])
        assert relative_error(objective._pending.tau_gradient, expected) < EXACT
        return
    expected = torch.autograd.grad(surrogate, tau[0])[0]
    assert relative_error(objective._pending.tau_gradient, expected) < EXACT


@pytest.mark.parametrize("batch_size", BATCHES)
@pytest.mark.parametrize("rho", [None, 0.5])
def test_dcl_equals_its_formula_and_the_robust_loss_of_a_single_batch(batch_size, rho):
    """Yeh et al., equation 6, for both sides; with rho, the temperature's gradient is that of tau (loss + rho)."""
    objective = build_objective({"name": "dcl", "rho": rho, "tau_lr": 1e-3}, context=context(batch_size))
    image, text = (f.requires_grad_() for f in unit_features(batch_size))
    ids = torch.arange(batch_size)
    output = objective.compute(image.detach(), text.detach(), sample_ids=ids)
    tau = torch.tensor(0.07, dtype=torch.float64, requires_grad=True)
    logits, own = image @ text.T / tau, torch.eye(batch_size, dtype=torch.bool)
    loss = sum((z.masked_fill(own, -math.inf).logsumexp(1) - z.diagonal()).mean() for z in (logits, logits.T)) / 2
    assert_exact(objective, output, loss, image, text, *([tau] if rho is None else []))
    settings = {"name": "fastclip_v3", "gamma_schedule": "constant", "gamma": 1.0, "rho": rho or 1.0}
    robust = build_objective(settings, context=context(batch_size))
    same = robust.compute(image.detach(), text.detach(), sample_ids=ids)
    assert relative_error(same.grad_image, 2 * 0.07 * output.grad_image) < EXACT
    if rho is not None:
        assert relative_error(robust._pending.tau_gradient, 2 * objective._pending.tau_gradient) < EXACT


def test_the_published_adam_of_fastclip_v2_divides_by_the_second_moment():
    """The first step of a sample: bias-corrected moments are the gradient and its square."""
    settings = {"name": "fastclip_v2", "rho": 1.0, "tau_lr": 1e-3, "tau_optimizer": "published_code"}
    objective, ids = build_objective(settings, context=context(17)), torch.arange(17)
    before = objective.table.owned()[ids][:, 2:4].double()
    objective.compute(*unit_features(17), sample_ids=ids)
    gradient = objective._pending.tau_gradient
    objective.commit(lr_scale=1.0)
    expected = (before - 1e-3 * gradient / (gradient.square() + 1e-8)).clamp(0.005, 1.0)
    assert relative_error(objective.table.owned()[ids][:, 2:4].double(), expected) < 1e-6
