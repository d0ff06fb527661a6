"""Exports of `neuclip export`, loaded by open_clip and onnxruntime, match the trained model."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import open_clip
import pytest
import torch
from click.testing import CliRunner

from jobs.export import command
from pipeline.checkpoint.layout import validated_model, write_meta
from pipeline.checkpoint.writer import CheckpointConfig, CheckpointWriter, Snapshot
from pipeline.config import to_tree
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.export import exporter
from pipeline.export.exporter import choose_checkpoint, example_inputs, export
from pipeline.model.evaluation_model import EvaluationModel, load_for_evaluation
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.run_files import read_meta
from pipeline.training.recipe import load_recipe
from tests.towers import write_tiny
from tests.written_checkpoints import FACTS

SCALE, BIAS = 3.25, -7.5


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("export") / "run", bias=None)


def write_run(folder, *, bias, arch=None, tokenizer=None):
    """Write a run folder with one checkpoint and one score; a tiny architecture is beside it."""
    arch = arch or write_tiny(folder.parent)
    name = "neuclip" if bias is None else "siglip"
    config = load_recipe(None, ["output=x", "samples=80", "batch_size=8", "schedule.warmup_steps=0",
                                "data.sources=shards", f"objective.name={name}", f"model.arch={arch}"])  # fmt: skip
    towers, architecture = build_towers(ModelConfig(arch=arch, tokenizer=tokenizer), seed=5)
    writer = CheckpointWriter(folder, config=CheckpointConfig(), world=World(), architecture=architecture,
                              on_event=print)  # fmt: skip
    weights = {name: value.detach() for name, value in towers.clip.state_dict().items()}
    facts = {**FACTS, "samples": 80, "config": to_tree(config), "world_size": 1, "versions": {"torch": "9.9"}}
    writer.save(Snapshot(step=10, weights=weights, moments={}, counter=10, objective={"steps": torch.tensor(10)},
                         rows={}, logit=(SCALE, bias), facts=facts))  # fmt: skip
    writer.wait()
    scores = folder / "evaluation" / "step-00000010"
    scores.mkdir(parents=True)
    score = {"task": "scenes/colour", "name": "scenes/colour", "protocol": "classification", "main_metric": "acc1",
             "score": 0.625, "metrics": {"acc1": 0.625}, "chance": 0.125, "samples": 400, "official": False,
             "inputs": {}}  # fmt: skip
    (scores / "scenes-colour.json").write_text(json.dumps(score))
    return folder


def exported(source, output, *options):
    result = CliRunner().invoke(command, [str(source), "--output", str(output), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("bias", [None, BIAS])
def test_open_clip_reproduces_features_and_logits(run, tmp_path, bias):
    """SigLIP's bias is in the logits, too."""
    source = run if bias is None else write_run(tmp_path / "siglip", bias=bias)
    assert "Step 10 exported" in exported(source, tmp_path / "out")
    trained = load_for_evaluation(str(source))
    image, text = example_inputs(trained)
    features = trained.encode_image(image), trained.encode_text(text)
    logits = torch.tensor(SCALE).exp() * features[0] @ features[1].T + (bias or 0.0)
    open_clip.add_model_config(source.parent / "tiny-towers.json")
    by_file = {"pretrained": str(tmp_path / "out" / "open_clip_model.safetensors")}
    by_file |= {} if bias is None else {"init_logit_bias": 0.0}
    for name, kwargs in (("tiny-towers", by_file), (f"local-dir:{tmp_path / 'out'}", {})):
        model, _, preprocess = open_clip.create_model_and_transforms(name, **kwargs)
        assert preprocess.transforms[0].size in (16, (16, 16))
        with torch.no_grad():
            found = model.eval()(image, text)
            torch.testing.assert_close(model.get_logits(image, text)[0], logits, rtol=0, atol=1e-3)
        for ours, theirs in zip(features, found, strict=False):
            torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
        assert found[2].item() == pytest.approx(torch.tensor(SCALE).exp().item())
    assert load_for_evaluation(tmp_path / "out").towers.logit == (SCALE, bias)


