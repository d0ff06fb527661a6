"""A small model of every open_clip architecture family trains for two steps, is saved, and loads in open_clip."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch

from pipeline.errors import UserError
from pipeline.model.architectures import build_tokenizer
from pipeline.model.attention import Fp32SumEmbedding
from pipeline.model.evaluation_model import load_for_evaluation
from pipeline.model.model_folder import save_open_clip
from pipeline.model.starting_weights import find_start
from pipeline.model.towers import ModelConfig, build_towers, check_model
from pipeline.objectives import build_objective

TEXTS = ["a red square on a blue ground", "two green circles", "A Photo, of: nothing!", ""]
SMALL_TEXT = {"width": 32, "heads": 2, "layers": 2}

# Family -> (open_clip architecture, config changes that make it small).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViT-B-32", {"vision_cfg": {"width": 32, "head_width": 16, "layers": 2}, "text_cfg": SMALL_TEXT}),
    "ResNet": ("RN50", {"vision_cfg": {"width": 8, "layers": [1, 1, 1, 1]}, "text_cfg": SMALL_TEXT}),
    "ConvNeXt (timm)": ("convnext_base", {
        "vision_cfg": {"timm_model_name": "convnext_atto", "timm_drop_path": 0.0}, "text_cfg": SMALL_TEXT}),
    "SigLIP": ("ViT-B-16-SigLIP", {
        "vision_cfg": {"timm_model_name": "vit_tiny_patch16_224"}, "text_cfg": {**SMALL_TEXT, "vocab_size": 200}}),
    "SigLIP 2": ("ViT-B-32-SigLIP2-256", {
        "vision_cfg": {"timm_model_name": "vit_tiny_patch16_224", "image_size": 224},
        "text_cfg": {**SMALL_TEXT, "vocab_size": 200}}),
    "CLIPA": ("ViT-L-14-CLIPA", {
        "vision_cfg": {"width": 32, "head_width": 16, "layers": 2}, "text_cfg": {**SMALL_TEXT, "vocab_size": 200}}),
    "NLLB (transformers text tower)": ("nllb-clip-base", {
        "vision_cfg": {"width": 32, "head_width": 16, "layers": 2}}),
    "XLM-R (transformers text tower)": ("xlm-roberta-base-ViT-B-32", {
        "vision_cfg": {"width": 32, "head_width": 16, "layers": 2}}),
}  # fmt: skip


def write_tokenizer(folder):
    """Write a small Hugging Face tokenizer with the special tokens that open_clip requires."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.BPE(unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    plain.train_from_iterator(TEXTS * 5, trainers.BpeTrainer(vocab_size=180, special_tokens=special))
    plain.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        mask_token="<mask>", sep_token="</s>", cls_token="<s>",
    )  # fmt: skip
    wrapped.save_pretrained(str(folder))
    return folder


