"""State updates over several steps compared with torch.optim: temperatures, biases, auxiliary networks."""

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.objectives import build_objective, sogclr
from pipeline.objectives.npn import amorlip, mlp
from pipeline.objectives.npn.reference import predicted_log_normalizers
from tests.unit.objectives_reference import context, normalizers, relative_error, unit_features

BATCH, IDS, EPS = 8, torch.arange(8), 1e-14


@pytest.mark.parametrize(("tau", "falls"), [(0.07, False), (0.02, True)])
def test_global_temperatures_equal_torch_adam_on_the_log(tau, falls):
    settings = {"name": "openclip", "tau_init": tau, "tau_lr": 0.05, "tau_lr_fall": 0.5}
    temperature = build_objective(settings, context=context(BATCH, adam_eps=1e-3)).temperature
    log_scale = torch.tensor(math.log(1 / tau), dtype=torch.float64, requires_grad=True)
    peer = torch.optim.Adam([log_scale], lr=0.05 * (0.5 if falls else 1.0), betas=(0.9, 0.98), eps=1e-3)
    for to_tau in (1.0, -0.3, 0.02, 0.5):
        log_scale.grad = torch.autograd.grad(to_tau * torch.exp(-log_scale), log_scale)[0]
        peer.step()
        temperature.update(torch.tensor(to_tau).double(), lr_scale=1.0)
        assert float(temperature.log_scale.value) == pytest.approx(log_scale.item(), rel=1e-7)  # the rate is fp32


@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
@pytest.mark.parametrize(("lr", "lowest", "highest"), [(1e-2, 0.005, 1.0), (0.2, 0.029, 0.031)])
def test_per_sample_temperatures_equal_torch_optimizers(optimizer, lr, lowest, highest, monkeypatch):
    monkeypatch.setattr(sogclr, "TAU_MAX", highest)
    settings = {"name": "isogclr", "tau_optimizer": optimizer, "tau_lr": lr, "tau_min": lowest}
    objective = build_objective({**settings, "rho": 2.0}, context=context(BATCH))
    tau, moment = torch.full((BATCH, 2), 0.03).double().requires_grad_(), torch.zeros(BATCH, 2).double()
    peer, met = torch.optim.Adam([tau], lr=lr * 0.5, betas=(0.9, 0.98), eps=1e-8), set()
    for step in range(5):
        objective.compute(*unit_features(BATCH, seed=step), sample_ids=IDS)
        tau.grad = objective._pending.tau_gradient.clone()
        objective.commit(lr_scale=0.5)
        with torch.no_grad():
            if optimizer == "adam":
                peer.step()
            else:
                moment.lerp_(tau.grad, 0.1)
                tau -= lr * 0.5 * moment
            tau.clamp_(lowest, highest)
        assert torch.allclose(objective.table.owned()[:BATCH, 2:4].double(), tau, rtol=1e-5)
        met |= set(tau.detach().flatten().tolist())
    assert lr < 0.1 or {lowest, highest} <= met


def test_the_siglip_bias_follows_its_gradient():
    objective = build_objective("siglip", context=context(BATCH))
    objective.compute(*unit_features(BATCH), sample_ids=IDS)
    direction, before = float(objective._pending[1].sign()), objective.logit_parameters()[1]
    objective.commit(lr_scale=0.5)
    assert objective.logit_parameters()[1] - before == pytest.approx(
        -direction * objective.config.tau_lr * 0.5, rel=1e-4
    )


def test_the_upstream_gradient_scales_the_feature_gradients():
    image, text = (f.requires_grad_() for f in unit_features(BATCH, dtype=torch.float32))
    objective = build_objective("openclip", dim=16, batch_size=BATCH)
    once = torch.autograd.grad(objective.loss(image, text), [image, text])
    objective.discard()
    thrice = torch.autograd.grad(3 * objective.loss(image, text), [image, text])
    assert all(torch.allclose(b, 3 * a) for a, b in zip(once, thrice, strict=True))


class Network(nn.Module):
    """The MLP of AmorLIP's code, built from torch layers."""

    def __init__(self, parameters, side):
        super().__init__()
        dim = parameters["linear1.weight"].shape[-1]
        self.linear1, self.linear2, self.head = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 1)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.double().load_state_dict({name: value[side] for name, value in parameters.items()})

    def forward(self, features):
        hidden = self.norm1(self.linear1(features).relu())
        hidden = self.norm2(self.linear2(hidden).relu())
        return self.head((hidden + features).relu())[:, 0]


