"""Packed attention and patch dropout match open_clip's modules: values, gradients, state dicts."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import open_clip
import pytest
import torch
from open_clip.transformer import PatchDropout as OpenClipPatchDropout
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline.model.attention import (
    CausalPackedAttention,
    PackedAttention,
    causal_text_transformer,
    use_packed_attention,
)
from pipeline.model.image_tower import PatchDropout
from pipeline.model.towers import ModelConfig, build_towers

# One architecture per kind of tower that open_clip 3.3 builds from its own transformer classes.
KINDS: dict[str, dict[str, Any]] = {
    "CLIP": {},
    "quick_gelu": {"quick_gelu": True},
    "custom_text": {"custom_text": True},
    "bidirectional": {"custom_text": True, "text_cfg": {"no_causal_mask": True}},
    "eos": {"custom_text": True, "text_cfg": {"pool_type": "eos", "eos_id": 49407}},
    "class_token": {"custom_text": True, "text_cfg": {"embed_cls": True, "output_tokens": False}},
    "layer_scale": {"vision_cfg": {"ls_init_value": 0.1}, "text_cfg": {"ls_init_value": 0.1}},
    "attentional_pool": {"vision_cfg": {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 3}},
}
BASE: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "layers": 2, "width": 32, "head_width": 16, "mlp_ratio": 2.0},
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write_kind(folder, kind):
    changes = KINDS[kind]
    config = {**BASE, **{key: value for key, value in changes.items() if not isinstance(value, dict)}}
    for side in ("vision_cfg", "text_cfg"):
        config[side] = {**BASE[side], **changes.get(side, {})}
    path = folder / f"kind-{kind}.json"
    path.write_text(json.dumps(config))
    return str(path)


def both(arch, **settings):
    """Build the same towers with open_clip's attention and with packed attention."""
    plain, _ = build_towers(ModelConfig(arch=arch, packed_attention=False, **settings), seed=0)
    packed, _ = build_towers(ModelConfig(arch=arch, **settings), seed=0)
    return plain.train(), packed.train()


def batch(length=12, size=32):
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(1, 49000, (5, length), generator=generator)
    for row, end in enumerate((3, 5, length - 1, 7, 4)):
        text[row, end], text[row, end + 1 :] = 49407, 0
    return torch.randn(5, 3, size, size, generator=generator), text


def gradients(towers, inputs):
    torch.manual_seed(3)
    features = towers(*inputs)
    weights = [torch.randn(f.shape, generator=torch.Generator().manual_seed(4)) for f in features]
    torch.autograd.backward(features, weights)
    return features, {name: p.grad for name, p in towers.named_parameters() if p.grad is not None}


def assert_same(plain, packed, inputs):
    (features, expected), (packed_features, found) = gradients(plain, inputs), gradients(packed, inputs)
    for a, b in zip(features, packed_features, strict=True):
        assert (a - b).abs().max() < 1e-5
    assert found.keys() == expected.keys()
    size = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() < 1e-5 * max(1.0, size), name


def packed_in(module):
    return sum(isinstance(m, PackedAttention) for m in module.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_features_and_gradients_match_open_clip(kind, tmp_path):
    plain, packed = both(write_kind(tmp_path, kind))
    assert (packed_in(plain), packed_in(packed)) == (0, 4)
    before, after = plain.state_dict(), packed.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in packed.named_modules()]
    assert_same(plain, packed, batch())


@pytest.mark.parametrize(
    ("settings", "backend"),
    [({"patch_dropout": 0.5}, None), ({"grad_checkpointing": True}, None), ({}, SDPBackend.MATH),
     ({}, SDPBackend.FLASH_ATTENTION), ({"lock_image": True, "unlocked_image_blocks": 2}, None)],
    ids=str,
)  # fmt: skip
def test_with_settings_of_training_and_all_sdpa_kernels(settings, backend, tmp_path):
    plain, packed = both(write_kind(tmp_path, "CLIP"), **settings)
    with sdpa_kernel(backend) if backend else contextlib.nullcontext():
        assert_same(plain, packed, batch())


def test_all_open_clip_transformers_are_packed():
    """In every architecture, all attention of open_clip's own vision and text transformers is packed."""
    left, packed = {}, 0
    for name in open_clip.list_models():
        config = open_clip.get_model_config(name)
        if (
            "hf_model_name" in config["text_cfg"]
            or config.get("multimodal_cfg")
            or "timm_model_name" in config["vision_cfg"]
        ):
            continue
        shallow = {**config, "text_cfg": {**config["text_cfg"], "layers": 1}}
        if isinstance(config["vision_cfg"]["layers"], int):
            shallow["vision_cfg"] = {**config["vision_cfg"], "layers": 1}
        with torch.device("meta"):
            kind = open_clip.model.CustomTextCLIP if shallow.pop("custom_text", False) else open_clip.model.CLIP
            clip = kind(**shallow)
        packed += use_packed_attention(clip)
        rest = [n for n, m in clip.named_modules() if type(m) is nn.MultiheadAttention and "resblocks" in n]
        if rest:
            left[name] = rest
    assert packed > 100
    assert not left


def test_only_text_towers_with_a_purely_causal_mask_are_causal(tmp_path):
    causal = {}
    for kind in KINDS:
        packed = both(write_kind(tmp_path, kind))[1]
        causal[kind] = causal_text_transformer(packed.clip) is not None
        marked = [m for m in packed.modules() if isinstance(m, CausalPackedAttention)]
        assert len(marked) == (2 if causal[kind] else 0)
    assert {kind for kind, yes in causal.items() if not yes} == {"bidirectional", "class_token"}


def test_patch_dropout_matches_open_clip_on_cpu():
    x = torch.randn(4, 17, 8)
    found = []
    for module in (OpenClipPatchDropout(0.4), PatchDropout(0.4)):
        inputs = x.clone().requires_grad_()
        torch.manual_seed(5)
        out = module(inputs)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        assert torch.equal(module.eval()(x), x)
        found.append((out, inputs.grad))
    assert found[0][0].shape == (4, 10, 8)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
