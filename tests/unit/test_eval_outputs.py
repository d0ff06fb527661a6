"""What an evaluation writes: the lock, the summary, other tools' formats, and messages."""

import errno
import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.evaluation.compute import check_bf16
from pipeline.evaluation.datasets.datacomp import AGGREGATES, TASKS
from pipeline.evaluation.datasets.suite import open_suite
from pipeline.evaluation.datasets.task_data import TaskError, decode, plain
from pipeline.evaluation.protocols.classification import class_details
from pipeline.files import read_tree
from pipeline.training.periodic_tests import PeriodicTests
from pipeline.training.recipe import InTrainingConfig, ValidationConfig
from tests.checkpoints import contents, make_model, scored
from tests.evaluation_suite import write_classification


def test_changed_data_is_refused_until_it_is_accepted(model, tmp_path):
    """All checkpoints of a run share one lock: a second checkpoint is not scored on other data than the first."""
    suite, run, other = tmp_path / "suite", tmp_path / "run/evaluation", make_model(1)
    first, second, third = (run / f"step-0000{number}00" for number in ("01", "02", "03"))
    write_classification(suite, TASKS["mnist"])
    assert not scored(model, suite, first).failures
    assert (run / "suite.lock.json").is_file()
    write_classification(suite, TASKS["mnist"], seed=9)
    later = scored(other, suite, second)
    assert "2 files (test/0.tar, test/1.tar) are new, missing or have another SHA-256 than" in later.failures["mnist"]
    assert "relock=true" in later.failures["mnist"]
    assert not scored(other, suite, second, relock=True).failures
    assert not scored(make_model(2), suite, third).failures
    assert not scored(model, suite, first).reused, "its result was computed on the earlier data"
    shutil.rmtree(suite / "wds_mnist_test")
    write_classification(suite, TASKS["cifar10"])
    assert not scored(model, suite, first, relock=True).failures
    assert not scored(model, suite, first).failures, "mnist must no longer be in the lock"
    (run / "suite.lock.json").write_text("{")
    with pytest.raises(UserError, match=r"suite\.lock\.json is damaged"):
        scored(model, suite, first)


def test_summary_covers_one_suite_and_one_configuration(model, tmp_path):
    """Results computed with other settings, or for another suite, are kept but not included in the averages."""
    name, suite, output = "ImageNet dist. shifts", tmp_path / "suite", tmp_path / "out"
    shifts = AGGREGATES[name]
    for key in shifts:
        write_classification(suite, TASKS[key], samples=8)
    part = open_suite(suite, tasks=[shifts[0]])

    def summary():
        return read_tree(output / "summary.json")

    whole = scored(model, suite, output)
    assert summary()["aggregates"][name]["complete"]
    assert not scored(model, part, output, blank_class="drop").reused
    assert set(summary()["scores"]) == {shifts[0]}
    assert summary()["left_out"] == dict.fromkeys(shifts[1:], "it has other settings: blank_class=keep")
    assert not summary()["aggregates"][name]["complete"]
    towers = replace(model.architecture, model_cfg={**model.architecture.model_cfg, "quick_gelu": True})
    scored(replace(model, architecture=towers), part, output)
    assert "model_config" in summary()["left_out"][shifts[1]], "the same weights, but QuickGELU"
    again = scored(model, part, output).summary
    assert again.aggregates[name].complete, "the other tasks have results with the same settings"
    assert again.identity == whole.summary.identity
    write_classification(tmp_path / "other", TASKS["mnist"], samples=8)
    scored(model, tmp_path / "other", output)
    assert set(summary()["scores"]) == {"mnist"}
    assert set(summary()["left_out"].values()) == {"it is a task of another suite"}
    assert [*output.glob("imagenet*.json")], "their results must be kept"


