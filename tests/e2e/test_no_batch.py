"""A run that is to stop while its loading workers give no batch, or between two stages."""

import json
import os
import signal
import time

import psutil
import pytest

from tests.e2e.test_signals import wait_until
from tests.launch import Program, lives, run
from tests.metrics import equal, metrics, weights
from tests.training import SMALL, prepare, settings_in

BATCH, STEPS = 8, 150


def settings(folder, name, *more):
    given = ["data.workers=1", "objective.name=sogclr", "checkpoint.every=1000", f"samples={BATCH * STEPS}"]
    return settings_in(folder, name, *SMALL, "telemetry.progress=auto", *given, *more)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("no-batch"), [20, 30, 15], image_size=32)


def worker_of(rank):
    """The loading worker of a rank: the child of its fork server."""
    servers = psutil.Process(rank).children()
    (worker,) = (child.pid for server in servers for child in server.children())
    return worker


def saved_steps(folder):
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_a_run_without_batches_ends_with_a_checkpoint_and_loses_nothing(base):
    """Regression test: it waited for `data.timeout_minutes`, ended with 76, and lost the steps since the checkpoint.

    One run, continued each time: both ranks get signals, then one does, while the other one's loading worker does not
    answer; then a loading worker dies.
    """
    folder, arguments = base / "stopped", [*settings(base, "stopped"), "--resume", "latest"]
    for whom, code in (("ranks", 75), ("rank", 75), ("worker", 2)):
        with Program("jobs.train", *arguments, ranks=2) as program:
            wait_until("step", folder, program, step=max(saved_steps(folder), default=0) + 5)
            victim = worker_of(program.pids[whom == "worker"])
            os.kill(victim, signal.SIGKILL if whom == "worker" else signal.SIGSTOP)
            try:
                before = -1
                while whom != "worker" and before != (before := len(metrics(folder, "train"))):
                    time.sleep(3.0)  # a loaded machine may take a second for one of the steps that are left
                for pid in {"ranks": program.pids * 2, "rank": program.pids[1:], "worker": []}[whom]:
                    os.kill(pid, signal.SIGTERM)
                begin = time.monotonic()
                ended = program.wait()
            finally:
                if lives(victim):
                    os.kill(victim, signal.SIGKILL)
        output = ended.stdout + ended.stderr
        assert ended.returncode == code, output[-3000:]
        assert "Traceback" not in output, output[-3000:]
        last = len(metrics(folder, "train"))
        assert last < STEPS, "the run was faster than this test"
        assert saved_steps(folder)[-1] == last
        if whom == "worker":
            assert f"The run is saved up to step {last}: " in " ".join(output.split())
        else:
            assert time.monotonic() - begin < 30
            assert last == before
            assert "A rank had no batch when the signal came" in output
    run("jobs.train", *arguments, ranks=2)
    assert [record["step"] for record in metrics(folder, "train")] == list(range(1, STEPS + 1))
    run("jobs.train", *settings(base, "undisturbed"), ranks=2)
    assert equal(weights(folder, STEPS), weights(base / "undisturbed", STEPS))


@pytest.mark.slow
def test_a_signal_that_reaches_one_rank_between_two_stages_stops_all(base):
    """Regression test: that rank left at once with 75, and the other ended with 76."""
    stages = "schedule.stages=[{until: 0.5, image_size: 16}]"
    arguments = settings(base, "border", stages, "engine.probe=false", f"samples={12 * BATCH}")
    given = ("pipeline.training.run:check_stages", "2", "1:SIGTERM", *arguments, "data.workers=0")
    assert run("tests.e2e.doomed_run", *given, ranks=2, check=False).returncode == 75
    ends = [json.loads(path.read_text()) for path in (base / "border" / "heartbeats").glob("exit-*.json")]
    assert [end["code"] for end in ends] == [75, 75]
    assert max(record["step"] for record in metrics(base / "border", "train")) == 6
    run("jobs.train", *arguments, "--resume", "latest", ranks=2)
