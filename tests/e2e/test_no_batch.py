"""A run that is to stop while its loading workers give no batch, or between two stages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_signals import launch, wait_until
from tests.launch import ROOT, environment, lives, run
from tests.metrics import equal, metrics, weights
from tests.training import prepare, settings_in

BATCH, STEPS = 8, 150


def settings(folder: Path, name: str, *more: str) -> list[str]:
    given = ["data.streams=4", "data.shuffle_buffer=10", "data.workers=1", f"batch_size={BATCH}"]
    given += ["objective.name=sogclr", "engine.deepspeed=zero1_fp32", "engine.device=cpu", "schedule.warmup_steps=1"]
    given += ["checkpoint.every=1000", "telemetry.every=1", "telemetry.tensorboard=false", f"samples={BATCH * STEPS}"]
    return settings_in(folder, name, *given, *more)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("no-batch"), [20, 30, 15], image_size=32)


@pytest.fixture(scope="module")
def undisturbed(base: Path) -> Path:
    run("jobs.train", *settings(base, "undisturbed"), ranks=2)
    return base / "undisturbed"


def worker_of(rank: int) -> int:
    """The loading worker of a rank: the child of its fork server."""
    servers = psutil.Process(rank).children()
    (worker,) = (child.pid for server in servers for child in server.children())
    return worker


def same_end(run: Path, other: Path) -> bool:
    return equal(weights(run, STEPS), weights(other, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "the other rank"])
def test_a_signal_while_no_batch_comes_stops_the_run_with_a_checkpoint(
    base: Path, undisturbed: Path, whom: str
) -> None:
    """Regression test: the run waited for `data.timeout_minutes`, ended with 76, and lost its last steps."""
    name = whom.replace(" ", "-")
    arguments = settings(base, name)
    process = subprocess.Popen(
        launch("neuclip", arguments),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ranks = wait_until("step", base / name, process)
    stopped = worker_of(ranks[0])
    os.kill(stopped, signal.SIGSTOP)
    try:
        before = -1
        while before != (before := len(metrics(base / name, "train"))):
            time.sleep(3.0)  # a loaded machine may take a second for one of the steps that are left
        assert before < STEPS, "the run was faster than this test"
        begin = time.monotonic()
        os.kill(process.pid if whom == "launcher" else ranks[1], signal.SIGTERM)
        output = process.communicate(timeout=120)[0]
    finally:
        for pid in (stopped, *ranks, process.pid):
            if lives(pid):
                os.kill(pid, signal.SIGKILL)
    assert process.returncode == 75, output[-3000:]
    assert "Traceback" not in output, output[-3000:]
    assert time.monotonic() - begin < 30
    assert "A rank had no batch when the signal came" in output
    assert [path.name for path in (base / name / "checkpoints").glob("step-*")] == [f"step-{before:08d}"]
    run("jobs.train", *arguments, "--resume", "latest", ranks=2)
    assert [record["step"] for record in metrics(base / name, "train")] == list(range(1, STEPS + 1))
    assert same_end(base / name, undisturbed)


@pytest.mark.slow
def test_a_loading_worker_that_dies_ends_the_run_with_a_checkpoint(base: Path, undisturbed: Path) -> None:
    """Regression test: the steps since the last checkpoint were lost."""
    arguments = settings(base, "dead-worker")
    process = subprocess.Popen(
        launch("neuclip", arguments),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ranks = wait_until("step", base / "dead-worker", process)
    os.kill(worker_of(ranks[1]), signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 2, output[-3000:]
    (saved,) = (int(path.name[5:]) for path in (base / "dead-worker" / "checkpoints").glob("step-*"))
    assert 0 < saved < STEPS, "the run was faster than this test"
    assert saved == max(record["step"] for record in metrics(base / "dead-worker", "train"))
    assert f"The run is saved up to step {saved}: " in " ".join(output.split())
    assert "Traceback" not in output, output[-3000:]
    run("jobs.train", *arguments, "--resume", "latest", ranks=2)
    assert same_end(base / "dead-worker", undisturbed)


@pytest.mark.slow
def test_a_signal_that_reaches_one_rank_between_two_stages_stops_all(base: Path) -> None:
    """Regression test: that rank left at once with 75, and the other ended with 76."""
    arguments = settings(base, "border", "schedule.stages=[{until: 0.5, image_size: 16}]", "engine.probe=false")
    given = ("pipeline.training.run:check_stages", "2", "1:SIGTERM", *arguments, "data.workers=0")
    assert run("tests.e2e.doomed_run", *given, ranks=2, check=False).returncode == 75
    ends = [json.loads(path.read_text()) for path in (base / "border" / "heartbeats").glob("exit-*.json")]
    assert [end["code"] for end in ends] == [75, 75]
    assert max(record["step"] for record in metrics(base / "border", "train")) == STEPS // 2
    run("jobs.train", *arguments, "--resume", "latest", ranks=2)
