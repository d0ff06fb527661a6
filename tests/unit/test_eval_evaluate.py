"""Results are bit-identical for any batch size, workers, threads and other checkpoints; failures are reported."""

import json
import re
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from jobs.evaluate import command
from pipeline.errors import UserError
from pipeline.evaluation import evaluate
from pipeline.evaluation.compute import Compute, encode_texts
from pipeline.evaluation.datasets.datacomp import TASKS
from pipeline.evaluation.datasets.suite import Entry, open_suite, open_task
from pipeline.evaluation.protocols import association, classification, retrieval
from pipeline.model.evaluation_model import EvaluationModel, for_evaluation
from pipeline.model.towers import ModelConfig, build_towers
from tests.checkpoints import QUICK, contents, make_model, save_checkpoint, scored
from tests.evaluation_damage import edit_tar
from tests.evaluation_suite import write_classification, write_retrieval


def test_performance_settings_do_not_change_results(model, suite, expected, tmp_path):
    threads = torch.get_num_threads()
    for number, settings in enumerate(({"batch_size": 5, "workers": 2}, {"batch_size": 1000})):
        scored(model, suite, tmp_path / str(number), **settings)
        assert contents(tmp_path / str(number)) == expected
    assert torch.get_num_threads() == threads


def test_several_checkpoints_in_one_pass_match_separate_passes(model, suite, expected, tmp_path):
    others = [make_model(1), make_model(2, image_size=48)]  # one of them with different preprocessing
    with pytest.raises(UserError, match="Several checkpoints would write to"):
        evaluate([others[0], others[0]], suite=suite, config=QUICK)
    found = evaluate([others[0], model, others[1]], suite=suite, output=tmp_path, config=QUICK)
    assert contents(tmp_path / "model-0") == expected
    assert all(not evaluation.failures for evaluation in found)
    alone = tmp_path / "alone"
    scored(others[1], suite, alone)
    assert contents(tmp_path / "model-2") == contents(alone)
    assert contents(alone) != expected


def test_unchanged_results_are_not_recomputed_also_after_a_crash(model, suite, tmp_path):
    crash = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, suite=suite, output=tmp_path, config=QUICK, progress=crash)
    first = scored(model, suite, tmp_path)
    assert len(first.reused) == 1
    written = {path: path.stat().st_ino for path in tmp_path.glob("*.json") if path.name != "summary.json"}
    second = scored(model, suite, tmp_path)
    assert second.reused == set(first.results) == set(second.results)
    assert written == {path: path.stat().st_ino for path in written}
    assert not scored(model, suite, tmp_path, recompute=True).reused
    assert not scored(make_model(5), suite, tmp_path).reused


def test_non_finite_features_fail_only_their_checkpoint(model, suite, expected, tmp_path):
    class Broken(EvaluationModel):
        def encode_image(self, image):
            features = super().encode_image(image)
            features[3, 0] = torch.nan
            return features

    towers, architecture = build_towers(ModelConfig(arch="scenes-vit-tiny"), seed=7)
    good = for_evaluation(towers, architecture, source="broken")
    broken = Broken(good.towers, good.architecture, good.preprocess, good.source)
    found = evaluate([broken, model], suite=suite, output=tmp_path, config=QUICK)
    assert not found[0].results
    assert all("not finite" in text and "diverged" in text for text in found[0].failures.values())
    assert "s0000003 in" in found[0].failures["imagenet1k"]
    assert contents(tmp_path / "model-0") == expected


def test_outcomes_reproduce_the_metrics(evaluated):
    for key, result in evaluated[1].results.items():
        assert result.inputs["micro_batch"] == QUICK.micro_batch, "it may change the last bits"
        outcomes = dict(np.load(evaluated[0] / f"{TASKS[key].stem}.outcomes.npz", allow_pickle=False))
        if result.protocol == "classification":
            classes = 6 if key == "imagenet1k" else 7
            assert classification.metrics(TASKS[key], outcomes, classes=classes) == result.metrics
        else:
            module = retrieval if result.protocol == "retrieval" else association
            assert module.metrics(outcomes) == result.metrics


def test_examples_show_the_best_images_and_captions(evaluated):
    folder = next(evaluated[0].glob("*.examples"))
    examples = json.loads((folder / "examples.json").read_text())
    assert len(examples) == retrieval.EXAMPLES
    for example in examples:
        scores = [image["score"] for image in example["images"]]
        assert scores == sorted(scores, reverse=True)
        assert [image["right"] for image in example["images"]] == [example["rank"] == k for k in range(5)]
        assert all((folder / image["file"]).is_file() for image in example["images"])
        assert (folder / f"{example['right']}.jpg").is_file()
    images = json.loads((folder / "images.json").read_text())
    for example in images:
        assert [caption["right"] for caption in example["captions"]].count(True) == min(
            5, sum(caption["caption"] in example["own"] for caption in example["captions"])
        )
        assert (example["rank"] < 5) == any(caption["right"] for caption in example["captions"])


