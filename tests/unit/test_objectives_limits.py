"""Limiting cases in which methods agree with each other, and computation in row blocks."""

import math

import pytest
import torch

from pipeline.objectives import build_objective, objective_names, pairwise
from pipeline.objectives.sogclr import gamma_at
from tests.unit.objectives_reference import context, normalizers, relative_error, unit_features


def gradients(settings, batch_size=16, **facts):
    objective = build_objective(settings, context=context(batch_size, **facts))
    image, text = unit_features(batch_size, dtype=facts.get("dtype", torch.float64))
    return objective.compute(image, text, sample_ids=torch.arange(batch_size))


@pytest.mark.parametrize("name", [*objective_names()])
@pytest.mark.filterwarnings("ignore:objective.npn_lr")
def test_row_blocks_do_not_change_the_result(name, monkeypatch):
    whole = gradients(name, dtype=torch.float32)
    # A rounding error of 6e-8 in s changes exp(s / tau) by 6e-8 / tau, here 2e-6 at tau = 0.03; AdaGrad at lr 1 moves
    # prototypes by the sign of a rounding error.
    tolerance = 2e-5 if name == "neuclip_literal" else 6e-6
    monkeypatch.setattr(pairwise, "CPU_BLOCK", 1)
    for rows in (1, 5, 7):  # one row per block; block sizes that do not divide the batch
        monkeypatch.setattr(pairwise, "LEAST_ROWS", rows)
        blocks = gradients(name, dtype=torch.float32)
        assert torch.allclose(whole.loss, blocks.loss, rtol=1e-6)
        scale = whole.grad_image.abs().max()
        assert (whole.grad_image - blocks.grad_image).abs().max() < tolerance * scale
        assert (whole.grad_text - blocks.grad_text).abs().max() < tolerance * scale


def test_gamma_falls_from_one_to_its_minimum_by_default_over_half_of_the_epochs():
    for total_steps in (80, 89):  # a ninth epoch has begun
        objective = build_objective("fastclip_v3", context=context(8, steps_per_epoch=10, total_steps=total_steps))
        values = [gamma_at(objective.config, objective.context, step=step) for step in (0, 9, 10, 20, 30, 40, 79)]
        first, third = (0.4 * (1 + sign * math.sqrt(0.5)) + 0.2 for sign in (1, -1))
        assert values == pytest.approx([1.0, 1.0, first, 0.6, third, 0.2, 0.2])


def test_temperature_stays_within_bounds_and_v3_slows_below_the_threshold():
    for name, tau_init in (("openclip", 0.0101), ("fastclip_v3", 0.0101)):
        objective = build_objective({"name": name, "tau_init": tau_init, "tau_lr": 0.5}, context=context(8))
        for sign in (1.0, -1.0):
            for _ in range(30):
                objective.temperature.update(torch.tensor(sign).double(), lr_scale=1.0)
            bound = objective.config.tau_min if sign > 0 else 1.0
            assert float(objective.temperature.value()) == pytest.approx(bound)
    for tau, rate in ((0.0301, 2e-4), (0.0299, 2e-4 / 3)):
        objective = build_objective({"name": "fastclip_v3", "tau_init": tau}, context=context(8))
        assert objective.temperature.rate(lr_scale=1.0).item() == pytest.approx(rate)


@pytest.mark.parametrize("api", ["older", "newer", "all"])
def test_tf32_in_the_caller_does_not_affect_the_loss(monkeypatch, api):
    """The older interface can be read inside, whichever of the two the caller used."""
    seen, real, matmul, onednn = (
        [],
        pairwise.anchor_statistics,
        torch.backends.cuda.matmul,
        torch.backends.mkldnn.matmul,
    )

    def watching(*args, **kwargs):
        older = (matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())
        seen.append((matmul.fp32_precision, onednn.fp32_precision, *older))
        return real(*args, **kwargs)

    monkeypatch.setattr(pairwise, "anchor_statistics", watching)
    before = (matmul.fp32_precision, onednn.fp32_precision)
    try:
        if api == "older":
            torch.set_float32_matmul_precision("high")
        elif api == "all":
            torch.backends.fp32_precision = "tf32"
        else:
            matmul.fp32_precision, onednn.fp32_precision = "tf32", "bf16"
        given = (matmul.fp32_precision, onednn.fp32_precision)
        gradients("neuclip")
        assert (matmul.fp32_precision, onednn.fp32_precision) == given
        assert torch.backends.cudnn.allow_tf32  # torch's default, and its own again
        assert api != "older" or torch.get_float32_matmul_precision() == "high"
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision, onednn.fp32_precision = before
    assert "tf32" in given
    assert seen == [("ieee", "ieee", False, False, "highest")] * 2


@pytest.mark.parametrize("name", ["openclip", "siglip", "fastclip_v3", "amorlip", "neuclip", "neuclip_literal"])
def test_autocast_in_the_caller_does_not_affect_the_loss(name):
    def run(*, autocast):
        objective = build_objective({"name": name}, context=context(8, dtype=torch.float32))
        found = []
        for step in range(3):
            image, text = unit_features(8, 16, seed=step, dtype=torch.float32)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                output = objective.compute(image, text, sample_ids=torch.arange(8))
                objective.commit()
            found += [output.loss, output.grad_image, output.grad_text]
        return found

    assert all(torch.equal(a, b) for a, b in zip(run(autocast=True), run(autocast=False), strict=True))


@pytest.mark.parametrize("name", ["openclip", "fastclip_v3", "amorlip", "neuclip"])
def test_normalizer_estimates_use_lasting_state_and_do_not_change_it(name):
    settings = {"name": name} | ({"prototypes": 16, "inner_steps": 0} if name == "neuclip" else {})
    objective = build_objective(settings, context=context(16))
    image, text = unit_features(16)
    ids = torch.arange(16)
    objective.compute(image, text, sample_ids=ids)
    objective.commit(lr_scale=0.0)
    before = objective.state_dict()
    cold, in_use, taus = objective.log_normalizers(image, text, sample_ids=ids)
    assert all(torch.equal(value, before[key]) for key, value in objective.state_dict().items())
    tau = objective.temperature.value()
    assert torch.equal(taus[0], tau.expand(16))
    for side, g in enumerate(normalizers(image, text, (tau, tau))):
        if name == "neuclip":  # the prototypes are this very batch
            positives = (1 + (15 * g)).log() - math.log(16)
            assert torch.allclose(cold[side], positives)
        elif name == "amorlip":
            assert (cold[side] - g.log()).mean().abs() < 0.5  # a new network predicts only the mean
        else:
            assert torch.allclose(cold[side], g.log(), rtol=1e-6)
        if name == "openclip":  # excludes the positive
            assert relative_error(in_use[side], g.log()) < 1e-9
    other = objective.log_normalizers(*unit_features(16, seed=1), sample_ids=ids)[0]
    if name == "fastclip_v3":  # u belongs to the sample, not to the features
        assert torch.equal(other[0], cold[0])
    else:
        assert not torch.equal(other[0], cold[0])
