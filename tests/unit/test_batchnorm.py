"""Batch norm in bf16 and with feature-cached gradient accumulation (GradCache)."""

from __future__ import annotations

import copy

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from pipeline.model.image_tower import Fp32BatchNorm2d, use_fp32_batch_norms
from pipeline.training.step import frozen_statistics
from tests.metrics import equal


def pair() -> tuple[nn.BatchNorm2d, nn.BatchNorm2d]:
    """Return torch's batch norm and ours, with the same state."""
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(5)
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    ours = nn.Sequential(copy.deepcopy(plain))
    use_fp32_batch_norms(ours)
    assert type(ours[0]) is Fp32BatchNorm2d
    return plain, ours[0]  # type: ignore[return-value]


def test_a_module_with_two_names_is_replaced_under_both() -> None:
    norm = nn.BatchNorm2d(5)
    model = nn.Sequential(norm, nn.ReLU(), norm)
    use_fp32_batch_norms(model)
    assert model[0] is model[2]
    assert type(model[0]) is Fp32BatchNorm2d


@pytest.mark.parametrize("training", [True, False])
def test_fp32_output_equals_torch(training: bool) -> None:
    plain, ours = pair()
    x = torch.randn(6, 5, 3, 3)
    for norm in (plain, ours):
        norm.train()
        norm(x + 1)
        norm.train(training)
    assert torch.equal(plain(x), ours(x))
    assert equal(plain.state_dict(), ours.state_dict())


def test_bf16_weights_keep_fp32_statistics_and_get_gradients() -> None:
    plain, ours = pair()
    ours.weight.data, ours.bias.data = ours.weight.data.bfloat16(), ours.bias.data.bfloat16()
    x = torch.randn(6, 5, 3, 3)
    out = ours(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert ours.running_mean is not None
    assert ours.running_mean.dtype == torch.float32
    torch.testing.assert_close(out.float(), plain(x), atol=0.05, rtol=0.05)
    out.float().square().sum().backward()
    assert ours.weight.grad is not None
    assert ours.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("training", [True, False])
def test_timms_batch_norm_with_an_activation_trains_in_bf16(training: bool) -> None:
    """Regression test: it was left as it is, and MobileCLIP could not be trained in bf16."""
    torch.manual_seed(0)
    plain = BatchNormAct2d(5)
    nn.init.normal_(plain.weight)
    ours = nn.Sequential(copy.deepcopy(plain)).train(training)
    plain.train(training)
    use_fp32_batch_norms(ours)
    x = torch.randn(6, 5, 3, 3)
    assert torch.equal(ours(x), plain(x))
    assert equal(ours[0].state_dict(), plain.state_dict())
    for parameter in ours.parameters():
        parameter.data = parameter.data.bfloat16()
    torch.testing.assert_close(ours(x.bfloat16()).float(), plain(x), atol=0.05, rtol=0.05)


def test_frozen_statistics_normalise_by_the_batch_and_keep_the_state() -> None:
    _, ours = pair()
    x = torch.randn(6, 5, 3, 3)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    with frozen_statistics([ours]):
        inside = ours(x)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    assert torch.equal(inside, ours(x))
    assert not torch.equal(ours.state_dict()["running_mean"], before["running_mean"])