def write_text_model(folder, kind):
    """Write the config of a small transformers text tower and return its folder."""
    import transformers

    common = {"vocab_size": 200, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "xlm-roberta":
        config = transformers.XLMRobertaConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, **common
        )
    else:
        config = transformers.M2M100Config(
            d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=64, decoder_ffn_dim=64, **common,
        )  # fmt: skip
    config.save_pretrained(str(folder))
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def small(family, folder):
    """Write the small config of a family and return the path of its JSON file, for `model.arch`."""
    name, changes = FAMILIES[family]
    config = copy.deepcopy(open_clip.get_model_config(name))
    config["embed_dim"] = 192 if "SigLIP" in name else 32  # SigLIP uses the trunk's features, at the trunk's width
    for part, values in changes.items():
        config[part].update(values)
    if "image_size" not in changes["vision_cfg"] and "timm_model_name" not in config["vision_cfg"]:
        config["vision_cfg"]["image_size"] = 64
    if "hf_model_name" in config["text_cfg"]:
        kind = "xlm-roberta" if "xlm" in name else "m2m_100"
        config["text_cfg"]["hf_model_name"] = write_text_model(folder / "text-model", kind)
    path = folder / f"small-{name}.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_saves_and_loads_again(family, tmp_path, tokenizer):
    arch = small(family, tmp_path)
    reads_it = "hf_tokenizer_name" in json.loads(Path(arch).read_text())["text_cfg"]
    config = ModelConfig(arch=arch, tokenizer=str(tokenizer) if reads_it else None)
    check_model(config)
    towers, architecture = build_towers(config, seed=0)
    convolutional = family in ("ResNet", "ConvNeXt (timm)")
    assert towers.image_format == (torch.channels_last if convolutional else torch.contiguous_format)
    kinds = {type(module) for module in towers.modules()}
    assert (Fp32SumEmbedding in kinds) == ("NLLB" not in family), "which has a class of its own"
    assert torch.nn.Embedding not in kinds
    text = pickle.loads(pickle.dumps(architecture.tokenize))(TEXTS)  # as DataLoader workers receive it
    assert text.shape == (4, architecture.model_cfg["text_cfg"].get("context_length", 77))
    assert len({tuple(row) for row in text.tolist()}) == 4
    objective = build_objective("openclip", dim=architecture.dim, batch_size=4, dataset_size=4)
    optimizer = torch.optim.SGD(towers.parameters(), lr=1e-2)
    image = torch.randn(
        4, 3, architecture.image_size, architecture.image_size, generator=torch.Generator().manual_seed(1)
    )
    before = {name: p.detach().clone() for name, p in towers.named_parameters()}
    towers.train()
    for _ in range(2):
        optimizer.zero_grad()
        objective.loss(*towers(image, text), sample_ids=torch.arange(4)).backward()
        optimizer.step()
        objective.commit()
    moved = sum(not torch.equal(before[name], p) for name, p in towers.named_parameters())
    assert moved > 0.8 * len(before)
    folder = tmp_path / "saved"
    folder.mkdir()
    state = {name: value.detach() for name, value in towers.clip.state_dict().items()}
    save_open_clip(folder, state=state, architecture=architecture, logit=(2.5, None))
    model = load_for_evaluation(str(folder))
    again = open_clip.create_model(f"local-dir:{folder}").eval()
    theirs = open_clip.get_tokenizer(f"local-dir:{folder}")
    assert torch.equal(model.tokenize(TEXTS), text)
    assert torch.equal(theirs(TEXTS), text)
    towers.eval()
    with torch.no_grad():
        expected = towers(image, text)
        assert torch.allclose(model.encode_image(image), expected[0], atol=1e-5)
        assert torch.allclose(model.encode_text(text), expected[1], atol=1e-5)
        assert torch.allclose(again.encode_text(theirs(TEXTS), normalize=True), expected[1], atol=1e-5)
    assert float(again.logit_scale) == 2.5


def test_images_stay_contiguous_for_towers_with_strided_pointwise_convolutions():
    """Regression test: torch's backward pass of these on CPUs, with images in channels last, ended the process."""
    for arch in ("MobileCLIP-S1", "MobileCLIP2-S0"):
        towers, _ = build_towers(ModelConfig(arch=arch), seed=0, device="meta")
        assert towers.image_format == torch.contiguous_format


def test_missing_tokenizer_is_refused_with_a_remedy(tmp_path):
    config = open_clip.get_model_config("ViT-B-16-SigLIP")
    with pytest.raises(UserError, match=r"has no tokenizer .*needs that of timm/ViT-B-16-SigLIP"):
        build_tokenizer(config, name="ViT-B-16-SigLIP", folder=tmp_path)


def test_every_architecture_is_known_but_coca_s_are_refused_with_a_reason():
    for name in open_clip.list_models():
        if "coca" in name:
            with pytest.raises(UserError, match="captioning decoder"):
                find_start(name, None)
        else:
            assert find_start(name, None).name == name