def lambda_of(objective, output, side, weight):
    """Return the log lambda in use, computed from the reported log-normalizer."""
    kappa = weight / (BATCH - 1)
    logit = output.distributions["similarity_of_pair"] / objective.temperature.value()
    return output.distributions[f"log_normalizer_of_{('image', 'text')[side]}"] + logit - math.log1p(kappa)


@pytest.mark.parametrize("cap", [0.0, 1.05])
def test_amorlip_networks_match_their_description(cap, monkeypatch):
    """Three epochs of three steps: restarts, targets mixed with the previous epoch, averages, the ratio cap.

    The share of the previous epoch's network rises by a cosine, to 0.8 in the middle of the run's four epochs.
    """
    monkeypatch.setattr(amorlip, "POSITIVE_WEIGHT", 0.5)
    settings = {"inner_steps": 2, "ratio_cap": cap}
    c = context(BATCH, steps_per_epoch=3, total_steps=12)
    objective = build_objective({"name": "amorlip", "tau_lr": 0.0, **settings}, context=c)
    tau, bound = 0.07, 0
    nets: list[Network] = []
    average: list[Network] = []
    for step in range(9):
        features = unit_features(BATCH, seed=step)
        epoch, within = divmod(step, 3)
        similarity = features[0] @ features[1].T / tau
        weights = (torch.ones(BATCH, BATCH).double().fill_diagonal_(0.5) / (BATCH - 0.5)).log()
        means = [(s + weights).logsumexp(1) for s in (similarity, similarity.T)]
        if within == 0:
            previous, fresh = average, mlp.initial_parameters(c, restart=epoch)
            fresh["head.bias"] = torch.stack([mean.mean()[None] for mean in means])
            nets = [Network(fresh, side) for side in (0, 1)]
            average = copy.deepcopy(nets)
            peers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net in nets]
        share = (0.0, 0.4, 0.8)[epoch]
        output = objective.compute(*features, sample_ids=IDS)
        gaps, ratios = [], []
        for side in (0, 1):
            target = means[side]
            if share > 0:
                target = torch.log((1 - share) * target.exp() + share * previous[side](features[side]).exp()).detach()
            for _ in range(2):
                peers[side].zero_grad()
                (nets[side](features[side]) - target).square().mean().backward()
                peers[side].step()
            if step % 2 == 0:
                for mean, now in zip(average[side].parameters(), nets[side].parameters(), strict=True):
                    mean.data.mul_(0.92).add_(now.data, alpha=0.08)
            predicted = average[side](features[side]).detach()
            expected = torch.maximum(predicted, means[side] - math.log(cap)) if cap else predicted
            bound += int((expected > predicted).sum())
            gaps.append((predicted - means[side]).abs())
            ratios.append(torch.exp(means[side] - expected))
            assert torch.allclose(lambda_of(objective, output, side, 0.5), expected, rtol=1e-9, atol=1e-9), (step, side)
        assert float(output.metrics["ratio_max"]) == pytest.approx(float(torch.cat(ratios).max()), rel=1e-9)
        assert float(output.metrics["normalizer_gap"]) == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-9)
        objective.commit()
    assert (bound > 0) == (cap > 0)
    predicted = objective.predict(tuple(features))
    assert all(torch.allclose(predicted[side], average[side](features[side]), rtol=1e-9) for side in (0, 1))


def alpha_of(net, own, partner, tau=0.07):
    """Equations (10) and (11), or their counterpart for an MLP."""
    if isinstance(net, Tensor):
        return predicted_log_normalizers(own, partner, net, tau=torch.tensor(tau, dtype=torch.float64), eps=EPS)
    return torch.log(EPS + torch.exp(net(own) - (own * partner).sum(1) / tau))


