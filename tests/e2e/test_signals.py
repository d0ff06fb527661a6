"""How a run ends when its launcher or a rank receives a signal, as docs/cluster.md says."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, command, environment, free_port, lives, wait_for
from tests.training import SMALL, prepare, settings_in


def settings(folder):
    """A run that would take hours and saves only when it is stopped."""
    given = ["telemetry.progress=auto", "samples=80000000", "checkpoint.every=1000000", "engine.lost_rank_seconds=20"]
    return settings_in(prepare(folder, [20, 30, 15]), "run", *SMALL, *given)


def launch(launcher, arguments):
    if launcher == "neuclip":
        return [str(Path(sys.executable).parent / "neuclip"), "train", "--ranks", "2", *arguments]
    if launcher == "torchrun":
        return command("jobs.train", *arguments, ranks=2)
    place = ["--num_gpus", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    return [str(Path(sys.executable).parent / "deepspeed"), *place, "--module", "jobs.train", *arguments]


def wait_until(moment, run, process, *, step=5):
    """Wait until a `step`, counted from the run's first start, was taken, or a `checkpoint` is being written after it.

    Returns the process ids of the ranks that have begun to train; `process` is their launcher.
    """
    metrics = run / "metrics.jsonl"

    def reached():
        steps = metrics.exists() and f'"step": {step},' in metrics.read_text()
        return steps and (moment == "step" or any((run / "checkpoints").glob(".step-*")))

    wait_for(reached, moment, process=process, seconds=300, pause=0.001 if moment == "checkpoint" else 0.05)
    return [json.loads(path.read_text())["pid"] for path in sorted((run / "heartbeats").glob("rank-*.json"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "whom", "numbers", "moment", "code"),
    [
        ("torchrun", "all", [signal.SIGINT], "step", 1),
        ("deepspeed", "rank", [signal.SIGUSR1], "checkpoint", 75),
        ("neuclip", "launcher", [signal.SIGTERM, signal.SIGTERM], "step", 75),
        # A launcher that cannot pass anything on: the ranks notice that it is gone.
        ("torchrun", "launcher", [signal.SIGKILL], "checkpoint", -signal.SIGKILL),
    ],
)
def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path, launcher, whom, numbers, moment, code):
    run, more = tmp_path / "run", ["checkpoint.every=2"] if moment == "checkpoint" else []
    process = subprocess.Popen(
        launch(launcher, [*settings(tmp_path), *more]),
        cwd=ROOT,
        env={**environment(), "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    ranks: list[int] = []
    try:
        ranks = wait_until(moment, run, process)
        assert len(ranks) == 2
        for number in numbers:
            if whom == "all":
                os.killpg(process.pid, number)  # as a terminal does
            else:
                os.kill(process.pid if whom == "launcher" else ranks[0], number)
        output = process.communicate(timeout=120)[0]
        assert process.returncode == code, output[-3000:]
        if launcher == "neuclip":
            assert "Traceback" not in output, output[-3000:]
        if numbers == [signal.SIGINT]:
            assert "Stopping after this step and a checkpoint; Ctrl-C again ends now and loses " in output
        wait_for(lambda: not any(lives(pid) for pid in ranks), "the ranks end with their launcher")
    finally:
        for pid in [*ranks, process.pid]:
            if lives(pid):
                os.kill(pid, signal.SIGKILL)
    assert not list((run / "checkpoints").glob(".step-*"))
    written = len(list((run / "checkpoints").glob("step-*")))
    codes = [json.loads(path.read_text())["code"] for path in (run / "heartbeats").glob("exit-*.json")]
    assert codes == [75, 75]
    assert written == 1 or moment == "checkpoint"
    assert "by a signal; continue with --resume latest" in (run / "metrics.jsonl").read_text()