def test_examples_of_two_evaluations_are_not_mixed_and_links_not_followed(tmp_path, monkeypatch):
    task = TASKS["retrieval/flickr_1k_test_image_text_retrieval"]
    data = open_task(Entry(task, write_retrieval(tmp_path, task, layout="parquet", samples=6)))
    features = torch.eye(6), torch.eye(6).repeat_interleave(5, 0)
    folder, photos = tmp_path / "a.examples", tmp_path / "photos"
    photos.mkdir()
    (photos / "20260101.jpg").write_bytes(b"photo")
    folder.symlink_to(photos)
    retrieval.write_examples(folder, data, features=features)
    assert contents(photos) == {"20260101.jpg": b"photo"}
    assert (folder / "examples.json").is_file()
    monkeypatch.setattr(retrieval, "decode", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        retrieval.write_examples(folder, data, features=features)
    assert not list(folder.glob("*.json"))


def test_every_micro_batch_of_texts_is_progress(model):
    """A unit of texts may take longer than a rank may be silent."""
    seen: list[None] = []
    with Compute(torch.device("cpu"), threads=2, on_result=lambda: seen.append(None)) as compute:
        encode_texts(model, [f"caption {number}" for number in range(10)], compute=compute, micro_batch=4)
    assert len(seen) == 3


def test_every_form_of_checkpoint_is_accepted(suite, tmp_path, expected):
    """Our checkpoint, a run, a hub folder and ARCH:FILE with the same weights give the same results."""
    folder, hub = save_checkpoint(tmp_path / "run/checkpoints/step-00000500", 0), tmp_path / "hub"
    shutil.copytree(folder, hub)
    (folder / "checkpoint.json").write_text("{}")  # which a run writes last
    weights = f"scenes-vit-tiny:{folder / 'open_clip_model.safetensors'}"
    opened = open_suite(suite, tasks=["imagenet1k"])
    for number, spec in enumerate((str(folder), str(tmp_path / "run"), str(hub), weights)):
        assert not scored(spec, opened, tmp_path / f"out-{number}").failures
        assert (tmp_path / f"out-{number}/imagenet1k.json").read_bytes() == expected["imagenet1k.json"]
    evaluate(str(folder), suite=opened, config=QUICK)
    assert (tmp_path / "run/evaluation/step-00000500/imagenet1k.json").read_bytes() == expected["imagenet1k.json"]


def test_damaged_and_mismatched_checkpoints_are_refused(suite, tmp_path):
    folder = save_checkpoint(tmp_path / "step-00000001", 0)
    (tmp_path / "noise.pt").write_bytes(b"noise" * 100)
    for spec, message in (
        (f"ViT-B-32:{folder / 'open_clip_model.safetensors'}", "another architecture"),
        (f"scenes-vit-tiny:{tmp_path / 'noise.pt'}", r"noise\.pt"),
        (str(tmp_path / "nothing"), "neither a folder"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate(spec, suite=suite)
    other = json.dumps({"files": {"open_clip_model.safetensors": {"sha256": "0" * 64}}})
    for text in (other, "\0" * 100, '{"files": [1]}', '{"files": {}, "digest": "0"}'):
        (folder / "checkpoint.json").write_text(text)
        with pytest.raises(UserError, match=r"is damaged: .*Take another checkpoint"):
            evaluate(str(folder), suite=suite)


def test_command_line(suite, tmp_path):
    folder = save_checkpoint(tmp_path / "step-00000001", 0)
    arguments = [str(folder), "--suite", str(suite), "--output", str(tmp_path / "out"), "--device", "cpu", "workers=0"]
    done = CliRunner().invoke(command, [*arguments, "--task", "imagenet1k"], standalone_mode=False)
    assert done.exception is None
    assert done.return_value == 0
    assert "INCOMPLETE DataComp Average: 1 of 38 tasks" in done.output
    broken = tmp_path / "broken"
    edit_tar(write_classification(broken, TASKS["mnist"]), {"s0000000.webp": bytes(400)})
    failed = CliRunner().invoke(command, [*arguments[:2], str(broken), *arguments[3:]], standalone_mode=False)
    assert failed.return_value == 1
    assert re.search(r"FAILED\n +Corrupt image", failed.output)
    other = save_checkpoint(tmp_path / "step-00000002", 1)
    both = CliRunner().invoke(command, [str(other), *arguments, "--task", "imagenet1k"], standalone_mode=False)
    assert f"[1] {other}\n[2] {folder}\n" in both.output
    assert re.search(r"\nimagenet1k( +0\.\d{4}){2} +acc1", both.output), "one line per task, a column per checkpoint"
    refused = CliRunner().invoke(command, [*arguments, "batch_sise=3"], standalone_mode=False)
    assert isinstance(refused.exception, UserError)
    assert "batch_size" in str(refused.exception)