def test_programs_accept_any_batch_size_without_open_clip(run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    output = tmp_path / "out"
    exported(run, output, "--onnx")
    trained = load_for_evaluation(str(run))
    image, text = (torch.cat([x, x, x[:1]]) for x in example_inputs(trained))
    expected = trained.encode_image(image), trained.encode_text(text)
    for side, inputs, features in zip(("image", "text"), (image, text), expected, strict=True):
        assert str(Path(__file__).parents[2]).encode() not in (output / f"{side}.onnx").read_bytes()
        session = onnxruntime.InferenceSession(str(output / f"{side}.onnx"), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {side: inputs.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), features, rtol=0, atol=1e-5)


def test_invalid_sources_and_outputs_are_refused(run, tmp_path):
    with pytest.raises(UserError, match="neither a checkpoint"):
        choose_checkpoint(tmp_path)
    chosen = choose_checkpoint(run)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="not empty"):
        export(chosen, tmp_path)
    forged = tmp_path / chosen.path.name
    shutil.copytree(chosen.path, forged)
    write_meta(forged, {**chosen.meta, "config": {"batch_size": 8}})
    for source, options, message in (
        (run, ["--license", "mit\nx: y"], "not the identifier of"),
        (run, ["--format", "transformers", "--onnx"], "export twice"),
        (run, ["--ema"], "has no average of the weights"),
        (forged, [], "lacks settings of a run that the model card needs (KeyError('objective'))"),
    ):
        result = CliRunner().invoke(command, [str(source), "--output", str(tmp_path / "out"), *options])
        assert message in str(result.exception)


def test_the_current_folder_and_a_link_to_a_folder_can_be_exported_to(run, tmp_path, monkeypatch):
    """Regression tests: both were refused, one as a bug."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("there")
    monkeypatch.chdir(tmp_path / "here")
    before = os.stat(".").st_ino
    for output in (Path("."), tmp_path / "link"):
        export(choose_checkpoint(run), output)
        assert {path.name for path in output.iterdir()} >= {"open_clip_config.json", "open_clip_model.safetensors"}
    assert os.stat(tmp_path / "here").st_ino == before, "a shell in it would be nowhere"
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "link", "there"]


def test_the_best_weights_of_a_run_that_validates_their_average(run, tmp_path):
    """Regression test: the trained weights were exported, whose loss nobody knows, without a word."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    best = folder / "checkpoints" / "step-00000010"
    (folder / "checkpoints" / "best").write_text(best.name)
    assert validated_model(best) == best
    assert "(EMA)" not in exported(folder, tmp_path / "one", "--best")
    (best / "ema").mkdir()
    for name in ("open_clip_config.json", "open_clip_model.safetensors"):
        shutil.copy(best / name, best / "ema" / name)
    meta = read_meta(best)
    write_meta(best, {**meta, "config": {**meta["config"], "ema": {"decay": 0.9, "evaluate": True}}})
    assert validated_model(best) == best / "ema"
    assert "that of the average of the weights (EMA); --ema exports it" in exported(folder, tmp_path / "two", "--best")
    assert "(EMA)" not in exported(folder, tmp_path / "three", "--best", "--ema")


def test_an_export_touches_nothing_of_others_and_two_do_not_mix(run, tmp_path, monkeypatch):
    """Regression test: what others had in a folder, or behind a link, named `.out.partial` was deleted."""
    chosen, output, foreign = choose_checkpoint(run), tmp_path / "out", tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis").write_text("ten years")
    (tmp_path / ".out.partial").symlink_to(foreign)
    original = exporter._check_open_clip

    def meanwhile(folder, *arguments, **options):
        output.mkdir(exist_ok=True)
        (output / "of another").touch()
        return original(folder, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(exporter, "_check_open_clip", meanwhile)
        with pytest.raises(UserError, match="is not empty: choose another output folder"):
            export(chosen, output)
    assert [path.name for path in output.iterdir()] == ["of another"]
    export(chosen, tmp_path / "second")
    assert (foreign / "thesis").read_text() == "ten years"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "second", "foreign", ".out.partial"}


def test_a_terminated_export_leaves_nothing(run, tmp_path):
    """Regression test: its temporary folder stayed."""
    arguments = [sys.executable, "-m", "jobs.export", str(run), "--output", str(tmp_path / "out"), "--onnx"]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob(".out.*/open_clip_model.safetensors")):
        time.sleep(0.02)
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("swallowed", [False, True])
def test_a_signal_whose_exception_is_replaced_or_swallowed_stops_an_export(run, tmp_path, monkeypatch, swallowed):
    """Regression test: while weights were written, a SystemExit became this TypeError: "a bug", exit code 70."""

    def signalled(*_, **__):
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit as error:
            if not swallowed:
                raise TypeError("could not determine the shape of object type 'UntypedStorage'") from error
        return 0.0

    monkeypatch.setattr(exporter, "_check_open_clip", signalled)
    result = CliRunner().invoke(command, [str(run), "--output", str(tmp_path / "out")])
    assert (result.exit_code, list(tmp_path.iterdir())) == (128 + signal.SIGTERM, [])


def test_an_export_that_differs_is_refused(run, tmp_path, monkeypatch):
    """Also where only texts differ, by NaN."""
    monkeypatch.setattr(EvaluationModel, "encode_text", lambda self, text: torch.full((len(text), self.dim), torch.nan))
    with pytest.raises(UserError, match="differs from the trained model"):
        export(choose_checkpoint(run), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []  # no folder is left that would block the next attempt
