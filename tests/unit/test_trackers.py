"""Weights & Biases (offline), trackio and MLflow receive what a run reports."""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.tracking  # noqa: F401 (it looks for packages that tests replace)
import pytest
import torch

from pipeline.errors import UserError
from pipeline.metrics import trackers
from pipeline.metrics.logger import Telemetry, TelemetryConfig, sink_names
from tests.launch import wait_for
from tests.training import train_here

LOSSES = [(1, 3.0), (2, 2.0), (2, 2.4375)]
"""By step."""


def opened(run: Path, name: str, *, first_step: int = 0) -> Telemetry:
    config = TelemetryConfig(progress="quiet", tensorboard=False, trackers=(name,), project="tests")
    settings = {"samples": 80, "optimizer": {"lr": 0.001}}
    telemetry = Telemetry(run, config=config, total_steps=9, first_step=first_step, is_main=True, settings=settings)
    telemetry.begin()
    return telemetry


def report(run: Path, name: str) -> None:
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

    def start_run(*, run_id: str | None, run_name: str, **_: Any) -> SimpleNamespace:
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
    fork = tmp_path / "fork"
    fork.mkdir()
    (fork / trackers.WANDB_ID).write_text("0123456789abcdef\n")
    opened(fork, "mlflow", first_step=3).close()
    begins = [value for kind, value in calls if kind == "run"]
    assert begins == [(None, "mine"), ("7f", "mine"), (None, "fork")]
    assert ("experiment", "tests") in calls
    assert [value for kind, value in calls if kind == "settings"] == [{"samples": 80, "optimizer.lr": 0.001}] * 2
    assert [value for kind, value in calls if kind == "metrics"] == [
        (1, {"train/loss": 3.0}), (2, {"train/loss": 2.0}), (2, {"train/loss": 2.4375}),
        (3, {"validation/loss": 1.5}), (3, {"evaluation/imagenet": 0.3125}),
    ]  # fmt: skip


def test_dvclive_removes_nothing(tmp_path, monkeypatch):
    """`Live()` empties ./dvclive unless `resume` is true."""
    calls: list[dict[str, Any]] = []

    def live(**given: Any) -> SimpleNamespace:
        calls.append(given)
        return SimpleNamespace(log_params=calls.append)

    monkeypatch.setitem(sys.modules, "dvclive", SimpleNamespace(Live=live, __spec__=None))
    opened(tmp_path, "dvclive")
    folder = {"dir": str(tmp_path / "dvclive"), "resume": True}
    assert calls == [folder, {"samples": 80, "optimizer.lr": 0.001}]


def test_a_tracker_that_is_missing_or_fails_is_reported(tmp_path, monkeypatch, capsys):
    def fail(*_: Any, **__: Any) -> None:
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
