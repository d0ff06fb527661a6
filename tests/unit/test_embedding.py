"""The gradient of token embeddings in bf16 on CPUs, where torch's own kernel stops adding."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import open_clip
import pytest
import torch
from torch import nn

from pipeline.errors import UserError
from pipeline.model.attention import Fp32SumEmbedding
from pipeline.model.towers import ModelConfig, build_towers, unread_pixels
from pipeline.training.gradient_check import compare_gradients
from tests.unit.test_architecture_families import write_tokenizer

REPEATS = 1408


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("padding", [None, 1])
def test_gradient_of_a_token_that_occurs_often(dtype: torch.dtype, padding: int | None) -> None:
    table = Fp32SumEmbedding(6, 4, padding_idx=padding).to(dtype)
    ids = torch.tensor([0] * REPEATS + [1, 1, 2, 5]).reshape(2, -1)
    out = table(ids)
    assert torch.equal(out, nn.functional.embedding(ids, table.weight))
    out.sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.dtype == dtype
    expected = [REPEATS, 0 if padding == 1 else 2, 1, 0, 0, 1]
    assert table.weight.grad[:, 0].tolist() == expected


def test_the_gradient_of_a_text_tower_with_much_padding(tmp_path: Path) -> None:
    config = copy.deepcopy(open_clip.get_model_config("ViT-B-16-SigLIP"))
    config["embed_dim"] = 192
    config["vision_cfg"] |= {"timm_model_name": "vit_tiny_patch16_224", "image_size": 224}
    config["text_cfg"] |= {"width": 32, "heads": 2, "layers": 2, "vocab_size": 200}
    path = tmp_path / "small-siglip.json"
    path.write_text(json.dumps(config))
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    towers, architecture = build_towers(ModelConfig(arch=str(path), tokenizer=str(tokenizer)), seed=0)
    text = architecture.tokenize([f"photo {i}" for i in range(24)])
    upstream = torch.randn(24, 192, generator=torch.Generator().manual_seed(0)) + 1.0
    gradients = []
    for model in (towers, copy.deepcopy(towers).bfloat16()):
        model.encode_text(text).backward(upstream)
        gradients.append(model.clip.text.token_embedding.weight.grad.float())  # type: ignore[union-attr]
    assert unread_pixels(towers.clip.visual, 32) == []  # type: ignore[arg-type]
    (note,) = unread_pixels(towers.clip.visual, 33)  # type: ignore[arg-type]
    assert note.startswith("Images of 33 px hold 2 x 2 patches of 16 px: the last 1 px")
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 0.05


def test_the_gradient_check_names_the_layer_with_the_largest_difference() -> None:
    expected = {"a": torch.ones(4), "b": torch.ones(4)}
    assert compare_gradients({"a": torch.ones(4), "b": torch.ones(4)}, expected, tolerance=0.1) == 0
    applied = {"a": torch.ones(4), "b": torch.full((4,), 0.5)}
    with pytest.raises(UserError, match=r"largest difference is b: 50\.00% of its own gradient, 100% of the whole"):
        compare_gradients(applied, expected, tolerance=0.1)
