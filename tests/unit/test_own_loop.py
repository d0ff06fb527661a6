"""An objective in someone else's training loop: wrong inputs are refused, the temperature is copied."""

from __future__ import annotations

import warnings

import open_clip
import pytest
import torch
import torch.nn.functional as F

import neuclip

B, D = 6, 8


def features(rows: int = B, dim: int = D) -> torch.Tensor:
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(0)), dim=1)


@pytest.mark.parametrize(
    ("image", "text", "ids", "message"),
    [
        (features(dim=4), features(dim=4), torch.arange(B), r"shapes \(6, 4\) .* and \(6, 4\) .*\[b, 8\]"),
        (features().numpy(), features(), torch.arange(B), r"Features are ndarray: both have to be tensors .*\[b, 8\]"),
        (features(), features(rows=5), torch.arange(B), r"\(6, 8\) \(image\) and \(5, 8\) \(text\)"),
        (features()[0], features()[0], torch.arange(B), r"shapes \(8,\)"),
        (features(), features(), torch.arange(B).float(), r"sample_ids is torch.float32 of shape \(6,\).*torch.int64"),
        (features(), features(), list(range(B)), r"sample_ids is list: .* shape \(6,\)"),
        (features(), features(), torch.arange(5), r"of shape \(5,\).*shape \(6,\)"),
        (features(), features(), None, "keeps state per sample"),
    ],
)
def test_wrong_inputs_are_refused(image: torch.Tensor, text: torch.Tensor, ids: torch.Tensor, message: str) -> None:
    objective = neuclip.build_objective("sogclr", dim=D, batch_size=B, dataset_size=10)
    with pytest.raises(neuclip.UserError, match=message):
        objective.loss(image, text, sample_ids=ids)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"batch_size": 0, "dataset_size": 5}, "batch_size = 0: has to be an integer, 1 or more"),
        ({"batch_size": "8", "dataset_size": 5}, "batch_size = '8': has"),
        ({"dim": 8.0}, r"dim = 8\.0: has"),
        ({"dataset_size": None}, "dataset_size = None: has to be an integer, 0 or more"),
        ({"dataset_size": 5, "seed": -1}, "seed = -1: has to be an integer, 0 or more"),
        ({"tau_init": 0.05}, r'does not know tau_init\. .*\{"name": "neuclip", "tau_init": 0.05\}'),
    ],
)
def test_wrong_facts_are_refused(facts: dict[str, object], message: str) -> None:
    with pytest.raises(neuclip.UserError, match=message):
        neuclip.build_objective("openclip", **{"dim": D, "batch_size": B, **facts})


def test_features_that_are_not_normalized_are_reported_once() -> None:
    objective = neuclip.build_objective("openclip", dim=D, batch_size=B)
    with pytest.warns(UserWarning, match="length 1, and those of the first batch differ by up to 9"):
        objective.loss(10 * features(), features())
    objective.commit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective.loss(10 * features(), features())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        neuclip.build_objective("openclip", dim=D, batch_size=B).loss(features().bfloat16(), features().bfloat16())


def test_the_temperature_is_copied_into_the_model() -> None:
    image = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16}
    text = {"layers": 1, "width": 16, "heads": 2, "context_length": 4, "vocab_size": 16}
    model = open_clip.model.CLIP(D, image, text)
    objective = neuclip.build_objective({"name": "neuclip", "tau_init": 0.05}, dim=D, batch_size=B, dataset_size=10)
    objective.apply_to(model)
    assert model.logit_scale.exp().item() == pytest.approx(20)
    siglip = neuclip.build_objective("siglip", dim=D, batch_size=B)
    with pytest.raises(neuclip.UserError, match="has no logit_bias, which would be -10"):
        siglip.apply_to(model)
    with pytest.raises(neuclip.UserError, match="Linear has no logit_scale"):
        objective.apply_to(torch.nn.Linear(1, 1))
