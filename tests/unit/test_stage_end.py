"""A signal between the last step of a stage and the next stage stops the run, which loses nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.writer import CheckpointWriter
from pipeline.distributed.signals import EXIT_PREEMPTED
from pipeline.training import run as run_module
from pipeline.training.periodic_tests import PeriodicTests
from pipeline.training.recipe import load_recipe
from pipeline.training.run import train
from pipeline.training.saving import Saver
from tests.metrics import equal, metrics, weights
from tests.own_tasks import write_class_folders
from tests.shards import write_shards
from tests.training import SMALL, in_this_process, prepare, settings_in, train_here

STEPS, BORDER = 6, 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stops")
    prepare(folder, image_size=32)
    write_shards(folder / "held-out", [24])
    write_class_folders(folder)
    (folder / "tasks.yaml").write_text("folders: {folder: photos}\n")
    return folder


def settings(base: Path, name: str) -> list[str]:
    tests = [f"validation.sources={base / 'held-out'}", f"evaluation.suite={base / 'tasks.yaml'}"]
    tests += ["validation.every=3", "evaluation.every=3", "evaluation.workers=0", f"samples={8 * STEPS}"]
    return settings_in(base, name, *tests, "schedule.stages=[{until: 0.5, image_size: 16}]", "checkpoint.every=100")


@pytest.fixture(scope="module")
def whole(base: Path) -> Path:
    train_here(*settings(base, "whole"))
    return base / "whole"


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (PeriodicTests, "validate"),
        (Saver, "save"),
        (PeriodicTests, "evaluate"),
        (CheckpointWriter, "finish"),
        (run_module, "check_stages"),  # of the next stage
    ],
)
def test_a_signal_after_the_last_step_of_a_stage_stops_the_run(
    owner: Any, name: str, base: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = f"stopped-{owner.__name__}-{name}"

    plain, sent = getattr(owner, name), []

    def stop_and_go_on(*arguments: Any, **named: Any) -> Any:
        trained = (base / output / "metrics.jsonl").exists() and len(metrics(base / output, "train"))
        if not sent and trained == BORDER:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return plain(*arguments, **named)

    monkeypatch.setattr(owner, name, stop_and_go_on)
    with in_this_process():
        assert train(load_recipe(None, [*SMALL, *settings(base, output)]), resume="latest") == EXIT_PREEMPTED
    monkeypatch.undo()
    said = f"--resume latest found no checkpoint in {base / output / 'checkpoints'}: the run starts anew."
    assert said in (base / output / "metrics.jsonl").read_text()
    assert [record["step"] for record in metrics(base / output, "train")] == [1, 2, 3]
    train_here(*settings(base, output), resume="latest")
    assert equal(weights(base / output, STEPS), weights(whole, STEPS))
    for kind in ("train", "validation", "evaluation"):
        found, expected = ([record["step"] for record in metrics(f, kind)] for f in (base / output, whole))
        assert found == expected
