"""What is written of a run's metrics, also on a full disk, after a resume and by several threads, and by trackers."""

import json
import resource
import sqlite3
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import accelerate.tracking  # noqa: F401 (it looks for packages that tests replace)
import pytest
import torch

from pipeline import files
from pipeline.errors import UserError
from pipeline.metrics import trackers
from pipeline.metrics.logger import Telemetry, TelemetryConfig, sink_names
from pipeline.metrics.sinks import JsonLines, headline
from tests.launch import wait_for
from tests.training import train_here

LOSSES = [(1, 3.0), (2, 2.0), (2, 2.4375)]
"""By step."""


def opened(run, tracker="", *, first_step=0, is_main=True):
    config = TelemetryConfig(progress="quiet", tensorboard=False, trackers=tracker, project="tests")
    settings = {"samples": 80, "optimizer": {"lr": 0.001}}
    telemetry = Telemetry(run, config=config, total_steps=9, first_step=first_step, is_main=is_main, settings=settings)
    telemetry.begin()
    return telemetry


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_rank_0_alone_has_sinks(tmp_path):
    """Those of a user's own are in test_own_package.py."""
    for is_main in (False, True):
        assert not list(tmp_path.iterdir())
        telemetry = opened(tmp_path, first_step=3, is_main=is_main)
        telemetry.scalars("train", step=4, values={"loss": 1 / 3})
        telemetry.scalars("evaluation", step=4, values={"a": 0.5})
        telemetry.distributions(step=4, values={"x": torch.ones(3)})
        telemetry.event("Something.", facts_of=1)
        telemetry.close()
    first, second, third, fourth = ({k: v for k, v in line.items() if k != "time"} for line in lines(tmp_path))
    assert first == {"kind": "train", "step": 4, "loss": 0.333333333}
    assert second == {"kind": "evaluation", "step": 4, "a": 0.5}
    assert third["kind"] == "distribution"
    assert fourth == {"kind": "event", "message": "Something.", "facts_of": 1}


def test_nothing_is_written_before_the_run_begins_or_after_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 7, "loss": 1.0}\n')
    config = TelemetryConfig(progress="quiet")
    telemetry = Telemetry(tmp_path, config=config, total_steps=9, first_step=3, is_main=True)
    telemetry.event("A note.")
    telemetry.close()
    assert [line["kind"] for line in lines(tmp_path)] == ["train"]
    assert list(tmp_path.iterdir()) == [path]
    telemetry.begin()
    telemetry.close()
    telemetry.event("Too late.")  # an upload that ends after its run
    assert [line.get("message") for line in lines(tmp_path)] == ["A note."]


def test_settings_that_cannot_be_meant_are_rejected():
    with pytest.raises(UserError, match=r"no such tracker.*jsonl"):
        sink_names(TelemetryConfig(trackers=("wand",)))
    assert sink_names(TelemetryConfig(trackers=("jsonl",))) == ["jsonl", "tensorboard", "progress"]


def test_a_resumed_run_replaces_the_records_of_later_steps_and_loses_no_earlier_one(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    kept = ['{"kind": "train", "step": 1, "loss": 1.0}', '{"message": "Kept."}', "{}"]
    outdated = ['{"kind": "train", "step": 2, "loss": 2.0}', "5", '{"kind": "train"}', "\0\0", '{"kind": "tr']
    path.write_text("\n".join([*kept, *outdated]))  # the last line was cut by a crash
    before = path.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "replace", full)  # a kill or a full disk while the records are written again
        with pytest.raises(OSError, match="No space"):
            opened(tmp_path, first_step=1)
    assert path.read_text() == before
    telemetry = opened(tmp_path, first_step=1)
    telemetry.scalars("train", step=2, values={"loss": 20.0})
    telemetry.close()
    written = path.read_text().splitlines()
    assert written[:-1] == kept
    assert json.loads(written[-1])["loss"] == 20.0


