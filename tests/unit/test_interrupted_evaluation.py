"""An evaluation that a kill has interrupted is done when the run resumes; a whole one is not repeated."""

import shutil

import pytest

from jobs.studies.unit import curve_of
from pipeline.errors import UserError
from pipeline.evaluation import evaluate as whole_evaluation
from pipeline.evaluation.run.results import SUMMARY_NAME
from pipeline.report.run_data import read_run
from pipeline.run_files import METRICS_NAME, finished_checkpoints, read_meta
from pipeline.training import periodic_tests
from pipeline.training.step import TrainStep
from tests.metrics import metrics
from tests.own_tasks import write_class_folders, write_csv
from tests.shards import write_shards
from tests.towers import write_tiny
from tests.training import prepare, settings_in, train_here

TASKS = """
folders: {folder: photos}
table: {csv: items.csv, images: pictures, image: file, label: kind}
"""
STAGES = "schedule.stages=[{until: 0.5, image_size: 16}]"


class Killed(BaseException):
    """Not an Exception: nothing handles it, as nothing handles SIGKILL."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = prepare(tmp_path_factory.mktemp("evaluation"))
    write_shards(folder / "held-out", [24])
    write_class_folders(folder)
    write_csv(folder, "kind")
    (folder / "tasks.yaml").write_text(TASKS)
    write_tiny(folder, image_size=32, name="larger.json")
    return folder


def train(base, name, *more, resume="latest"):
    given = ("evaluation.every=2", "evaluation.workers=0", "samples=32", "checkpoint.every=1")
    suite = f"evaluation.suite={base / 'tasks.yaml'}"
    train_here(*settings_in(base, name, suite, *given, *more), resume=resume)


@pytest.fixture(scope="module")
def whole(base):
    train(base, "whole")
    return base / "whole"


@pytest.fixture
def kill_at(monkeypatch):
    """Kills a run in its evaluation after these steps, when the first of two tasks has been written."""
    steps = []

    def evaluate(*arguments, suite, output, **more):
        if int(output.name.removeprefix("step-")) not in steps:
            return whole_evaluation(*arguments, suite=suite, output=output, **more)
        whole_evaluation(*arguments, suite=suite.only(["folders"]), output=output, **more)
        (output / SUMMARY_NAME).unlink()
        raise Killed

    monkeypatch.setattr(periodic_tests, "evaluate", evaluate)
    return steps


def scores(run):
    return {int(e.step or 0): {score.task: score.score for score in e.scores} for e in read_run(run).evaluations}


def evaluated(run):
    return [record["step"] for record in metrics(run, "evaluation")]


@pytest.mark.parametrize("step", [2, 4], ids=["within the run", "at its end"])
def test_it_is_done_when_the_run_resumes(base, whole, kill_at, step):
    kill_at.append(step)
    run, tasks = base / f"killed-{step}", str(base / "tasks.yaml")
    with pytest.raises(Killed):
        train(base, run.name)
    assert set(scores(run)[step]) == {"folders"}
    with pytest.raises(UserError, match=f"no score for table at step-0000000{step}"):
        curve_of(read_run(run), suite=tasks)
    assert any("the evaluation is not finished" in note for note in read_run(run).notes)
    kill_at.clear()
    train(base, run.name)
    assert scores(run) == scores(whole)
    assert {step: set(some) for step, some in scores(run).items()} == {key: {"folders", "table"} for key in (2, 4)}
    assert [point["step"] for point in curve_of(read_run(run), suite=tasks)] == evaluated(run) == [2, 4]
    messages = [record["message"] for record in metrics(run, "event")]
    assert [message for message in messages if "doing it now" in message] == [
        f"This run has no evaluation after step {step}: doing it now."
    ]


def test_scores_that_were_not_logged_are_logged_and_a_whole_evaluation_is_not_repeated(base, whole):
    shutil.copytree(whole, base / "done")
    path = base / "done" / METRICS_NAME
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith('{"kind": "evaluation", "step": 4,')))
    assert evaluated(base / "done") == [2]
    for _ in range(2):
        train(base, "done")
        assert evaluated(base / "done") == [2, 4]
    for step in (3, 4):
        shutil.rmtree(base / "done" / "checkpoints" / f"step-0000000{step}")
    (base / "done" / "checkpoints" / "latest").write_text("step-00000002\n")
    train(base, "done")
    assert evaluated(base / "done") == [2, 4]


@pytest.mark.parametrize("stages", [(), (STAGES,)], ids=["within a stage", "at its end"])
def test_what_a_signal_prevented_is_done_with_the_weights_of_its_stage(base, monkeypatch, stages):
    held_out = (f"validation.sources={base / 'held-out'}", "validation.every=2")
    more = (f"model.arch={base / 'larger.json'}", *held_out, *stages)
    whole, stopped = f"validated-{len(stages)}", f"prevented-{len(stages)}"
    train(base, whole, *more)
    take = TrainStep.__call__

    def take_and_stop(self, *arguments, step, **named):
        return take(self, *arguments, **{**named, "step": step, "stop": step == 1})

    monkeypatch.setattr(TrainStep, "__call__", take_and_stop)
    with pytest.raises(AssertionError):  # exit code 75
        train(base, stopped, *more)
    assert not metrics(base / stopped, "validation")
    monkeypatch.undo()
    train(base, stopped, *more)
    kinds = ("validation", "train", "evaluation")
    for same in (
        lambda run: [(record["step"], record.get("loss")) for kind in kinds for record in metrics(run, kind)],
        lambda run: read_meta(finished_checkpoints(run)[-1])["validation"],
        scores,
    ):
        assert same(base / stopped) == same(base / whole)
    assert read_meta(finished_checkpoints(base / whole)[-1])["validation"]["step"] == 4
    fork = f"forked-{len(stages)}"  # whose folder has no scores of its first step, nor a checkpoint
    train(base, fork, *more, resume=str(base / whole / "checkpoints" / "step-00000002"))
    assert [record["step"] for record in metrics(base / fork, "train")] == [3, 4]
    assert scores(base / fork) == scores(base / whole)
