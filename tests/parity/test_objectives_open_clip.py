"""`openclip` and `siglip` match open_clip's losses in one process."""

import math

import pytest
import torch
from open_clip.loss import ClipLoss, SigLipLoss

from pipeline.objectives import build_objective
from tests.unit.objectives_reference import context, relative_error, unit_features


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("batch_size", [2, 3, 17, 64])
@pytest.mark.parametrize("bias", [None, -10.0, -1.5], ids=["openclip", "siglip", "siglip-1.5"])
def test_losses_and_gradients_match_open_clips(bias, batch_size, dtype, tolerance):
    settings = {"name": "openclip"} if bias is None else {"name": "siglip", "bias_init": bias}
    objective = build_objective(settings, context=context(batch_size, dtype=dtype))
    image, text = (f.requires_grad_() for f in unit_features(batch_size, dtype=dtype))
    output = objective.compute(image.detach(), text.detach(), sample_ids=torch.arange(batch_size))
    known = [value for value in objective.logit_parameters() if value is not None]
    log_scale, *shift = (torch.tensor(value, dtype=dtype, requires_grad=True) for value in known)
    loss = (ClipLoss() if bias is None else SigLipLoss())(image, text, log_scale.exp(), *shift)
    expected = torch.autograd.grad(loss, [image, text, log_scale, *shift])
    pending = objective._pending
    tau_gradient, *to_bias = (pending.tau_gradient,) if bias is None else pending
    ours = [output.grad_image, output.grad_text, -objective.temperature.value() * tau_gradient, *to_bias]
    assert relative_error(output.loss, loss) < tolerance
    for mine, theirs in zip(ours, expected, strict=True):
        assert relative_error(mine, theirs) < tolerance


def test_openclip_defaults_match_open_clip():
    objective = build_objective("openclip", dim=8, batch_size=4)
    assert objective.logit_parameters()[0] == pytest.approx(math.log(1 / 0.07), abs=1e-6)
    assert 1 / objective.config.tau_min == pytest.approx(100)
