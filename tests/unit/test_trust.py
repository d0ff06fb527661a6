"""Manifests and models of strangers: neither runs code or reads files elsewhere unless the user says so."""

import json
from pathlib import Path

import open_clip
import pytest
import yaml

from jobs import cli
from pipeline.analysis.normalizer_error import run_of
from pipeline.checkpoint.reader import Checkpoint
from pipeline.config import dump, merge
from pipeline.data.shards.manifest_format import ShardTable, is_outside, load_manifest, make_manifest
from pipeline.errors import UserError
from pipeline.model.evaluation_model import load_for_evaluation
from pipeline.model.model_folder import create_from
from pipeline.model.starting_weights import find_start
from pipeline.model.towers import ModelConfig, check_model
from pipeline.training.recipe import load_recipe
from tests.unit.test_architecture_families import write_text_model, write_tokenizer

OUTSIDE = (
    "/etc/passwd", "../0.tar", "a/../../0.tar", "..", "//server/0.tar", "file:///etc/passwd", "FILE:///etc/passwd",
    "local:///etc/passwd", "simplecache::s3://bucket/0.tar", "zip://0.tar::file:///tmp/a.zip", "https::file:///etc/passwd",
    "unknown://0.tar", "x:../../0.tar",
)  # fmt: skip
INSIDE = ("0.tar", "a/b/0.tar", "a/../0.tar", "..hidden/0.tar", "s3://bucket/../0.tar", "https://example.org/0.tar")


def test_places_that_need_consent(tmp_path):
    for name in (*OUTSIDE, *INSIDE):
        outside = name in OUTSIDE
        assert is_outside(name) == outside, name
        rows = [("0.tar", 1, 1, ""), (name, 1, 1, ""), ("1.tar", 1, 1, "")]
        assert ShardTable(rows).outside == ([name] if outside else [])
        make_manifest(rows, root=tmp_path).save(tmp_path)
        assert load_manifest(tmp_path, allow_outside=True).n == 3
        if outside:
            with pytest.raises(UserError, match=r"lists 1 shards .*data\.allow_outside=true") as refused:
                load_manifest(tmp_path)
            assert repr(name) in str(refused.value), "what would be read is shown"


@pytest.fixture
def stranger(tmp_path):
    """A data set whose only shard is the output of a command, which would leave a file."""
    folder = tmp_path / "stranger"
    folder.mkdir()
    make_manifest([(f"pipe:touch {tmp_path}/ran; cat x.tar", 4, 9, "0" * 64)], root=folder).save(folder)
    return folder


RUNS_NOTHING = {
    "train": ["train", "--recipe", "cc3m", "data.sources={data}", "output={out}", "data.allow_outside=true"],
    "manifest": ["manifest", "{data}", "--replace", "--shards", "pipe:touch {out}"],
    "score": ["score", "ViT-B-32:openai", "--data", "{data}", "--output", "{out}", "--device", "cpu"],
    "verify": ["verify", "{data}"],
    "report": ["report", "{data}", "--allow-commands"],
}


