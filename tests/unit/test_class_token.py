"""The image tower's last block for the class token only: the same function and weights, fewer products."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch

from pipeline.errors import UserError
from pipeline.metrics.mfu import measure_flops
from pipeline.model.attention import attend
from pipeline.model.image_tower import ClassTokenBlock, why_all_tokens
from pipeline.model.towers import ModelConfig, Towers, build_towers
from tests.unit.test_attention import KINDS, assert_same, batch, write_kind

SHORTENED = set(KINDS) - {"attentional_pool"}


def pair(folder: Path, kind: str, **settings: Any) -> tuple[Towers, Towers]:
    """The same towers as open_clip computes them, and with a last block for the class token."""
    arch = write_kind(folder, kind)
    whole, shortened = (
        build_towers(ModelConfig(arch=arch, packed_attention=packed, **settings), seed=0)[0].train()
        for packed in (False, True)
    )
    return whole, shortened


def shortened_in(towers: Towers) -> int:
    return sum(isinstance(module, ClassTokenBlock) for module in towers.modules())


@pytest.mark.parametrize("kind", sorted(SHORTENED))
def test_features_and_gradients_are_those_of_all_tokens(kind: str, tmp_path: Path) -> None:
    whole, shortened = pair(tmp_path, kind)
    assert (shortened_in(whole), shortened_in(shortened)) == (0, 1)
    assert_same(whole, shortened, batch())


@pytest.mark.parametrize("settings", [{"patch_dropout": 0.5}, {"grad_checkpointing": True}], ids=str)
def test_with_patch_dropout_and_checkpointing(settings: dict[str, Any], tmp_path: Path) -> None:
    assert_same(*pair(tmp_path, "CLIP", **settings), batch())


def test_names_and_state_dict_stay(tmp_path: Path) -> None:
    whole, shortened = pair(tmp_path, "CLIP")
    before, after = whole.state_dict(), shortened.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert [name for name, _ in whole.named_modules()] == [name for name, _ in shortened.named_modules()]
    assert_same(whole, copy.deepcopy(shortened), batch())


def test_the_products_of_patches_in_the_last_block_are_left_out() -> None:
    """ViT-B/32: 12 blocks of width 768 and 50 tokens; left out are queries, output and MLP of the 49 patches."""
    whole, shortened = (
        build_towers(ModelConfig(arch="ViT-B-32", packed_attention=packed), seed=0, device="meta")[0]
        for packed in (False, True)
    )
    saved = measure_flops(whole, image_size=224, context_length=None) - measure_flops(
        shortened, image_size=224, context_length=None
    )
    products, attention = 2 * 49 * 10 * 768**2, 2 * 49 * 2 * 50 * 768
    assert saved == products + attention


def test_towers_that_read_other_tokens_keep_them(tmp_path: Path) -> None:
    assert shortened_in(pair(tmp_path, "attentional_pool")[1]) == 0
    config = json.loads(Path(write_kind(tmp_path, "CLIP")).read_text())
    config["vision_cfg"]["layers"] = 0
    (tmp_path / "no-blocks.json").write_text(json.dumps(config))
    assert shortened_in(build_towers(ModelConfig(arch=str(tmp_path / "no-blocks.json")), seed=0)[0]) == 0


def test_average_pooling_timm_resnets_and_coca_are_left_alone() -> None:
    def reason(kind: Any, name: str, **changes: Any) -> str:
        config = {k: v for k, v in open_clip.get_model_config(name).items() if k != "custom_text"}
        config["vision_cfg"] = {**config["vision_cfg"], **changes}
        with torch.device("meta"):
            return str(why_all_tokens(kind(**config).visual))

    assert "class token alone" in reason(open_clip.CLIP, "ViT-B-32", pool_type="avg")
    assert "class token alone" in reason(open_clip.CoCa, "coca_ViT-B-32")
    assert "not a vision transformer of open_clip's own" in reason(open_clip.CLIP, "RN50")
    assert "not a vision transformer of open_clip's own" in reason(open_clip.CustomTextCLIP, "ViT-B-16-SigLIP")


def test_patches_that_are_not_computed_are_refused_instead_of_returned_empty(tmp_path: Path) -> None:
    whole, shortened = pair(tmp_path, "CLIP")
    image, _ = batch()
    assert whole.clip.visual.forward_intermediates(image)["image_intermediates"]
    with pytest.raises(UserError, match=r"forward_intermediates: .* model\.packed_attention=false"):
        shortened.clip.forward_intermediates(image)
    shortened.clip.visual.output_tokens = True
    with pytest.raises(UserError, match=r"output_tokens: .* model\.packed_attention=false"):
        shortened.clip.visual(image)


def test_a_locked_tower_has_the_same_features(tmp_path: Path) -> None:
    whole, shortened = pair(tmp_path, "CLIP", lock_image=True, unlocked_image_blocks=2)
    assert_same(whole, shortened, batch())


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_bf16_on_a_cpu_is_that_of_fp32_rounded_once(causal: bool) -> None:
    """Also under autocast, which would round the logits' factors again."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 32, generator=generator).bfloat16() for _ in range(3))
    expected = attend(q.float(), k.float(), v.float(), heads=4, causal=causal).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend(q, k, v, heads=4, causal=causal)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_bf16_attention_takes_a_mask() -> None:
    q = torch.randn(2, 4, 8).bfloat16()
    mask = torch.zeros(4, 4, dtype=torch.bfloat16).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    assert torch.equal(attend(q, q, q, heads=2, mask=mask), attend(q, q, q, heads=2, causal=True))


def test_attention_in_float64_stays_in_float64() -> None:
    q = torch.randn(1, 3, 8, dtype=torch.float64)
    heads = q.view(1, 3, 2, 4).transpose(1, 2)
    weights = (heads @ heads.mT / 2).softmax(-1)
    assert (attend(q, q, q, heads=2) - (weights @ heads).transpose(1, 2).reshape(1, 3, 8)).abs().max() < 1e-14
