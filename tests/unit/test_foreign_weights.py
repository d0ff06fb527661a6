"""Models that other programs wrote: every form gives the features of the program that wrote it, or says what it is."""

from __future__ import annotations

import itertools
import json
import os
import zipfile
from collections.abc import Callable
from typing import Any

import open_clip
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from jobs.export import command as export
from pipeline.errors import UserError
from pipeline.model.evaluation_model import load_for_evaluation
from pipeline.model.foreign_weights import for_open_clip, stored_description
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.model.towers import check_model as check_towers
from pipeline.run_files import check_model
from tests.towers import TINY, write_tiny

State = dict[str, Tensor]
FORMS: dict[str, Callable[[State], Any]] = {
    "plain": dict,
    "state_dict": lambda state: {"epoch": 3, "state_dict": state},
    "module.": lambda state: {"state_dict": {f"module.{name}": value for name, value in state.items()}},
    "_orig_mod.module.": lambda state: {f"_orig_mod.module.{name}": value for name, value in state.items()},
    "model.": lambda state: {"state_dict": {f"model.{name}": value for name, value in state.items()}, "lr": [0.1]},
    "mp_rank_00": lambda state: {"module": state, "ds_version": "0.18", "ds_config": {}, "param_shapes": None},
    "openai": lambda state: {**state, "input_resolution": torch.tensor(16), "context_length": torch.tensor(8),
                             "vocab_size": torch.tensor(49408)},
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    arch = write_tiny(tmp_path_factory.mktemp("arch"), name="tiny-foreign.json")
    clip = build_towers(ModelConfig(arch=arch), seed=3)[0].clip
    state = {name: value.detach().clone() for name, value in clip.state_dict().items()}
    return arch, {**state, "logit_scale": torch.tensor(2.5)}


def features(model):
    side = model.image_size
    image = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    return model.encode_image(image), model.encode_text(model.tokenize(["a dog", "two red squares on a table"]))


def test_weights_in_the_form_of_a_trainer_give_the_same_features(tiny, tmp_path):
    arch, state = tiny
    torch.save(state, tmp_path / "plain.pt")
    expected = features(load_for_evaluation(f"{arch}:{tmp_path / 'plain.pt'}"))
    for form, wrapped in FORMS.items():
        torch.save(wrapped(state), tmp_path / "weights.pt")
        found = features(load_for_evaluation(f"{arch}:{tmp_path / 'weights.pt'}"))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), form
    started = build_towers(ModelConfig(arch=arch, pretrained=str(tmp_path / "weights.pt")), seed=9)[0].clip
    assert all(torch.equal(value, state[name]) for name, value in started.state_dict().items())


class Program(nn.Module):
    def forward(self, x):
        return x + 1


def test_what_is_no_state_dict_is_named(tiny, tmp_path):
    arch, state = tiny
    zero3 = {name: torch.empty(0) for name in state}
    for contents, message in (
        (None, r"is a TorchScript program.*ViT-B-32-quickgelu:openai.*torch\.jit\.load"),
        ({"module": zero3, "ds_version": "0.18"}, r"part of a DeepSpeed checkpoint.*zero_to_fp32\.py"),
        ({"optimizer_state_dict": {}, "ds_version": "0.18"}, r"part of a DeepSpeed checkpoint.*zero_to_fp32\.py"),
        ({"epoch": 3}, "holds no weights"),
        ([1, 2], "holds a list, not weights by name"),
        (Program(), "neither safetensors nor a PyTorch file of tensors alone"),
    ):
        path = tmp_path / "weights.pt"
        if contents is None:
            torch.jit.trace(Program(), torch.zeros(1)).save(str(path))
        else:
            torch.save(contents, path)
        with pytest.raises(UserError, match=message) as caught:
            load_for_evaluation(f"{arch}:{path}")
        assert "weights_only" not in str(caught.value), "torch's advice would run code"


@pytest.fixture(scope="module")
def transformers_folder(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    side = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={**side, "max_position_embeddings": 8, "vocab_size": 49408, "eos_token_id": 49407},
        vision_config={**side, "image_size": 16, "patch_size": 8},
        projection_dim=24,
    )
    folder = tmp_path_factory.mktemp("transformers") / "clip"
    transformers.CLIPModel(config).eval().save_pretrained(folder)
    return folder