def test_formats_for_other_tools(evaluated):
    folder, found = evaluated
    lines = [json.loads(line) for line in (folder / "eval_results.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == list(found.results)
    for line in lines:
        result = found.results[line["key"]]
        assert line["dataset"] == result.name
        assert line["metrics"] == {**result.metrics, "main_metric": result.score}
    table = (folder / "scores.csv").read_text().splitlines()
    assert table[0] == "task,name,metric,score,chance,samples,official"
    assert table[1].startswith(f"imagenet1k,ImageNet 1k,acc1,{found.results['imagenet1k'].score!r},")
    details = json.loads((folder / "classes/imagenet1k.json").read_text())
    assert sum(entry["samples"] for entry in details["classes"]) == 37 == np.sum(details["matrix"])
    right = sum(details["matrix"][k][k] for k in range(6))
    assert found.results["imagenet1k"].score == pytest.approx(right / 37)
    assert all(pair["true"] != pair["predicted"] and pair["count"] for pair in details["confusions"])
    few = {"target": np.array([999_999, 0, 17, 0]), "prediction": np.array([0, 0, 5, 2])}
    many = class_details(few, ["a name"] * 1_000_000)  # the whole matrix would be 8 terabytes
    assert many["matrix"] is None
    assert many["confusions"] == [{"true": t, "predicted": p, "count": 1} for t, p in ((0, 2), (17, 5), (999_999, 0))]
    assert many["classes"][0] == {"name": "a name", "samples": 2, "accuracy": 0.5}


def test_bf16_is_recorded_in_the_results(model, suite, tmp_path):
    try:
        check_bf16(torch.device("cpu"))
    except UserError as error:
        pytest.skip(str(error))
    found = scored(model, suite, tmp_path / "bf16", precision="bf16")
    assert {result.inputs["precision"] for result in found.results.values()} == {"bf16"}
    assert not scored(model, suite, tmp_path / "again", precision="bf16", batch_size=5).reused
    assert contents(tmp_path / "bf16") == contents(tmp_path / "again")
    exact = scored(model, suite, tmp_path / "bf16")
    assert not exact.reused
    for key, result in exact.results.items():
        assert result.score == pytest.approx(found.results[key].score, abs=0.35), "only 37 samples, with ties"


def test_failure_messages_are_clear_and_contain_no_addresses(model, suite, tmp_path, monkeypatch):
    with pytest.raises(TaskError) as raised:
        decode(b"no image", name="s1 in 0.tar")
    assert "0x" not in str(raised.value)
    assert plain("<PIL.Image.Image at 0x7f12> and <x object at 0xab>") == "<PIL.Image.Image> and <x>"
    assert len(plain("word " * 5000)) <= 600
    (tmp_path / "file").write_text("")
    for given, tasks, output, message in (
        (model, suite, tmp_path / "file", "cannot be written to .*file: File exists"),
        (model, suite, tmp_path / ("x" * 300), "File name too long"),
        (model, tmp_path / ("x" * 300), tmp_path / "out", "Cannot read .*: File name too long"),
        ("x" * 300, suite, tmp_path / "out", "cannot be read: File name too long"),
    ):
        with pytest.raises(UserError, match=message):
            scored(given, tasks, output)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UserError, match=r"cannot be written to .*out: it is read-only"):
        scored(model, suite, tmp_path / "out")


@pytest.fixture
def full_disk(monkeypatch):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/summary.json")
    monkeypatch.setattr("pipeline.evaluation.run.results.write_text", Mock(side_effect=error))


def test_training_survives_an_evaluation_that_cannot_be_written_and_the_command_says_why(
    model, suite, tmp_path, full_disk
):
    with pytest.raises(UserError, match=r"out/summary.json cannot be read or written: No space left"):
        scored(model, suite, tmp_path / "out")
    evaluation, telemetry = InTrainingConfig(suite=str(suite), workers=0), Mock()
    run = SimpleNamespace(output=tmp_path, evaluation=evaluation, validation=ValidationConfig(), total_steps=3)
    state: Any = SimpleNamespace(run=run, world=World(), step=3, ended_early=False, mark=Mock())
    PeriodicTests(state, telemetry, model).evaluate()
    telemetry.scalars.assert_called_once_with("evaluation", step=3, values={})
    failures = telemetry.warning.call_args.kwargs["failures"]
    assert set(failures) == set(open_suite(suite).keys)
    assert "No space left" in next(iter(failures.values()))
