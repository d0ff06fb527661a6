"""An evaluation that a kill has interrupted is done when the run resumes; a whole one is not repeated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs.studies.unit import curve_of
from pipeline.errors import UserError
from pipeline.evaluation import evaluate as whole_evaluation
from pipeline.evaluation.runner.output import SUMMARY_NAME
from pipeline.metrics.sinks import METRICS_NAME
from pipeline.report.run_data import read_run
from pipeline.training import periodic_eval
from tests.metrics import metrics
from tests.own_tasks import write_class_folders, write_csv
from tests.shards import write_shards
from tests.towers import TINY, write_tiny
from tests.training import train_here

TASKS = """
folders: {folder: photos}
table: {csv: items.csv, images: pictures, image: file, label: kind}
"""
STAGES = "schedule.stages=[{until: 0.5, image_size: 16}]"


class Killed(BaseException):
    """Not an Exception: nothing handles it, as nothing handles SIGKILL."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    write_shards(folder / "shards", [40])
    write_class_folders(folder)
    write_csv(folder, "kind")
    (folder / "tasks.yaml").write_text(TASKS)
    write_tiny(folder)
    vision = {**TINY["vision_cfg"], "image_size": 32}  # type: ignore[dict-item]
    (folder / "larger.json").write_text(json.dumps({**TINY, "vision_cfg": vision}))
    return folder


def train(base: Path, name: str, *more: str) -> None:
    train_here(
        f"output={base / name}",
        f"data.sources={base / 'shards'}",
        f"model.arch={base / 'tiny-towers.json'}",
        f"evaluation.suite={base / 'tasks.yaml'}",
        *("evaluation.every=2", "evaluation.workers=0", "samples=32", "checkpoint.every=1"),
        *more,
        resume="latest",
    )


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kills a run in its evaluation after these steps, when the first of two tasks has been written."""
    steps: list[int] = []

    def evaluate(*arguments: Any, suite: Any, output: Path, **more: Any) -> Any:
        if int(output.name.removeprefix("step-")) not in steps:
            return whole_evaluation(*arguments, suite=suite, output=output, **more)
        whole_evaluation(*arguments, suite=suite.only(["folders"]), output=output, **more)
        (output / SUMMARY_NAME).unlink()
        raise Killed

    monkeypatch.setattr(periodic_eval, "evaluate", evaluate)
    return steps


def scores(run: Path) -> dict[int, dict[str, float]]:
    return {int(e.step or 0): {score.task: score.score for score in e.scores} for e in read_run(run).evaluations}


def evaluated(run: Path) -> list[int]:
    return [record["step"] for record in metrics(run, "evaluation")]


@pytest.mark.parametrize("step", [2, 4], ids=["within the run", "at its end"])
def test_it_is_done_when_the_run_resumes(base: Path, kill_at: list[int], step: int) -> None:
    train(base, f"whole-{step}")
    kill_at.append(step)
    name = f"killed-{step}"
    with pytest.raises(Killed):
        train(base, name)
    assert set(scores(base / name)[step]) == {"folders"}
    with pytest.raises(UserError, match=f"no score for table at step-0000000{step}"):
        curve_of(read_run(base / name), suite=str(base / "tasks.yaml"))
    assert any("the evaluation is not finished" in note for note in read_run(base / name).notes)
    kill_at.clear()
    train(base, name)
    assert scores(base / name) == scores(base / f"whole-{step}")
    assert set(scores(base / name)) == {2, 4}
    assert set(scores(base / name)[step]) == {"folders", "table"}
    assert [point["step"] for point in curve_of(read_run(base / name), suite=str(base / "tasks.yaml"))] == [2, 4]
    assert evaluated(base / name) == [2, 4]
    messages = [record["message"] for record in metrics(base / name, "event")]
    assert [message for message in messages if "was not finished" in message] == [
        f"The evaluation after step {step} was not finished: doing it now."
    ]


def test_scores_that_were_not_logged_are_logged(base: Path) -> None:
    train(base, "unlogged")
    path = base / "unlogged" / METRICS_NAME
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith('{"kind": "evaluation", "step": 4,')))
    assert evaluated(base / "unlogged") == [2]
    train(base, "unlogged")
    assert evaluated(base / "unlogged") == [2, 4]


def test_a_whole_evaluation_is_not_repeated(base: Path) -> None:
    train(base, "done")
    train(base, "done")
    assert evaluated(base / "done") == [2, 4]
    shutil.rmtree(base / "done" / "checkpoints" / "step-00000004")
    shutil.rmtree(base / "done" / "checkpoints" / "step-00000003")
    (base / "done" / "checkpoints" / "latest").write_text("step-00000002\n")
    train(base, "done")
    assert evaluated(base / "done") == [2, 4]


def test_at_the_boundary_of_stages_the_run_says_that_it_is_missing(base: Path, kill_at: list[int]) -> None:
    """The weights at hand are resized for the next stage, so that their scores would not be the checkpoint's."""
    kill_at.append(2)
    more = (f"model.arch={base / 'larger.json'}", STAGES)
    with pytest.raises(Killed):
        train(base, "staged", *more)
    kill_at.clear()
    train(base, "staged", *more)
    messages = [record["message"] for record in metrics(base / "staged", "event")]
    assert "The evaluation after step 2 was not finished; `neuclip evaluate` makes up for it." in messages
    assert evaluated(base / "staged") == [4]