def test_distributions_contain_only_finite_values(tmp_path):
    telemetry = opened(tmp_path)
    values = torch.tensor([[1.0, 2.0], [3.0, torch.nan]])
    telemetry.distributions(step=5, values={"x": values, "none": torch.tensor([torch.inf])})
    telemetry.close()
    (line,) = lines(tmp_path)
    assert line["x"] == [1.0, 1.1, 1.5, 2.0, 2.5, 2.9, 3.0]
    assert "none" not in line
    assert line["quantiles"] == [0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0]


def test_progress_lines_show_the_most_important_metrics(tmp_path, capsys):
    config = TelemetryConfig(tensorboard=False)
    telemetry = Telemetry(tmp_path, config=config, total_steps=9, first_step=0, is_main=True)
    telemetry.begin()
    telemetry.scalars("train", step=9, values={"loss": 0.5, "samples_per_second": 1234.0, "lr": 1.0})
    telemetry.scalars("evaluation", step=9, values={"a": 0.25})
    telemetry.event("Something.")
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("step 9/9  1,234 samples/s  loss 0.5000  ETA ")
    assert (second, third) == ("Evaluation at step 9: a 0.250", "Something.")
    assert headline({"samples_per_second": 0.4567}) == "0.46 samples/s"


def test_lines_that_a_full_disk_refuses_are_written_when_it_has_room(tmp_path, capsys):
    """Regression test: they were missing."""
    telemetry = opened(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # takes a part of a line, as a full disk does
        for step in (1, 2, 3):
            telemetry.scalars("train", step=step, values={"loss": 0.5})
        assert (tmp_path / "metrics.jsonl").stat().st_size == 100
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    telemetry.scalars("train", step=4, values={"loss": 0.5})
    telemetry.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert capsys.readouterr().err == (
        "JsonLines cannot be written ([Errno 27] File too large): its lines are kept in memory until they can be.\n"
    )


def test_threads_report_one_after_the_other(tmp_path, monkeypatch, capsys):
    """Regression test: an upload reported beside a step's metrics raised BufferError, and a record was lost."""
    inside = threading.Lock()

    def slow(sink):
        assert inside.acquire(blocking=False)
        time.sleep(0.05)
        inside.release()

    telemetry = opened(tmp_path)
    with monkeypatch.context() as patched, ThreadPoolExecutor(4) as pool:
        patched.setattr(JsonLines, "_flush", slow)
        list(pool.map(telemetry.event, "0123"))
    telemetry.close()
    assert sorted(record["message"] for record in lines(tmp_path)) == ["0", "1", "2", "3"]
    assert capsys.readouterr().err == ""


def report(run, name):
    """Report steps 1 and 2, and after a resume steps 2 and 3 with scores."""
    run.mkdir()
    telemetry = opened(run, name)
    telemetry.scalars("train", step=1, values={"loss": 3.0})
    telemetry.scalars("train", step=2, values={"loss": 2.0})
    telemetry.distributions(step=2, values={"gap": torch.arange(10.0)})
    telemetry.close()
    telemetry = opened(run, name, first_step=1)
    telemetry.scalars("train", step=2, values={"loss": 2.4375})
    telemetry.scalars("validation", step=3, values={"loss": 1.5})
    telemetry.scalars("evaluation", step=3, values={"imagenet": 0.3125})
    telemetry.close()


@pytest.mark.slow
def test_wandb_offline_has_metrics_scores_histograms_and_settings_of_one_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    report(tmp_path / "mine", "wandb")
    files = sorted((tmp_path / "mine" / "wandb").glob("offline-run-*/*.wandb"))
    parts = b"train/loss 2.4375 validation/loss evaluation/imagenet 0.3125 distribution/gap samples".split()
    wait_for(
        lambda: all(part in b"".join(file.read_bytes() for file in files) for part in parts),
        "wandb's own process writes the files",
        pause=0.5,
    )
    assert len(files) == 2
    assert len({file.name for file in files}) == 1, "a resumed run goes on in the same tracker's run"


@pytest.mark.slow
def test_trackio_has_metrics_and_scores(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    pytest.importorskip("trackio")
    report(tmp_path / "mine", "trackio")
    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        found = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    rows = [(name, step, json.loads(metrics)) for name, step, metrics in found]
    assert {name for name, _, _ in rows} == {"mine"}
    assert [(step, row["train/loss"]) for _, step, row in rows if "train/loss" in row] == LOSSES
    assert [(step, row["evaluation/imagenet"]) for _, step, row in rows if "evaluation/imagenet" in row] == [
        (3, 0.3125)
    ]


def test_a_resumed_run_goes_on_in_the_same_run_of_mlflow(tmp_path, monkeypatch):
    calls: list[tuple[str, Any]] = []

    def start_run(*, run_id, run_name, **_):
        calls.append(("run", (run_id, run_name)))
        return SimpleNamespace(info=SimpleNamespace(run_id="7f"))

    client = SimpleNamespace(
        __spec__=None,
        search_experiments=lambda filter_string: [],
        create_experiment=lambda name, **_: calls.append(("experiment", name)),
        start_run=start_run,
        utils=SimpleNamespace(validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=9, MAX_PARAMS_TAGS_PER_BATCH=9)),
        log_params=lambda values: calls.append(("settings", values)),
        log_metrics=lambda values, step: calls.append(("metrics", (step, values))),
        end_run=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "mlflow", client)
    report(tmp_path / "mine", "mlflow")
    begins = [value for kind, value in calls if kind == "run"]
    assert begins == [(None, "mine"), ("7f", "mine")]
    assert ("experiment", "tests") in calls
    assert [value for kind, value in calls if kind == "settings"] == [{"samples": 80, "optimizer.lr": 0.001}]
    assert [value for kind, value in calls if kind == "metrics"] == [
        (1, {"train/loss": 3.0}), (2, {"train/loss": 2.0}), (2, {"train/loss": 2.4375}),
        (3, {"validation/loss": 1.5}), (3, {"evaluation/imagenet": 0.3125}),
    ]  # fmt: skip


def test_dvclive_removes_nothing(tmp_path, monkeypatch):
    """`Live()` empties ./dvclive unless `resume` is true."""
    calls: list[dict[str, Any]] = []

    def live(**given):
        calls.append(given)
        return SimpleNamespace(log_params=calls.append)

    monkeypatch.setitem(sys.modules, "dvclive", SimpleNamespace(Live=live, __spec__=None))
    opened(tmp_path, "dvclive")
    folder = {"dir": str(tmp_path / "dvclive"), "resume": True}
    assert calls == [folder, {"samples": 80, "optimizer.lr": 0.001}]


def test_a_tracker_that_is_missing_or_fails_is_reported(tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("no network")

    with monkeypatch.context() as patched:
        patched.setattr(trackers.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"telemetry\.trackers=wandb needs the package wandb: pip install wandb"):
            train_here("samples=8", "data.sources=x", f"output={tmp_path / 'run'}", "telemetry.trackers=[wandb]")
    assert "wandb" in sink_names(TelemetryConfig(trackers=("wandb",))), "settings are read where no run is started, too"
    client = SimpleNamespace(init=fail, __spec__=None)
    monkeypatch.setitem(sys.modules, "wandb", client)
    monkeypatch.setitem(sys.modules, "trackio", client)
    with pytest.raises(UserError, match=r"cannot be opened \(RuntimeError: no network\).*WANDB_MODE=offline"):
        opened(tmp_path, "wandb")
    (tmp_path / "tensorboard").touch()
    with pytest.raises(
        UserError, match=r"tensorboard cannot be opened.*Train without it: telemetry\.tensorboard=false"
    ):
        opened(tmp_path, "tensorboard")
    client.init = lambda **_: SimpleNamespace(log=fail)
    telemetry = opened(tmp_path, "trackio")
    telemetry.scalars("train", step=1, values={"loss": 1.0})
    telemetry.scalars("train", step=2, values={"loss": 1.0})
    assert capsys.readouterr().err.count("trackio cannot be written (RuntimeError('no network'))") == 1
    assert (tmp_path / "metrics.jsonl").read_text().count("loss") == 2
