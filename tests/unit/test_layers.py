"""Our own layers: the last block for the class token only, batch norm in bf16, and embeddings summed in fp32."""

import copy
import json
from pathlib import Path

import open_clip
import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from pipeline.errors import UserError
from pipeline.metrics.mfu import measure_flops
from pipeline.model.attention import Fp32SumEmbedding, attend, use_packed_attention
from pipeline.model.image_tower import ClassTokenBlock, Fp32BatchNorm2d, use_class_token_block, use_fp32_batch_norms
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.training.gradient_check import compare_gradients
from pipeline.training.step import frozen_statistics
from tests.metrics import equal
from tests.unit.test_attention import KINDS, write_kind


def shortened_in(towers):
    return sum(isinstance(module, ClassTokenBlock) for module in towers.modules())


def test_the_products_of_patches_in_the_last_block_are_left_out():
    """ViT-B/32: 12 blocks of width 768 and 50 tokens; left out are queries, output and MLP of the 49 patches."""
    configs = (ModelConfig(arch="ViT-B-32", packed_attention=packed) for packed in (False, True))
    towers = (build_towers(config, seed=0, device="meta")[0] for config in configs)
    whole, shortened = (measure_flops(one, image_size=224, context_length=None) for one in towers)
    products, attention = 2 * 49 * 10 * 768**2, 2 * 49 * 2 * 50 * 768
    assert whole - shortened == products + attention


def test_towers_that_read_other_tokens_keep_them(tmp_path):
    """What a shortened block computes is compared in test_attention.py."""
    for kind in KINDS:
        arch = write_kind(tmp_path, kind)
        for packed in (False, True):
            towers = build_towers(ModelConfig(arch=arch, packed_attention=packed), seed=0, device="meta")[0]
            assert shortened_in(towers) == int(packed and kind != "attentional_pool")
            if shortened_in(towers):
                with pytest.raises(UserError, match=r"no patches to return: .*model\.packed_attention=false"):
                    towers.clip.forward_intermediates(torch.empty(1, 3, 32, 32, device="meta"))
    config = json.loads(Path(write_kind(tmp_path, "CLIP")).read_text())
    config["vision_cfg"]["layers"] = 0
    (tmp_path / "no-blocks.json").write_text(json.dumps(config))
    assert shortened_in(build_towers(ModelConfig(arch=str(tmp_path / "no-blocks.json")), seed=0)[0]) == 0


def test_average_pooling_timm_resnets_and_coca_are_left_alone():
    def shortened(kind, name, **changes):
        config = {k: v for k, v in open_clip.get_model_config(name).items() if k != "custom_text"}
        config["vision_cfg"] = {**config["vision_cfg"], **changes}
        with torch.device("meta"):
            clip = kind(**config)
        use_packed_attention(clip)
        use_class_token_block(clip)
        return shortened_in(clip)

    assert shortened(open_clip.CLIP, "ViT-B-32") == 1
    assert shortened(open_clip.CLIP, "ViT-B-32", pool_type="avg") == 0
    assert shortened(open_clip.CoCa, "coca_ViT-B-32") == 0
    assert shortened(open_clip.CLIP, "RN50") == 0
    assert shortened(open_clip.CustomTextCLIP, "ViT-B-16-SigLIP") == 0


def test_attention_in_bf16_on_a_cpu_is_that_of_fp32_rounded_once_and_float64_stays():
    """Also under autocast, which would round the logits' factors again."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 32, generator=generator).bfloat16() for _ in range(3))
    for causal in (False, True):
        expected = attend(q.float(), k.float(), v.float(), heads=4, causal=causal).bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = attend(q, k, v, heads=4, causal=causal)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected)
    mask = torch.zeros(9, 9, dtype=torch.bfloat16).masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    assert torch.equal(attend(q, q, q, heads=2, mask=mask), attend(q, q, q, heads=2, causal=True))
    q = torch.randn(1, 3, 8, dtype=torch.float64)
    heads = q.view(1, 3, 2, 4).transpose(1, 2)
    weights = (heads @ heads.mT / 2).softmax(-1)
    assert (attend(q, q, q, heads=2) - (weights @ heads).transpose(1, 2).reshape(1, 3, 8)).abs().max() < 1e-14


def test_a_module_with_two_names_is_replaced_under_both():
    norm = nn.BatchNorm2d(5)
    model = nn.Sequential(norm, nn.ReLU(), norm)
    use_fp32_batch_norms(model)
    assert model[0] is model[2]
    assert type(model[0]) is Fp32BatchNorm2d


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, BatchNormAct2d])
def test_batch_norms_train_in_bf16_with_fp32_statistics(kind, training):
    """Regression test of timm's: MobileCLIP could not be trained in bf16. In fp32 they equal torch's and timm's."""
    torch.manual_seed(0)
    plain = kind(5)
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    ours = nn.Sequential(copy.deepcopy(plain))
    use_fp32_batch_norms(ours)
    ours = ours[0]
    assert isinstance(ours, Fp32BatchNorm2d)
    x = torch.randn(6, 5, 3, 3)
    for norm in (plain, ours):
        norm(x + 1)
        norm.train(training)
    assert torch.equal(plain(x), ours(x))
    assert equal(plain.state_dict(), ours.state_dict())
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    with frozen_statistics([ours]):
        inside = ours(x)
    assert equal(ours.state_dict(), before)
    assert torch.equal(inside, ours(x)) is training, "normalised by the batch"
    for parameter in ours.parameters():
        parameter.data = parameter.data.bfloat16()
    out = ours(x.bfloat16())
    assert (out.dtype, ours.running_mean.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.float(), plain(x), atol=0.05, rtol=0.05)
    out.float().square().sum().backward()
    assert ours.weight.grad.abs().sum() > 0


REPEATS = 1408


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("padding", [None, 1])
def test_gradient_of_a_token_that_occurs_often(dtype, padding):
    """As padding does; `test_architecture_families.py` checks that towers have such tables."""
    table = Fp32SumEmbedding(6, 4, padding_idx=padding).to(dtype)
    ids = torch.tensor([0] * REPEATS + [1, 1, 2, 5]).reshape(2, -1)
    out = table(ids)
    assert torch.equal(out, nn.functional.embedding(ids, table.weight))
    out.sum().backward()
    assert table.weight.grad.dtype == dtype
    expected = [REPEATS, 0 if padding == 1 else 2, 1, 0, 0, 1]
    assert table.weight.grad[:, 0].tolist() == expected


def test_the_gradient_check_names_the_layer_with_the_largest_difference():
    expected = {"a": torch.ones(4), "b": torch.ones(4)}
    assert compare_gradients({"a": torch.ones(4), "b": torch.ones(4)}, expected, tolerance=0.1) == 0
    applied = {"a": torch.ones(4), "b": torch.full((4,), 0.5)}
    with pytest.raises(UserError, match=r"largest difference is b: 50\.00% of its own gradient, 100% of the whole"):
        compare_gradients(applied, expected, tolerance=0.1)
