"""How a run ends when its launcher or a rank receives a signal: the table of docs/cluster.md."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launch import ROOT, command, environment, free_port
from tests.shards import write_shards
from tests.towers import write_tiny


def settings(folder: Path) -> list[str]:
    """A run that would take hours and saves only when it is stopped."""
    write_shards(folder / "shards", [20, 30, 15])
    return [
        f"output={folder / 'run'}",
        f"model.arch={write_tiny(folder)}",
        f"data.sources={folder / 'shards'}",
        *("data.streams=4", "data.shuffle_buffer=10", "data.workers=0", "batch_size=8", "samples=80000000"),
        *("objective.name=openclip", "engine.deepspeed=zero1_fp32", "engine.device=cpu"),
        *("checkpoint.every=1000000", "telemetry.every=1", "telemetry.tensorboard=false"),
    ]


def launch(launcher: str, arguments: list[str]) -> list[str]:
    if launcher == "neuclip":
        return [str(Path(sys.executable).parent / "neuclip"), "train", "--ranks", "2", *arguments, "data.workers=1"]
    if launcher == "torchrun":
        return command("jobs.train", *arguments, ranks=2)
    place = ["--num_gpus", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    return [str(Path(sys.executable).parent / "deepspeed"), *place, "--module", "jobs.train", *arguments]


def wait_for_step(run: Path, process: subprocess.Popen[str]) -> list[int]:
    """Wait until the run has taken five steps, and return the process ids of the ranks."""
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 300
    while not metrics.exists() or '"step": 5,' not in metrics.read_text():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline, "the run took no steps"
        time.sleep(0.1)
    return [json.loads(path.read_text())["pid"] for path in sorted((run / "heartbeats").glob("rank-*.json"))]


def lives(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "whom", "number", "code"),
    [
        ("torchrun", "all", signal.SIGINT, 1),
        ("torchrun", "launcher", signal.SIGTERM, 1),
        ("deepspeed", "all", signal.SIGINT, None),
        ("deepspeed", "rank", signal.SIGUSR1, 75),
        ("neuclip", "all", signal.SIGUSR1, 75),
        ("neuclip", "launcher", signal.SIGTERM, 75),
        # A launcher that cannot pass anything on: the ranks notice that it is gone.
        ("torchrun", "launcher", signal.SIGKILL, -signal.SIGKILL),
        ("deepspeed", "launcher", signal.SIGKILL, -signal.SIGKILL),
        ("deepspeed", "launcher", signal.SIGTERM, -signal.SIGTERM),
        ("deepspeed", "parent", signal.SIGKILL, None),
        ("neuclip", "launcher", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_signal_ends_a_run_with_a_checkpoint(
    tmp_path: Path, launcher: str, whom: str, number: signal.Signals, code: int | None
) -> None:
    process = subprocess.Popen(
        launch(launcher, settings(tmp_path)),
        cwd=ROOT,
        env={**environment(), "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    ranks: list[int] = []
    try:
        ranks = wait_for_step(tmp_path / "run", process)
        assert len(ranks) == 2
        if whom == "all":
            os.killpg(process.pid, number)  # as a terminal does
        else:
            victims = {"launcher": process.pid, "rank": ranks[0], "parent": psutil.Process(ranks[0]).ppid()}
            os.kill(victims[whom], number)
        output = process.communicate(timeout=120)[0]
        if code is not None:
            assert process.returncode == code, output[-3000:]
        if launcher == "neuclip":
            assert "Traceback" not in output, output[-3000:]
        deadline = time.monotonic() + 60
        while any(lives(pid) for pid in ranks):
            assert time.monotonic() < deadline, "a rank outlived its launcher"
            time.sleep(0.1)
    finally:
        for pid in [*ranks, process.pid]:
            if lives(pid):
                os.kill(pid, signal.SIGKILL)
    written = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert len(written) == 1
    assert "by a signal; continue with --resume latest" in (tmp_path / "run" / "metrics.jsonl").read_text()
    records = (tmp_path / "run" / "heartbeats").glob("exit-*.json")
    assert [json.loads(path.read_text())["code"] for path in records] == [75, 75]