def test_a_clip_model_of_transformers_is_evaluated_and_starts_a_run(transformers_folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.CLIPModel.from_pretrained(transformers_folder).eval()
    binary = tmp_path / "binary"
    binary.mkdir()
    (binary / "config.json").write_bytes((transformers_folder / "config.json").read_bytes())
    torch.save(theirs.state_dict(), binary / "pytorch_model.bin")
    (tmp_path / "same.json").write_text(json.dumps(stored_description(binary)["model_cfg"]))
    image = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for folder in (transformers_folder, binary):
        check_model(str(folder))
        ours = load_for_evaluation(folder)
        tokens = ours.tokenize(["a dog", "two red squares on a table"])
        with torch.no_grad():
            expected = theirs(pixel_values=image, input_ids=tokens)
        torch.testing.assert_close(ours.encode_image(image), expected.image_embeds, rtol=0, atol=1e-5)
        torch.testing.assert_close(ours.encode_text(tokens), expected.text_embeds, rtol=0, atol=1e-5)
        assert ours.towers.logit == (pytest.approx(theirs.logit_scale.item()), None)
        same = f"{tmp_path / 'same.json'}"  # an architecture of the same shape
        assert features(load_for_evaluation(f"{same}:{folder}"))[0].equal(features(ours)[0])
        for arch in ("pretrained", same):
            clip = build_towers(ModelConfig(arch=arch, pretrained=str(folder)), seed=9)[0].clip
            assert torch.equal(clip.visual.proj, ours.towers.clip.visual.proj)


def test_a_folder_of_another_kind_is_refused(transformers_folder, tmp_path):
    config = json.loads((transformers_folder / "config.json").read_text())
    for change, message in (
        ({"model_type": "siglip"}, r"^\S+ holds a transformers model of the type 'siglip'"),
        ({"text_config": {**config["text_config"], "hidden_act": "relu"}}, "one activation"),
        ({"vision_config": {**config["vision_config"], "layer_norm_eps": 1e-6}}, "layer_norm_eps"),
        ({}, "has no weights"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        for load in (load_for_evaluation, lambda spec: build_towers(ModelConfig(pretrained=str(spec)), seed=0)):
            with pytest.raises(UserError, match=message if change else f"{message}|another architecture"):
                load(tmp_path)


def test_an_architecture_with_a_folder_is_that_folder(tiny, tmp_path):
    arch, _ = tiny
    open_clip.add_model_config(arch)
    model = load_for_evaluation(f"{arch}:{write_folder(tmp_path, tiny)}")
    assert features(model)[0].equal(features(load_for_evaluation(tmp_path))[0])
    with pytest.raises(UserError, match="holds another architecture"):
        load_for_evaluation(f"ViT-B-32:{tmp_path}")


def write_folder(folder, tiny):
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": TINY, "preprocess_cfg": {}}))
    torch.save(tiny[1], folder / "open_clip_pytorch_model.bin")
    return folder


def test_an_open_clip_checkpoint_becomes_a_transformers_model_and_comes_back(tiny, tmp_path):
    transformers = pytest.importorskip("transformers")
    arch, state = tiny
    torch.save({"state_dict": state}, tmp_path / "epoch_3.pt")
    given = f"{arch}:{tmp_path / 'epoch_3.pt'}"
    sources = (given, str(write_folder(tmp_path, tiny)), str(tmp_path / "0-transformers"))
    model = load_for_evaluation(given)
    expected = features(model)
    for number, (source, form) in enumerate(itertools.product(sources, ("transformers", "open_clip"))):
        output = tmp_path / (f"{number}-{form}" if number else "0-transformers")
        result = CliRunner().invoke(export, [source, "--output", str(output), "--format", form], catch_exceptions=False)
        found = load_for_evaluation(output)
        for ours, theirs in zip(expected, features(found), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        assert found.towers.logit == (pytest.approx(2.5), None)
        assert "largest difference from the given model" in result.output
    theirs = transformers.CLIPModel.from_pretrained(tmp_path / "0-transformers").eval()
    with torch.no_grad():
        image = theirs(pixel_values=torch.ones(1, 3, 16, 16), input_ids=model.tokenize(["a"])).image_embeds
    torch.testing.assert_close(image, model.encode_image(torch.ones(1, 3, 16, 16)), rtol=0, atol=1e-5)


def test_descriptions_with_values_of_other_types_are_refused(tiny, tmp_path):
    """Regression test: export and training ended in a stack."""
    write_folder(tmp_path, tiny)
    arguments = [str(tmp_path), "--output", str(tmp_path / "out")]
    for change, wrong in (
        ({"model_cfg": 5}, "model_cfg is wrong"),
        ({"model_cfg": {**TINY, "embed_dim": "24"}}, "model_cfg.embed_dim"),
        ({"model_cfg": {**TINY, "vision_cfg": [1]}}, "model_cfg.vision_cfg"),
        ({"model_cfg": {**TINY, "text_cfg": {**TINY["text_cfg"], "width": "wide"}}}, "model_cfg.text_cfg.width"),
        ({"preprocess_cfg": {"mean": 0.5}}, "preprocess_cfg.mean"),
        ({"preprocess_cfg": {"interpolation": "no"}}, "preprocess_cfg.interpolation"),
        ({"architecture": 3}, "architecture"),
        ({"background": [1, "red", 3]}, "background.1"),
    ):
        stored = {"model_cfg": TINY, "preprocess_cfg": {}, **change}
        (tmp_path / "open_clip_config.json").write_text(json.dumps(stored))
        for load in (
            lambda: export.main(arguments, standalone_mode=False),
            lambda: check_towers(ModelConfig(arch="pretrained", pretrained=str(tmp_path))),
            lambda: check_towers(ModelConfig(arch=tiny[0], pretrained=str(tmp_path))),
        ):
            with pytest.raises(UserError, match=f"open_clip_config.json, {wrong}"):
                load()
    (tmp_path / "open_clip_config.json").unlink()
    for config in (
        {"text_config": [1]}, {"vision_config": {"hidden_act": ["gelu"]}},
        {"vision_config": {"num_attention_heads": 0}}, {"text_config": {"hidden_size": "wide", "intermediate_size": 4}},
        {"projection_dim": None, "text_config": "x"}, {},
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip", **config}))
        if not config:
            (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": "x"}))
        with pytest.raises(UserError, match="is damaged"):
            stored_description(tmp_path)


def test_a_description_larger_than_its_weights_takes_no_memory(tiny, tmp_path):
    """Regression test: the towers were made, however large a stranger's description was, and then the weights read."""
    write_folder(tmp_path, tiny)
    vision, text = TINY["vision_cfg"], TINY["text_cfg"]
    for change, wrong in (
        ({"text_cfg": {**text, "vocab_size": 3_000_000}}, "cannot be the weights of the described model"),
        ({"text_cfg": {**text, "vocab_size": 10**30}}, "open_clip cannot load"),
        ({"text_cfg": {**text, "layers": 10**5}}, r"text_cfg\.layers"),
        ({"text_cfg": {**text, "context_length": 10**9}}, r"text_cfg\.context_length"),
        ({"vision_cfg": {**vision, "layers": 10**9}}, r"vision_cfg\.layers"),
        ({"vision_cfg": {**vision, "image_size": 10**30}}, r"vision_cfg\.image_size"),
    ):
        stored = {"model_cfg": {**TINY, **change}, "preprocess_cfg": {}}
        (tmp_path / "open_clip_config.json").write_text(json.dumps(stored))
        with pytest.raises(UserError, match=wrong):
            load_for_evaluation(tmp_path)


def test_forged_weights_are_refused(tmp_path):
    """Regression test: a dict that holds itself was unwrapped, and a pipe was waited for, without an end; 195 kB became
    200 MB."""
    cycle: dict[str, Any] = {}
    cycle["state_dict"] = cycle
    known = {"vision_model.embeddings.class_embedding": torch.zeros(4)}
    without_k = {**known, "vision_model.encoder.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4)}
    for tree, message in ((cycle, "holds no weights"), (without_k, "is not whole")):
        torch.save(tree, tmp_path / "weights.pt")
        with pytest.raises(UserError, match=message), for_open_clip(tmp_path / "weights.pt", weights=True):
            pass
    torch.save({"state_dict": {"weight": torch.zeros(100_000)}}, tmp_path / "weights.pt")
    with zipfile.ZipFile(tmp_path / "weights.pt") as stored:
        contents = {name: stored.read(name) for name in stored.namelist()}
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name, body in contents.items():
            packed.writestr(name, body)
    with pytest.raises(UserError, match="it is compressed"), for_open_clip(tmp_path / "bomb.pt", weights=True):
        pass
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(UserError, match="is not a file"), for_open_clip(tmp_path / "pipe.pt", weights=True):
        pass
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": TINY, "preprocess_cfg": {}}))
    os.mkfifo(tmp_path / "open_clip_model.safetensors")
    with pytest.raises(UserError, match="is not a file"):
        load_for_evaluation(tmp_path)
