"""`openclip` and `siglip` match open_clip's losses in one process."""

from __future__ import annotations

import math

import pytest
import torch
from open_clip.loss import ClipLoss, SigLipLoss

from pipeline.objectives import build_objective
from tests.unit.objectives_reference import context, relative_error, unit_features


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("batch_size", [2, 3, 17, 64])
def test_openclip_matches_clip_loss(batch_size, dtype, tolerance):
    objective = build_objective("openclip", context=context(batch_size, dtype=dtype))
    image, text = (f.requires_grad_() for f in unit_features(batch_size, dtype=dtype))
    output = objective.compute(image.detach(), text.detach(), sample_ids=torch.arange(batch_size))
    log_scale = torch.tensor(objective.logit_parameters()[0], dtype=dtype, requires_grad=True)
    loss = ClipLoss()(image, text, log_scale.exp())
    expected = torch.autograd.grad(loss, [image, text, log_scale])
    ours = [output.grad_image, output.grad_text, -objective.temperature.value() * objective._pending.tau_gradient]
    assert relative_error(output.loss, loss) < tolerance
    for mine, theirs in zip(ours, expected, strict=True):
        assert relative_error(mine, theirs) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("batch_size", [2, 3, 17, 64])
@pytest.mark.parametrize("bias", [-10.0, -1.5])
def test_siglip_matches_siglip_loss(batch_size, bias, dtype, tolerance):
    objective = build_objective({"name": "siglip", "bias_init": bias}, context=context(batch_size, dtype=dtype))
    image, text = (f.requires_grad_() for f in unit_features(batch_size, dtype=dtype))
    output = objective.compute(image.detach(), text.detach(), sample_ids=torch.arange(batch_size))
    log_scale, shift = (torch.tensor(x, dtype=dtype, requires_grad=True) for x in objective.logit_parameters())
    loss = SigLipLoss()(image, text, log_scale.exp(), shift)
    expected = torch.autograd.grad(loss, [image, text, log_scale, shift])
    tau_gradient, bias_gradient = objective._pending
    ours = [output.grad_image, output.grad_text, -objective.temperature.value() * tau_gradient, bias_gradient]
    assert relative_error(output.loss, loss) < tolerance
    for mine, theirs in zip(ours, expected, strict=True):
        assert relative_error(mine, theirs) < tolerance


def test_openclip_defaults_match_open_clip():
    objective = build_objective("openclip", dim=8, batch_size=4)
    assert objective.logit_parameters()[0] == pytest.approx(math.log(1 / 0.07), abs=1e-6)
    assert 1 / objective.config.tau_min == pytest.approx(100)
