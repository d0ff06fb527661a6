"""Rollbacks: which checkpoint a run returns to, what stays on disk, and at which size it trains on."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.checkpoint.reader import Checkpoint
from pipeline.errors import UserError
from pipeline.objectives.openclip import OpenClip
from pipeline.run_files import finished_checkpoints
from pipeline.training import run as run_module
from pipeline.training.loop import Trainer
from pipeline.training.recipe import load_recipe
from pipeline.training.run_state import SkippedSteps
from pipeline.training.step import TrainStep
from tests.metrics import equal, metrics, weights
from tests.thread_world import on_ranks
from tests.training import SMALL, in_this_process, prepare, settings_in, train_here

STEPS = 14
STAGES = "schedule.stages=[{until: 0.36, image_size: 16}]"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("rollback"), [100, 100], image_size=32)  # one epoch: no sample is repeated


def train(base, name, *more):
    given = (f"samples={8 * STEPS}", "checkpoint.every=1", "max_skipped_steps=2", "max_rollbacks=3")
    train_here(*settings_in(base, name, *given, *more), resume="latest")
    return base / name


def spoil(monkeypatch, attempts):
    """The loss is NaN in these calls of the objective."""
    compute, calls = OpenClip.compute, iter(range(1000))

    def poisoned(*given, **named):
        output = compute(*given, **named)
        return replace(output, loss=output.loss * torch.nan) if next(calls) in attempts else output

    monkeypatch.setattr(OpenClip, "compute", poisoned)


def ruin(monkeypatch, attempt):
    """The update of this attempt is applied, and all weights are NaN after it."""
    take, calls = TrainStep.__call__, iter(range(1000))

    def ruined(self, *arguments, **more):
        result = take(self, *arguments, **more)
        if next(calls) == attempt:
            state = self.engine.state
            weights = {name: torch.full_like(value, torch.nan) for name, value in state.weights()}
            moments = {(name, key): value for name, key, value in state.moments()}
            state.load(weights=weights, moments=moments, counter=state.counter())
        return result

    monkeypatch.setattr(TrainStep, "__call__", ruined)


def rollbacks(run):
    return [(r["step"], r["checkpoint"]) for r in metrics(run, "event") if "checkpoint" in r]


def test_the_good_checkpoint_survives_bad_steps_with_one_kept(base, monkeypatch):
    spoil(monkeypatch, (7, 8, 9))
    run = train(base, "one kept", "checkpoint.keep_last=1")
    assert rollbacks(run) == [(10, "step-00000004")]
    assert [record["step"] for record in metrics(run, "train")] == list(range(1, STEPS + 1))


def test_a_rollback_is_what_a_user_could_do_by_hand(base, monkeypatch):
    spoil(monkeypatch, (7, 8, 9))
    run, more = train(base, "itself", "max_rollbacks=1", "checkpoint.keep_last=20"), [f"samples={8 * STEPS}"]
    monkeypatch.undo()
    skipped = [event["sample_ids"] for event in metrics(run, "event") if "sample_ids" in event]
    assert [len(set(ids)) for ids in skipped] == [8, 8, 8]
    figures = {r["step"]: (r["rollbacks"], r["skipped_steps"]) for r in metrics(run, "train")}
    assert list(figures) == list(range(1, STEPS + 1))
    assert (figures[4], figures[5], figures[STEPS]) == ((0, 0), (1, 3), (1, 3))
    written = [record["message"].split()[1] for record in metrics(run, "event") if " written (" in record["message"]]
    assert (written.count("step-00000007"), written.count("step-00000008")) == (2, 1), "none between bad steps"

    checkpoint = run / "checkpoints" / "step-00000004"
    shutil.copytree(checkpoint, base / "hand" / "checkpoints" / checkpoint.name)

    def skip_bad_batches(trainer):
        assert trainer.state.step == 4
        for _ in range(4, 10):
            next(trainer.state.loader)

    with in_this_process():
        by_hand = load_recipe(None, [*SMALL, *settings_in(base, "hand", *more)])
        assert run_module.train(by_hand, resume="latest", on_trainer=skip_bad_batches) == 0
    assert equal(weights(run, STEPS), weights(base / "hand", STEPS))

    spoil(monkeypatch, range(1000))
    found = []
    settings = settings_in(base, run.name, "samples=200", "max_skipped_steps=2", "max_rollbacks=1")
    longer = load_recipe(None, [*SMALL, *settings])
    with in_this_process(), pytest.raises(UserError, match=r"3 steps in a row.*as often as max_rollbacks allows"):
        run_module.train(longer, resume="latest", on_trainer=lambda t: found.append(replace(t.state.skipped)))
    assert found == [SkippedSteps(skipped=3, rollbacks=1, in_a_row=0, rolled_back_to=4)]


def test_the_skipped_samples_of_all_ranks_are_reported():
    def reported(world):
        events = []
        telemetry = SimpleNamespace(event=lambda message, **facts: events.append(facts))
        trainer = SimpleNamespace(world=world, telemetry=telemetry, state=SimpleNamespace(step=3))
        batch = SimpleNamespace(sample_id=torch.tensor([world.rank, 7]))
        Trainer._report_skipped(trainer, batch, result=SimpleNamespace(finite=False))
        return events

    assert on_ranks(2, reported) == [[{"step": 3, "sample_ids": [0, 7, 1, 7]}]] * 2


def test_a_run_leaves_a_ruined_checkpoint_behind(base, monkeypatch):
    ruin(monkeypatch, 6)  # no checkpoint is written after it, at step 7
    run = train(base, "ruined", "checkpoint.keep_last=9")
    assert rollbacks(run) == [(10, "step-00000004")]
    assert all(math.isfinite(record["loss"]) for record in metrics(run, "train"))


def test_weights_that_are_not_finite_are_not_published(base, monkeypatch):
    ruin(monkeypatch, STEPS - 3)
    with pytest.raises(UserError, match=r"is not finite after step 14: the run has diverged.*smaller optimizer\.lr"):
        train(base, "at the end", "max_rollbacks=0", "checkpoint.keep_last=9")
    assert finished_checkpoints(base / "at the end")[-1].name == "step-00000011"
    warned = [r["message"] for r in metrics(base / "at the end", "event") if r.get("level") == "warning"]
    assert [message.partition(" is ")[2][:23] for message in warned] == ["not finite after step 1"]


def test_a_run_that_ends_with_skipped_steps_says_so(base, monkeypatch):
    spoil(monkeypatch, (STEPS - 2, STEPS - 1))
    run = train(base, "skipped", "max_rollbacks=0")
    (warned,) = (r["message"] for r in metrics(run, "event") if r.get("level") == "warning")
    assert warned.startswith("The last 2 steps were skipped: the weights are those of step 12, and the run may have")


def test_a_rollback_into_an_earlier_stage_trains_at_its_size(base, monkeypatch):
    spoil(monkeypatch, (6, 7, 8))
    run = train(base, "stages", "checkpoint.keep_last=20", STAGES)
    assert rollbacks(run) == [(9, "step-00000003")]
    shapes = [len(weights(run, step)["visual.positional_embedding"]) for step in range(1, STEPS + 1)]
    assert shapes == [5] * 5 + [17] * (STEPS - 5)
    messages = [record["message"] for record in metrics(run, "event")]
    stages = [message.partition(",")[0] for message in messages if message.startswith("Stage")]
    assert stages == ["Stage 1", "Stage 2"] * 2


@pytest.mark.parametrize(
    ("saved", "step", "in_a_row", "before", "expected"),
    [
        ((2, 4, 6, 8), 13, 3, None, 6),  # 3 steps were applied after step 6, and only 2 after step 8
        ((8, 9), 13, 3, None, 9),  # none is good: the newest
        ((2, 4, 6), 13, 3, 6, 4),  # the same as the last time: one further back
        ((6,), 13, 3, 6, 6),  # there is no other
        ((2, 4, 6, 9), 15, 3, 6, 9),  # good ones have been written since
        ((11, 12), 13, 3, None, None),
    ],
)
def test_the_chosen_checkpoint(saved, step, in_a_row, before, expected):
    skipped = SkippedSteps(in_a_row=in_a_row, rolled_back_to=before)

    def newest(not_after):
        fitting = [Checkpoint(Path(), {"step": s}) for s in saved if s <= not_after]
        return fitting[-1] if fitting else None

    found = skipped.choose(newest, step=step)
    assert (found and found.step) == expected
