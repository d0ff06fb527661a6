"""Building and loading towers, and which models are rejected before anything is loaded."""

import json

import pytest
import torch

from jobs import cli
from pipeline.errors import UserError
from pipeline.evaluation.identity import model_config_digest
from pipeline.model.evaluation_model import for_evaluation, load_for_evaluation
from pipeline.model.model_folder import save_open_clip, save_tensors
from pipeline.model.towers import ModelConfig, build_towers, check_model, without_weights
from tests.checkpoints import save_checkpoint
from tests.towers import TINY


@pytest.mark.parametrize(("arch", "tag"), [("ViT-B-32", "openai"), ("ViT-B-16", "dfn2b"), ("RN50", "cc12m")])
def test_published_weights_require_their_own_activation(arch, tag):
    with pytest.raises(UserError, match=f"take {arch}-quickgelu:{tag}"):
        load_for_evaluation(f"{arch}:{tag}")
    with pytest.raises(UserError, match=f"take {arch}-quickgelu:{tag}"):
        build_towers(ModelConfig(arch=arch, pretrained=tag), seed=0)


def test_a_pretrained_folder_must_have_the_recipes_architecture(tmp_path):
    folder = save_checkpoint(tmp_path / "start", seed=1)
    towers, _ = build_towers(ModelConfig(arch="scenes-vit-tiny", pretrained=str(folder)), seed=2)
    assert torch.equal(towers.clip.visual.proj, load_for_evaluation(str(folder)).towers.clip.visual.proj)
    with pytest.raises(UserError, match=r"vision_cfg\.width.*model\.arch=pretrained takes"):
        build_towers(ModelConfig(arch="scenes-vit-micro", pretrained=str(folder)), seed=2)
    settings = {"arch": "scenes-vit-tiny", "pretrained": str(tmp_path / "longer")}
    longer, described = build_towers(ModelConfig(arch="scenes-vit-tiny", context_length=40), seed=1)
    (tmp_path / "longer").mkdir()
    save_open_clip(tmp_path / "longer", state=longer.clip.state_dict(), architecture=described, logit=(2.5, None))
    for config in (ModelConfig(**settings), without_weights(ModelConfig(**settings))):
        towers, described = build_towers(config, seed=2)
        assert (described.name, described.context_length) == ("scenes-vit-tiny", 40), "that of the weights"
        assert towers.clip.positional_embedding.shape[0] == 40
    other = tmp_path / "other.json"  # same shapes, but another activation
    config = json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]
    other.write_text(json.dumps({**config, "quick_gelu": True}))
    with pytest.raises(UserError, match="they differ in quick_gelu"):
        build_towers(ModelConfig(arch=str(other), pretrained=str(folder)), seed=2)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("truncated", r"weights\.safetensors cannot be loaded: it is damaged"),
        ("other layout", r"open_clip cannot load tiny .*Unexpected key.* \.\.\.$"),
        ("other width", r"open_clip cannot load tiny .*weights\.safetensors: "),
        ("not finite", r"weights\.safetensors have values that are not finite .*visual\.proj"),
    ],
)
def test_a_file_of_weights_that_cannot_be_used(tmp_path, broken, message):
    arch, weights = tmp_path / "tiny.json", tmp_path / "weights.safetensors"
    arch.write_text(json.dumps(TINY))
    state = build_towers(ModelConfig(arch=str(arch)), seed=0)[0].clip.state_dict()
    state["logit_scale"] = torch.tensor(2.6)
    if broken == "other layout":
        state = {f"vision_model.encoder.layers.0.{name}": value for name, value in state.items()}
    if broken == "other width":
        state["positional_embedding"] = torch.zeros(state["positional_embedding"].shape[0] + 1, 1)
    if broken == "not finite":
        state["visual.proj"][0, 0] = torch.nan
    save_tensors(state, weights)
    if broken == "truncated":
        weights.write_bytes(weights.read_bytes()[:10_000])
    with pytest.raises(UserError, match=message) as error:
        build_towers(ModelConfig(arch=str(arch), pretrained=str(weights)), seed=0)
    assert len(str(error.value)) < 1_500


def test_a_hugging_face_tokenizer_that_cannot_be_loaded_is_reported(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # the variable was read when another test imported it
    with pytest.raises(UserError, match="The tokenizer of ViT-B-16-SigLIP, timm/ViT-B-16-SigLIP, cannot be loaded"):
        build_towers(ModelConfig(arch="ViT-B-16-SigLIP"), seed=0, device="meta")


def test_the_logit_bias_does_not_change_the_digests_of_an_evaluated_model(tmp_path):
    arch = tmp_path / "tiny.json"
    arch.write_text(json.dumps(TINY))
    towers, architecture = build_towers(ModelConfig(arch=str(arch)), seed=0)
    folder = tmp_path / "siglip"
    folder.mkdir()
    state = towers.clip.state_dict()
    save_open_clip(folder, state=state, architecture=architecture, logit=(2.3, -9.0))
    in_training = for_evaluation(towers, architecture, source="memory")
    saved = load_for_evaluation(str(folder))
    assert (model_config_digest(saved), saved.digest) == (model_config_digest(in_training), in_training.digest)


def test_an_architecture_is_one_json_file(tmp_path, monkeypatch, capsys):
    """What CONTRIBUTING says to add: the file, in the folder of our configs; the commands know its name then."""
    monkeypatch.setattr("pipeline.model.architectures.OUR_CONFIGS", tmp_path)
    (tmp_path / "toy-of-a-test.json").write_text(json.dumps(TINY))
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--dry-run", "data.sources=x", "output=y", "samples=80", "batch_size=8",
                  "data.streams=8", "schedule.warmup_steps=1",
                  "model.arch=toy-of-a-test"])  # fmt: skip
    printed = capsys.readouterr()
    assert (ended.value.code or 0) == 0, printed.err
    assert "arch: toy-of-a-test" in printed.out
    towers, architecture = build_towers(ModelConfig(arch="toy-of-a-test"), seed=0)
    text = architecture.tokenize(["a cat", "two dogs"])
    image, texts = towers(torch.zeros(2, 3, 16, 16), text)
    assert image.shape == texts.shape == (2, 16)
    with pytest.raises(UserError, match=r"'toy-of-a-tets' is not known\. .*toy-of-a-test"):
        check_model(ModelConfig(arch="toy-of-a-tets"))


def test_a_tokenizer_that_would_not_be_read_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"model\.tokenizer = .* would have no effect: scenes-vit-micro"):
        check_model(ModelConfig(arch="scenes-vit-micro", tokenizer=str(tmp_path)))


TIMM = {"timm_model_name": "vit_tiny_patch16_224", "timm_pool": "", "timm_proj": "linear", "image_size": 64}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "is not in open_clip's format: not a mapping"),
        (b'{"embed_dim": "x", "vision_cfg": {}, "text_cfg": {}}', "model_cfg.embed_dim is wrong: Input"),
        (b"{", "is not in open_clip's format: Expecting property name"),
        (b"\xe9", "is not in open_clip's format: 'utf-8' codec"),
        (None, "there is no such file"),
        (
            json.dumps({"embed_dim": 16, "text_cfg": {"layers": 1}, "vision_cfg": TIMM}).encode(),
            "image_size = 64, and its timm model takes images of 224 px",
        ),
    ],
)
def test_a_file_that_describes_no_architecture_is_refused(tmp_path, content, message):
    path = tmp_path / "own.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        check_model(ModelConfig(arch=str(path)))
