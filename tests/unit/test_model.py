"""Building and loading towers, and which models are rejected before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeline.errors import UserError
from pipeline.evaluation.runner.results import model_config_digest
from pipeline.model.evaluation_model import for_evaluation, load_for_evaluation
from pipeline.model.model_folder import save_open_clip
from pipeline.model.towers import ModelConfig, build_towers
from tests.checkpoints import save_checkpoint
from tests.towers import TINY


@pytest.mark.parametrize(("arch", "tag"), [("ViT-B-32", "openai"), ("ViT-B-16", "dfn2b"), ("RN50", "cc12m")])
def test_published_weights_require_their_own_activation(arch: str, tag: str) -> None:
    with pytest.raises(UserError, match=f"take {arch}-quickgelu:{tag}"):
        load_for_evaluation(f"{arch}:{tag}")
    with pytest.raises(UserError, match=f"take {arch}-quickgelu:{tag}"):
        build_towers(ModelConfig(arch=arch, pretrained=tag), seed=0)


def test_a_pretrained_folder_must_have_the_recipes_architecture(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "start", seed=1)
    towers, _ = build_towers(ModelConfig(arch="scenes-vit-tiny", pretrained=str(folder)), seed=2)
    assert torch.equal(towers.clip.visual.proj, load_for_evaluation(str(folder)).towers.clip.visual.proj)
    with pytest.raises(UserError, match=r"vision_cfg\.width.*Set model\.arch=scenes-vit-tiny"):
        build_towers(ModelConfig(arch="scenes-vit-micro", pretrained=str(folder)), seed=2)
    other = tmp_path / "other.json"  # same shapes, but another activation
    config = json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]
    other.write_text(json.dumps({**config, "quick_gelu": True}))
    with pytest.raises(UserError, match="they differ in quick_gelu"):
        build_towers(ModelConfig(arch=str(other), pretrained=str(folder)), seed=2)


def test_a_hugging_face_tokenizer_that_cannot_be_loaded_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="The tokenizer of ViT-B-16-SigLIP, timm/ViT-B-16-SigLIP, cannot be loaded"):
        build_towers(ModelConfig(arch="ViT-B-16-SigLIP"), seed=0, device="meta")


def test_the_logit_bias_does_not_change_the_digests_of_an_evaluated_model(tmp_path: Path) -> None:
    arch = tmp_path / "tiny.json"
    arch.write_text(json.dumps(TINY))
    towers, architecture = build_towers(ModelConfig(arch=str(arch)), seed=0)
    folder = tmp_path / "siglip"
    folder.mkdir()
    state = towers.clip.state_dict()
    save_open_clip(folder, state=state, architecture=architecture, logit_scale=2.3, logit_bias=-9.0)
    in_training = for_evaluation(towers, architecture, source="memory")
    saved = load_for_evaluation(str(folder))
    assert (model_config_digest(saved), saved.digest) == (model_config_digest(in_training), in_training.digest)
