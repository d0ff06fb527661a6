"""Trimmed texts: which towers support it, unchanged features and gradients, and how a step uses text lengths."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.metrics.mfu import measure_flops, training_flops
from pipeline.model.attention import PackedText, pack
from pipeline.model.towers import ModelConfig, build_towers, text_batching
from pipeline.model.trimming import TextChunks, text_trimming, trimmed_width, why_not_trimmed, without_padding
from pipeline.objectives import build_objective
from pipeline.training.step import TrainStep, micro_batches
from tests.unit.test_attention import KINDS, batch, gradients, write_kind

CPU = torch.device("cpu")
TRIMMABLE = {"CLIP", "quick_gelu", "custom_text", "eos", "layer_scale", "attentional_pool"}


def towers_of(folder, kind, **settings):
    return build_towers(ModelConfig(arch=write_kind(folder, kind), **settings), seed=0)[0].train()


def assert_close(found, expected, tolerance):
    """Compare gradients in units of the largest one."""
    assert found.keys() == expected.keys()
    size = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() < tolerance * size, name


@pytest.mark.parametrize("kind", sorted(TRIMMABLE))
def test_trimming_does_not_change_features_and_gradients(kind, tmp_path):
    towers = towers_of(tmp_path, kind)
    trimming = text_trimming(towers.clip)
    image, text = batch(length=12)
    text[:, 9:] = 0
    text[2, 7] = 49407
    lengths = trimming.cut(text)[1]
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
    assert_close(found, expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", sorted(TRIMMABLE))
def test_packed_texts_give_the_features_and_gradients_of_one_text_at_a_time(kind, dtype, tmp_path):
    towers = towers_of(tmp_path, kind, grad_checkpointing=kind == "CLIP").to(dtype)
    text = torch.cat([batch(length=12)[1] for _ in range(4)])[:17]
    lengths = text_trimming(towers.clip).cut(text)[1]
    assert len(set(lengths.tolist())) > 3
    upstream = torch.randn(len(text), 16, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([towers.encode_text(row[None, :n]) for row, n in zip(text, lengths.tolist(), strict=True)])
    alone.backward(upstream)
    expected = {name: p.grad.float() for name, p in towers.named_parameters() if p.grad is not None}
    towers.zero_grad()
    packed = pack(text, lengths, device=CPU)
    assert (len(packed), packed.tokens.shape) == (17, (1, int(lengths.sum())))
    features = towers.encode_text(packed)
    features.backward(upstream)
    tolerance = 2e-6 if dtype == torch.float32 else 0.05
    assert (features - alone).abs().max() < tolerance
    found = {name: p.grad.float() for name, p in towers.named_parameters() if p.grad is not None}
    assert_close(found, expected, tolerance)


def test_little_padding_is_computed():
    for count in (1, 2, 3, 5, 64):
        lengths = torch.randint(3, 78, (count,), generator=torch.Generator().manual_seed(count))
        layout = pack(torch.ones(count, 77, dtype=torch.int64), lengths, device=CPU).layout
        assert sum(texts for texts, _ in layout.groups) == count
        assert torch.equal(layout.places[layout.order], torch.arange(int(lengths.sum())))
        assert layout.cumulative.tolist() == [0, *lengths.cumsum(0).tolist()]
    assert len(layout.places) < 1.3 * int(lengths.sum())
    for longest, width in ((1, 8), (8, 8), (9, 16), (72, 72), (73, 77), (77, 77)):
        assert trimmed_width(torch.tensor([1, longest]), context_length=77) == width


def test_texts_are_whole_where_the_padding_matters_and_where_that_is_wanted(tmp_path):
    packed, whole = ModelConfig(text_batching="packed"), ModelConfig(text_batching="whole")
    for kind in sorted(set(KINDS) - TRIMMABLE):
        clip = towers_of(tmp_path, kind).clip
        assert "depend on the padding" in str(why_not_trimmed(clip))
        assert text_batching(clip, ModelConfig()) == (None, False)
    causal, plain = (towers_of(tmp_path, "CLIP", packed_attention=given).clip for given in (True, False))
    assert text_batching(plain, ModelConfig()) == text_batching(causal, whole) == (None, False)
    assert text_batching(causal, ModelConfig())[1]
    assert text_batching(causal, replace(packed, compile=True), by_kernel=True)[1]
    assert not text_batching(causal, ModelConfig(compile=True))[1]
    for given, config, reason in (
        (clip, packed, r"text_batching=packed: .*depend on the padding.*text_batching=auto"),
        (causal, replace(packed, compile=True), r"text_batching=packed: .*in bf16 on GPUs only.*text_batching=auto"),
        (plain, ModelConfig(text_tokens=5), r"model\.text_tokens=5: .*model\.packed_attention"),
        (causal, replace(whole, text_tokens=5), r"model\.text_tokens=5: .*text_batching is whole"),
    ):
        with pytest.raises(UserError, match=reason):
            text_batching(given, config)


def chunks_of(lengths):
    return TextChunks(torch.arange(6 * 20).view(6, 20), [slice(0, 2), slice(2, 4), slice(4, 6)], lengths=lengths)


def test_micro_batches_are_sorted_by_length_and_trimmed_individually():
    chunks = chunks_of(torch.tensor([18, 3, 9, 3, 17, 8]))
    tokens = [chunks.tokens(i) for i in range(3)]
    assert [t.shape[1] for t in tokens] == [8, 16, 20]
    assert [(t[:, 0] // 20).tolist() for t in tokens] == [[1, 3], [5, 2], [4, 0]]
    assert chunks.computed_tokens == 2 * (8 + 16 + 20)
    values = torch.randn(6, 3)
    assert torch.equal(chunks.in_order([chunks.rows(i, values) for i in range(3)]), values)

    chunks = chunks_of(None)  # without lengths, nothing is trimmed or sorted
    assert torch.equal(torch.cat([chunks.tokens(i) for i in range(3)]), torch.arange(120).view(6, 20))
    assert chunks.computed_tokens == 120


class PlainEngine:
    """Towers with plain autograd; records the widths of the texts they receive."""

    def __init__(self, towers):
        self.module, self.widths = towers, list[int]()

    def forward(self, image, text):
        self.widths.append(len(text) if isinstance(text, PackedText) else text.shape[1])
        return self.module(image, text)

    def backward(self, features, gradients):
        torch.autograd.backward(features, gradients)

    def step(self, *, lr_scale):
        return True


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_step_on_trimmed_texts_has_the_same_loss_and_gradient(micro_batch, tmp_path):
    """With patch dropout, which is drawn for the image micro-batches; these are not sorted."""
    image, text = batch(length=12)
    image, text = image[:4], text[:4]
    text[2, 10] = 49407
    found = []
    for trims in (None, "padded", "packed"):
        engine: Any = PlainEngine(towers_of(tmp_path, "CLIP", patch_dropout=0.5))
        objective = build_objective({"name": "openclip"}, dim=16, batch_size=4)
        chunks = micro_batches(4, micro_batch)
        step = TrainStep(engine, objective, world=World(), seed=0, chunks=chunks)
        trimming = text_trimming(engine.module.clip)
        lengths = trimming.cut(text)[1] if trims else None
        texts = TextChunks(text, chunks, lengths=lengths, packed=trims == "packed")
        result = step((image, texts), sample_ids=torch.arange(4), step=0, lr_scale=1.0)
        gradients = {name: p.grad for name, p in engine.module.named_parameters() if p.grad is not None}
        found.append((result, gradients, engine.widths))
    (whole, expected, full), (trimmed, gradients, widths), (packed, packed_gradients, rows) = found
    assert set(full) == {12}
    assert rows == ([2, 2, 2, 2] if micro_batch else [4])
    assert packed.text_tokens == float(lengths.sum()) / 4
    assert float(packed.output.loss) == pytest.approx(float(whole.output.loss), abs=1e-6)
    assert widths == ([8, 12, 8, 12] if micro_batch else [12])
    assert trimmed.text_tokens == (10 if micro_batch else 12)
    assert float(trimmed.output.loss) == pytest.approx(float(whole.output.loss), abs=1e-6)
    assert_close(gradients, expected, 1e-5)
    assert_close(packed_gradients, expected, 1e-5)


def test_flops_count_only_the_computed_tokens(tmp_path):
    model = ModelConfig(arch=write_kind(tmp_path, "CLIP"))
    towers, architecture = build_towers(model, seed=0, device="meta")
    for tokens in (4, 8, 12):
        measured = measure_flops(towers, image_size=architecture.image_size, context_length=tokens)
        assert training_flops(model, text_tokens=tokens) == pytest.approx(3 * measured, rel=1e-9)
    assert training_flops(model) == training_flops(model, text_tokens=12)
    fixed = ModelConfig(arch=write_kind(tmp_path, "bidirectional"))
    assert training_flops(fixed, text_tokens=4) == training_flops(fixed)
