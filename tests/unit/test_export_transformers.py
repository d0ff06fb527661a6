"""Exports to CLIPModel of transformers with matching features, uploads to the hub, and printed code that runs."""

import contextlib
import io
import json
from typing import Any

import open_clip
import pytest
import torch
from PIL import Image
from timm.models import VisionTransformer, register_model

from jobs.export import command
from pipeline.errors import UserError
from pipeline.export.exporter import example_inputs
from pipeline.export.transformers_model import write_transformers
from pipeline.model.evaluation_model import for_evaluation, load_for_evaluation
from pipeline.model.towers import ModelConfig, build_towers
from tests.documents import ROOT, blocks
from tests.unit.test_attention import KINDS, write_kind
from tests.unit.test_export import exported, write_run

TEXTS = ["a red square", "a photo of two dogs, running", "x" * 200]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("transformers") / "run", bias=None)


def snippet(output):
    """Run the card's first code block in the export folder and return what it prints."""
    code = (output / "README.md").read_text().split("```python\n")[1].split("```")[0]
    printed = io.StringIO()
    with contextlib.chdir(output), contextlib.redirect_stdout(printed):
        exec(code, {})
    return printed.getvalue()


def test_transformers_reproduces_features_logits_and_tokens(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    output = tmp_path / "out"
    assert "largest difference from the trained model" in exported(run, output, "--format", "transformers")
    modes = {path.name: path.stat().st_mode & 0o777 for path in output.iterdir() if path.is_file()}
    assert set(modes.values()) == {modes["config.json"]}, "the files' permissions differ"
    trained = load_for_evaluation(str(run))
    model = transformers.CLIPModel.from_pretrained(str(output)).eval()
    tokens = transformers.CLIPTokenizer.from_pretrained(str(output))(
        TEXTS, padding="max_length", truncation=True, max_length=8, return_tensors="pt"
    )
    ours = trained.tokenize(TEXTS)
    ends = ours.argmax(1)
    for row, end in enumerate(ends.tolist()):
        assert tokens["input_ids"][row, : end + 1].tolist() == ours[row, : end + 1].tolist()
    image = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model(pixel_values=image, **tokens)
    expected = trained.encode_image(image) @ trained.encode_text(ours).T
    torch.testing.assert_close(found.image_embeds, trained.encode_image(image), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.text_embeds, trained.encode_text(ours), rtol=0, atol=1e-5)
    scale = float(torch.tensor(3.25).exp())
    torch.testing.assert_close(found.logits_per_image / scale, expected, rtol=0, atol=1e-5)
    card = (output / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "red" in snippet(output)


def test_a_logit_bias_that_a_clip_model_cannot_hold_is_told(tmp_path):
    pytest.importorskip("transformers")
    source, lost = write_run(tmp_path / "run", bias=-7.5), "no logit bias: add -7.5000 to its logits"
    assert lost in exported(source, tmp_path / "out", "--format", "transformers")
    assert lost in (tmp_path / "out" / "README.md").read_text()
    assert "no logit bias" not in exported(source, tmp_path / "other")


def test_open_clips_card_describes_the_run_runs_and_has_each_tag_once(run, tmp_path):
    exported(run / "checkpoints" / "step-00000010", tmp_path / "out", "--license", "apache-2.0")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: open_clip\n")
    for part in ("| method | neuclip |", "| samples seen | 80 |", "| data | shards |", "torch 9.9",
                 "| colour | acc1 | 0.6250 | 0.1250 | 400 |"):  # fmt: skip
        assert part in card
    assert "objective:" in (tmp_path / "out" / "config.yaml").read_text()
    front = card.split("---")[1]
    assert "license: apache-2.0" in front
    assert sorted(set(front.splitlines())) == sorted([*front.splitlines()[1:], ""])
    assert "red" in snippet(tmp_path / "out")


@register_model
def vit_small_for_siglip_tests(pretrained=False, **kwargs):
    """A small image tower of SigLIP's kind."""
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    arguments = {**sizes, "class_token": False, **kwargs}
    return VisionTransformer(**{k: v for k, v in arguments.items() if not k.startswith(("pretrained", "cache"))})


@pytest.mark.parametrize("tanh", [False, True])
def test_siglip_model_reproduces_features_logits_and_tokens(tmp_path, tanh):
    transformers = pytest.importorskip("transformers")
    from tests.unit.test_architecture_families import write_tokenizer

    config = open_clip.get_model_config("ViT-B-16-SigLIP2" if tanh else "ViT-B-16-SigLIP")
    config["embed_dim"] = 32
    config["vision_cfg"] |= {"timm_model_name": "vit_small_for_siglip_tests", "image_size": 16}
    config["text_cfg"] |= {"width": 24, "heads": 2, "layers": 2, "vocab_size": 200, "context_length": 12}
    arch, words = tmp_path / "siglip.json", write_tokenizer(tmp_path / "tokenizer")
    arch.write_text(json.dumps(config))
    source = write_run(tmp_path / "run", bias=-7.5, arch=str(arch), tokenizer=str(words))
    output = tmp_path / "out"
    exported(source, output, "--format", "transformers")
    trained = load_for_evaluation(str(source))
    model = transformers.AutoModel.from_pretrained(str(output)).eval()
    assert type(model).__name__ == "SiglipModel"
    texts = ["a red square on a blue ground", "two green circles"]
    ours = trained.tokenize(texts)
    tokens = transformers.AutoTokenizer.from_pretrained(str(output))(
        texts, padding="max_length", truncation=True, return_tensors="pt"
    )["input_ids"]
    assert torch.equal(tokens, ours)
    image = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model(pixel_values=image, input_ids=tokens)
    expected = trained.encode_image(image), trained.encode_text(ours)
    torch.testing.assert_close(found.image_embeds, expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.text_embeds, expected[1], rtol=0, atol=1e-5)
    scale = float(torch.tensor(3.25).exp())
    logits = expected[0] @ expected[1].T - 7.5 / scale
    torch.testing.assert_close(found.logits_per_image / scale, logits, rtol=0, atol=1e-5)
    assert "red" in snippet(output)
    trained.towers.clip.visual.trunk.cls_token = torch.nn.Parameter(torch.zeros(1, 1, 32))
    with pytest.raises(UserError, match=r"cannot be a SiglipModel of transformers: .*cls_token"):
        write_transformers(trained, tmp_path, examples=(image, ours), logit=(0.0, None))


@pytest.mark.parametrize("kind", KINDS)
def test_architectures_that_a_clip_model_cannot_hold_are_refused(kind, tmp_path):
    """Their weights have no counterpart, or the features would differ."""
    refused = {"bidirectional": "features differ by", "class_token": "cls_emb", "layer_scale": "ls_1",
               "attentional_pool": "attn_pool"}  # fmt: skip
    towers, architecture = build_towers(ModelConfig(arch=write_kind(tmp_path, kind), packed_attention=False), seed=0)
    model = for_evaluation(towers, architecture, source="memory")
    options: Any = {"examples": example_inputs(model), "logit": (3.0, None)}
    if kind not in refused:
        assert write_transformers(model, tmp_path, **options) < 1e-5
        return
    with pytest.raises(UserError, match=f"cannot be a CLIPModel of transformers: .*({refused[kind]})"):
        write_transformers(model, tmp_path, **options)


def test_the_code_of_the_page_runs(tmp_path, capsys):
    pytest.importorskip("transformers")
    run = write_run(tmp_path / "run", bias=None)
    for name, form in (("mine", "open_clip"), ("mine-transformers", "transformers")):
        command.main([str(run), "--output", str(tmp_path / "hub" / name), "--format", form], standalone_mode=False)
    (tmp_path / "photos").mkdir()
    for name, colour in (("red", "#c02020"), ("green", "#20a040"), ("blue", "#2040c0")):
        Image.new("RGB", (40, 30), colour).save(tmp_path / "photos" / f"{name}.jpg")
    capsys.readouterr()
    scope: dict[str, Any] = {}
    with contextlib.chdir(tmp_path):
        for block in blocks("python", ROOT / "docs" / "use-your-model.md"):
            exec(block, scope)
    printed = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[1] for line in printed) == ["blue.jpg", "green.jpg", "red.jpg"]
    values = [float(line.split()[0]) for line in printed]
    assert values == sorted(values, reverse=True)
    torch.testing.assert_close(scope["probabilities"].sum(1), torch.ones(3))
    texts = scope["encode_texts"](["a dog on a beach", "a cat"])
    expected = scope["model"].logit_scale.exp() * scope["images"][:1] @ texts.T
    torch.testing.assert_close(scope["logits"], expected, rtol=1e-3, atol=1e-3)
