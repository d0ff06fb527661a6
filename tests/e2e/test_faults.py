"""A two-rank run that crashes ten times, at random points of a step and during checkpoint writes, loses nothing."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.e2e.test_train import STEPS, base, equal, settings, two_ranks, weights  # noqa: F401 (fixtures)
from tests.launch import run

# Where a rank may crash, and the maximum number of calls of that function per step.
PLACES = {
    "pipeline.data.loading.loader:Loader.__next__": 1,
    "pipeline.engine.deepspeed_engine:DeepSpeedEngine.forward": 1,
    "pipeline.engine.deepspeed_engine:DeepSpeedEngine.backward": 1,
    "pipeline.engine.deepspeed_engine:DeepSpeedEngine.step": 1,
    "pipeline.objectives.base:Objective.commit": 1,
    "pipeline.engine.state:DeepSpeedState.moments": 1,
    "pipeline.checkpoint.writer:CheckpointWriter._write_part": 1,
    "pipeline.checkpoint.writer:save_open_clip": 1,
    "pipeline.checkpoint.writer:sha256_of": 4,
    "pipeline.checkpoint.writer:flush": 6,
    "pipeline.checkpoint.writer:CheckpointWriter._prune": 1,
}


@pytest.mark.slow
def test_a_run_with_ten_crashes_is_bit_identical(base: Path, two_ranks: Path) -> None:  # noqa: F811
    arguments = settings(base, "mortal", "checkpoint.every=1", "checkpoint.keep_last=2", "engine.probe=false")
    moments = random.Random(0)
    deaths = []
    for _ in range(10):
        place = moments.choice(list(PLACES))
        count = moments.randint(1, 2 * PLACES[place])
        rank = "0" if "checkpoint" in place else str(moments.randint(0, 1))
        done = run(
            "tests.e2e.doomed_run", place, str(count), rank, *arguments, "--resume", "latest", ranks=2, check=False
        )
        deaths.append((place, count, rank, done.returncode))
    assert sum(code != 0 for *_, code in deaths) >= 8, deaths
    run("jobs.train", *arguments, "--resume", "latest", ranks=2)
    assert equal(weights(base / "mortal"), weights(two_ranks)), deaths
    assert not list((base / "mortal" / "checkpoints").glob(".*")), f"leftovers of {STEPS} steps"


@pytest.mark.slow
def test_a_sleeping_rank_is_reported_with_its_step_and_phase(base: Path) -> None:  # noqa: F811
    arguments = settings(base, "asleep", "engine.probe=false", "engine.timeout_minutes=0.1")
    done = run(
        "tests.e2e.sleeping_run",
        "pipeline.engine.deepspeed_engine:DeepSpeedEngine.forward",
        "3",
        "1",
        "25",
        *arguments,
        ranks=2,
        check=False,
    )
    assert done.returncode != 0
    printed = done.stderr
    assert "The others wait for rank 1." in printed, printed[-3000:]
    assert re.search(r"rank 0 \(.*\): step 2, communication, for \d+ s$", printed, re.MULTILINE), printed[-3000:]
    assert re.search(r"rank 1 \(.*\): step 2, forward, for \d+ s; BEHIND$", printed, re.MULTILINE), printed[-3000:]
    assert "sleeping_run.py" in printed  # the stack of the sleeping rank
    assert done.returncode == 76, printed[-3000:]


@pytest.mark.slow
def test_a_lost_rank_is_reported(base: Path) -> None:  # noqa: F811
    arguments = settings(base, "gone", "engine.probe=false", "engine.timeout_minutes=0.1")
    done = run(
        "tests.e2e.doomed_run",
        "pipeline.engine.deepspeed_engine:DeepSpeedEngine.forward",
        "3",
        "1",
        *arguments,
        ranks=2,
        check=False,
    )
    assert done.returncode != 0
    assert "Rank 0: lost contact with another rank" in done.stderr
    assert "rank 1 without a heartbeat" in done.stderr