@pytest.mark.parametrize("command", RUNS_NOTHING)
def test_commands_of_a_manifest_are_not_run(command, stranger, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([part.format(data=stranger, out=tmp_path / "out") for part in RUNS_NOTHING[command]])
    assert ended.value.code
    assert "shell command" in " ".join(capsys.readouterr().err.split())
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


CONSENTS = {"data": {"allow_outside": True}, "evaluation": {"allow_outside": True}}


def consents(run):
    return [run.data.allow_outside, run.evaluation.allow_outside]


@pytest.mark.parametrize("extra", [CONSENTS, {"methods": {"neuclip": CONSENTS}}])
def test_a_run_of_a_stranger_does_not_consent_for_the_user(tmp_path, caplog, extra):
    stored = merge({"output": "x", "samples": 80, "batch_size": 8, "data": {"sources": "y"}}, extra)
    own, strange = tmp_path / "own.yaml", tmp_path / "config.yaml"
    for path in (own, strange):
        path.write_text(yaml.safe_dump(stored | {"schedule": {"warmup_steps": 1}}))
    assert consents(load_recipe(own)) == [True] * 2
    caplog.clear()
    assert consents(load_recipe(strange)) == [False] * 2
    assert "data.allow_outside=true evaluation.allow_outside=true: it is not" in caplog.text
    assert consents(load_recipe(strange, ["data.allow_outside=true"])) == [True, False]
    (tmp_path / "child.yaml").write_text("extends: config")
    assert consents(load_recipe(tmp_path / "child.yaml")) == [False] * 2
    renamed = tmp_path / "recipe.yaml"
    renamed.write_text(yaml.safe_dump(merge(yaml.safe_load(dump(load_recipe(own))), extra)))
    assert consents(load_recipe(renamed)) == [False] * 2
    if "methods" not in extra:  # which checkpoints do not have
        checkpoint = Checkpoint(tmp_path, {"config": stored | {"schedule": {"warmup_steps": 1}}})
        assert consents(run_of(checkpoint)) == [False] * 2
        assert consents(run_of(checkpoint, changes={"data": {"allow_outside": True}})) == [True, False]


def description(**text_cfg):
    """The config of a small model with a tokenizer of Hugging Face."""
    text = {"context_length": 16, "vocab_size": 200, "width": 32, "heads": 2, "layers": 1, **text_cfg}
    return {"embed_dim": 32, "vision_cfg": {"image_size": 32, "patch_size": 16, "width": 32, "layers": 1,
                                            "head_width": 16}, "text_cfg": text}  # fmt: skip


CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import PreTrainedTokenizerFast
class Own(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model folder whose tokenizer comes with code, which leaves the file `ran` when it is imported."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    folder.mkdir()
    write_tokenizer(folder)
    (folder / "own.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    stated = json.loads((folder / "tokenizer_config.json").read_text())
    stated |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder


def write_model(folder, **text_cfg):
    """Complete a model folder with random weights."""
    config = description(hf_tokenizer_name=str(folder), **text_cfg)
    stored = {"model_cfg": config, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    (folder / "open_clip_config.json").write_text(json.dumps(stored))
    from safetensors.torch import save_file

    open_clip.factory._MODEL_CONFIGS["small-of-a-stranger"] = config
    clip = open_clip.create_model("small-of-a-stranger")
    save_file(clip.state_dict(), folder / "open_clip_model.safetensors")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"trust_remote_code": True}, r"has the tokenizer options trust_remote_code"),
        ({}, r"its tokenizer, .*, comes with Python code"),
        ({"cache_dir": "elsewhere"}, r"has the tokenizer options cache_dir"),
    ],
)
def test_a_model_folder_runs_no_code(model, tmp_path, options, why):
    write_model(model, tokenizer_kwargs=options)
    with pytest.raises(UserError, match=why + ".*a model whose tokenizer needs none"):
        check_model(ModelConfig(arch="pretrained", pretrained=str(model)))
    with pytest.raises(UserError, match=why):
        load_for_evaluation(str(model))
    assert not (tmp_path / "ran").exists()


def test_a_text_tower_with_code_of_its_own_is_refused_without_a_question(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a run with several ranks cannot answer"))
    tower = Path(write_text_model(tmp_path / "tower", "xlm-roberta"))
    (tower / "own.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    stated = json.loads((tower / "config.json").read_text())
    stated |= {"model_type": "of-a-stranger", "auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Own"}}
    (tower / "config.json").write_text(json.dumps(stated))
    config = description(hf_model_name=str(tower), hf_tokenizer_name="unused")
    (tmp_path / "small-with-tower.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="trust_remote_code"):
        create_from(find_start(str(tmp_path / "small-with-tower.json"), None))
    assert not (tmp_path / "ran").exists()