@pytest.mark.parametrize(
    ("optimizer", "lr", "make"),
    [
        ("adagrad", 0.05, lambda p: torch.optim.Adagrad(p, lr=0.05)),
        ("adam", 0.01, lambda p: torch.optim.Adam(p, lr=0.01)),
    ],
)
@pytest.mark.parametrize("npn", ["prototypes", "mlp"])
@pytest.mark.parametrize("schedule", ["alternating", "simultaneous"])
def test_neuclip_networks_equal_torch_optimizers_on_equation_12(npn, schedule, optimizer, lr, make):
    inner = 1 if schedule == "simultaneous" else 3
    settings = {"npn": npn, "npn_schedule": schedule, "npn_optimizer": optimizer, "npn_lr": lr, "inner_steps": inner}
    c = context(BATCH)
    objective = build_objective(
        {"name": "neuclip", "prototypes": BATCH, "restart_every": 0, "ratio_cap": 0, "tau_lr": 0.0, **settings},
        context=c,
    )
    tau = torch.tensor(0.07, dtype=torch.float64)
    nets: list[Any] = []
    for step in range(4):
        features = unit_features(BATCH, seed=step)
        if step == 0:
            first = [features[1].clone().requires_grad_(), features[0].clone().requires_grad_()]
            nets = first if npn == "prototypes" else [Network(mlp.initial_parameters(c), side) for side in (0, 1)]
            peers = [make([net] if npn == "prototypes" else net.parameters()) for net in nets]
        if step == 1 and npn == "prototypes":  # lengths other than 1, different on the two sides
            with torch.no_grad():
                for side, net in enumerate(nets):
                    net *= 2.0 + side
                    objective.npn.network.lasting["weight"][side] *= 2.0 + side
        output = objective.compute(*features, sample_ids=IDS)
        for side, g in enumerate(normalizers(*features, (tau, tau))):
            alpha = functools.partial(alpha_of, nets[side], features[side], features[1 - side])
            before = alpha().detach()
            for _ in range(inner):
                peers[side].zero_grad()
                value = alpha()
                (tau * (torch.exp(-value) * (EPS + g) + value)).mean().backward()
                peers[side].step()
            used = before if schedule == "simultaneous" else alpha().detach()
            found = output.distributions[f"log_normalizer_of_{('image', 'text')[side]}"]
            assert relative_error(found, used) < 1e-8, (step, side)
        objective.commit()
    assert int(objective.npn.network.updates) == 4 * inner


@pytest.mark.parametrize("stop_gradient", [False, True])
def test_the_cap_applies_to_loss_and_all_gradients(stop_gradient):
    """alpha is raised to log(eps + g) - log cap; the gradient through it is computed with the capped ratio."""
    settings = {"name": "neuclip", "prototypes": BATCH, "inner_steps": 2, "npn_lr": 0.5, "ratio_cap": 1.3}
    objective = build_objective({**settings, "stop_gradient": stop_gradient}, context=context(BATCH))
    image, text = (f.requires_grad_() for f in unit_features(BATCH))
    output = objective.compute(image.detach(), text.detach(), sample_ids=IDS)
    tau = objective.temperature.value().requires_grad_()
    loss, surrogate, held, ratios = 2 * tau * (objective.config.rho - 1), 0.0, 0, []
    for side, g in enumerate(normalizers(image, text, (tau, tau))):
        own, partner = ((image, text), (text, image))[side]
        predicted = predicted_log_normalizers(own, partner, objective.npn.weight(side), tau=tau, eps=EPS)
        lowest = torch.log(EPS + g).detach() - math.log(1.3)
        held += int((predicted < lowest).sum())
        used = torch.maximum(predicted.detach(), lowest)
        ratio = (torch.exp(-used) * (EPS + g)).detach()
        ratios.append(ratio)
        loss = loss + tau * (torch.exp(-used) * (EPS + g) + used).mean()
        if not stop_gradient:
            surrogate = surrogate + (tau.detach() * (1 - ratio) * (predicted - predicted.detach())).mean()
    uncapped = build_objective({**settings, "ratio_cap": 0}, context=context(BATCH))
    uncapped.compute(image.detach(), text.detach(), sample_ids=IDS)
    assert all(torch.equal(objective.npn.weight(side), uncapped.npn.weight(side)) for side in (0, 1)), "the updates"
    assert 0 < held < 2 * BATCH
    expected = torch.autograd.grad(loss + surrogate, [image, text, tau])
    found = (output.grad_image, output.grad_text, objective._pending.tau_gradient)
    assert relative_error(output.loss, loss) < 1e-10
    assert all(relative_error(a, b) < 1e-10 for a, b in zip(found, expected, strict=True))
    assert float(output.metrics["ratio_max"]) == pytest.approx(float(torch.cat(ratios).max()), rel=1e-10)
    lengths = torch.stack([objective.npn.weight(side).norm(dim=1).mean() for side in (0, 1)])
    assert float(output.metrics["prototype_norm"]) == pytest.approx(float(lengths.mean()), rel=1e-12)
