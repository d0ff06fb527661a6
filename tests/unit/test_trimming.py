"""Trimmed texts: which towers support it, unchanged features and gradients, and how a step uses text lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.metrics.mfu import training_flops
from pipeline.model.tower_costs import measure_flops
from pipeline.model.towers import ModelConfig, Towers, build_towers
from pipeline.model.trimming import TextChunks, text_trimming, trimmed_width, why_not_trimmed, without_padding
from pipeline.objectives import build_objective
from pipeline.training.step import TrainStep, micro_batches
from tests.unit.test_attention import KINDS, batch, gradients, write_kind

TRIMMABLE = {"CLIP", "quick_gelu", "custom_text", "eos", "layer_scale", "attentional_pool"}


def towers_of(folder: Path, kind: str, **settings: object) -> Towers:
    return build_towers(ModelConfig(arch=write_kind(folder, kind), **settings), seed=0)[0].train()  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", sorted(TRIMMABLE))
def test_trimming_does_not_change_features_and_gradients(kind: str, tmp_path: Path) -> None:
    towers = towers_of(tmp_path, kind)
    trimming = text_trimming(towers.clip, wanted=True)
    assert trimming is not None
    image, text = batch(length=12)
    text[:, 9:] = 0
    text[2, 7] = 49407
    lengths = trimming.lengths(text)
    assert lengths.tolist() == [4, 6, 8, 8, 5]
    width = trimmed_width(lengths, context_length=12)
    assert width == 8
    assert torch.equal(without_padding(text, trimming), text[:, :8])
    assert without_padding(text[:0], trimming).shape == (0, 12)
    assert without_padding(text, None) is text
    features, expected = gradients(towers, (image, text))
    towers.zero_grad()
    trimmed_features, found = gradients(towers, (image, text[:, :width]))
    for a, b in zip(features, trimmed_features, strict=True):
        assert (a - b).abs().max() < 1e-6
    size = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() < 1e-6 * size, name


def test_texts_are_not_trimmed_for_towers_that_attend_to_padding(tmp_path: Path) -> None:
    for kind in sorted(set(KINDS) - TRIMMABLE):
        clip = towers_of(tmp_path, kind).clip
        assert "depend on the padding" in str(why_not_trimmed(clip))
        assert text_trimming(clip, wanted=None) is None
        with pytest.raises(UserError, match=r"model\.trim_text=true: The text tower is not"):
            text_trimming(clip, wanted=True)


def test_trimming_is_off_without_packed_attention_or_when_disabled(tmp_path: Path) -> None:
    assert text_trimming(towers_of(tmp_path, "CLIP").clip, wanted=False) is None
    clip = towers_of(tmp_path, "CLIP", packed_attention=False).clip
    assert text_trimming(clip, wanted=None) is None
    with pytest.raises(UserError, match=r"model\.packed_attention"):
        text_trimming(clip, wanted=True)


@pytest.mark.parametrize(("longest", "width"), [(1, 8), (8, 8), (9, 16), (72, 72), (73, 77), (77, 77)])
def test_widths_are_multiples_of_eight_up_to_the_context(longest: int, width: int) -> None:
    assert trimmed_width(torch.tensor([1, longest]), context_length=77) == width


def chunks_of(lengths: Tensor | None) -> TextChunks:
    return TextChunks(torch.arange(6 * 20).view(6, 20), [slice(0, 2), slice(2, 4), slice(4, 6)], lengths=lengths)


def test_micro_batches_are_sorted_by_length_and_trimmed_individually() -> None:
    chunks = chunks_of(torch.tensor([18, 3, 9, 3, 17, 8]))
    tokens = [chunks.tokens(i) for i in range(3)]
    assert [t.shape[1] for t in tokens] == [8, 16, 20]
    assert [(t[:, 0] // 20).tolist() for t in tokens] == [[1, 3], [5, 2], [4, 0]]
    assert chunks.computed_tokens == 2 * (8 + 16 + 20)
    values = torch.randn(6, 3)
    assert torch.equal(chunks.in_order([chunks.rows(i, values) for i in range(3)]), values)


def test_without_lengths_nothing_is_trimmed_or_sorted() -> None:
    chunks = chunks_of(None)
    assert torch.equal(torch.cat([chunks.tokens(i) for i in range(3)]), torch.arange(120).view(6, 20))
    assert chunks.computed_tokens == 120


class PlainEngine:
    """Towers with plain autograd; records the widths of the texts they receive."""

    def __init__(self, towers: Towers) -> None:
        self.module, self.widths = towers, list[int]()

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        self.widths.append(text.shape[1])
        return self.module(image, text)

    def backward(self, features: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor]) -> None:
        torch.autograd.backward(features, gradients)

    def step(self, *, lr_scale: float) -> bool:
        return True


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_step_on_trimmed_texts_has_the_same_loss_and_gradient(micro_batch: int | None, tmp_path: Path) -> None:
    """With patch dropout, which is drawn for the image micro-batches; these are not sorted."""
    image, text = batch(length=12)
    image, text = image[:4], text[:4]
    text[2, 10] = 49407
    found = []
    for trims in (False, True):
        engine: Any = PlainEngine(towers_of(tmp_path, "CLIP", patch_dropout=0.5))
        objective = build_objective({"name": "openclip"}, dim=16, batch_size=4)
        step = TrainStep(engine, objective, world=World(), seed=0, chunks=micro_batches(4, micro_batch))
        trimming = text_trimming(engine.module.clip, wanted=True)
        assert trimming is not None
        lengths = trimming.lengths(text) if trims else None
        result = step((image, text), sample_ids=torch.arange(4), step=0, lr_scale=1.0, text_lengths=lengths)
        gradients = {name: p.grad for name, p in engine.module.named_parameters() if p.grad is not None}
        found.append((result, gradients, engine.widths))
    (whole, expected, full), (trimmed, gradients, widths) = found
    assert set(full) == {12}
    assert widths == ([8, 12, 8, 12] if micro_batch else [12])
    assert trimmed.text_tokens == (10 if micro_batch else 12)
    assert float(trimmed.output.loss) == pytest.approx(float(whole.output.loss), abs=1e-6)
    size = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() < 1e-5 * size, name


def test_flops_count_only_the_computed_tokens(tmp_path: Path) -> None:
    model = ModelConfig(arch=write_kind(tmp_path, "CLIP"))
    towers, architecture = build_towers(model, seed=0, device="meta")
    for tokens in (4, 8, 12):
        measured = measure_flops(towers, image_size=architecture.image_size, context_length=tokens)
        assert training_flops(model, text_tokens=tokens) == pytest.approx(3 * measured, rel=1e-9)
    assert training_flops(model) == training_flops(model, text_tokens=12)
    fixed = ModelConfig(arch=write_kind(tmp_path, "bidirectional"))
    assert training_flops(fixed, text_tokens=4) == training_flops(fixed)
