"""Two nodes under `torchrun --nnodes 1:2`: one is lost, the other continues alone, and a new one is taken up."""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.test_train import base, records, settings  # noqa: F401 (fixtures)
from tests.launch import ROOT, environment, free_port, run, wait_for

STEPS = 100
"""A second or more each until the new node has been taken up; the rest is as fast as it can be."""
LIMIT = 240.0
"""Seconds to wait for anything."""


@contextmanager
def node(port, log, arguments, *, host=False):
    """A node with one rank: torchrun's agent, and the rank in a session of its own; `host` keeps the rendezvous."""
    call = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9"]
    call += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    call += [f"--rdzv-conf=is_host={host},last_call_timeout=5,keep_alive_interval=2"]
    call += ["-m", "tests.e2e.slow_run", f"until={log.parent / 'taken-up'}", *arguments]
    variables = {**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("wb") as file:
        agent = subprocess.Popen(call, cwd=ROOT, env=variables, stdout=file, stderr=file)
        try:
            yield agent
        finally:
            lose(agent)


def lose(agent):
    """Kill an agent and its rank, as if the machine were gone."""
    if agent.poll() is None:
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for process in (agent.pid, *map(int, children)):
            os.kill(process, signal.SIGKILL)
    agent.wait()


def orders(text):
    """The hash of the sample order of every finished epoch."""
    return dict(re.findall(r"Epoch (\d+) done: .* order ([0-9a-f]{16})", text))


@pytest.mark.slow
def test_a_lost_node_is_survived_and_a_new_one_taken_up(base, tmp_path):  # noqa: F811
    more = (f"samples={8 * STEPS}", "checkpoint.every=10", "engine.probe=false", "engine.timeout_minutes=1")
    arguments = [*settings(base, "elastic", *more), "--resume", "latest"]
    output, port = base / "elastic", free_port()
    first, second, third = (tmp_path / name for name in ("first.log", "second.log", "third.log"))

    def resumed():
        """Rank 0 says it, and torchrun makes that of the agent with the lowest process id."""
        return sum(log.read_text().count("Resumed from step-") for log in (first, third) if log.exists())

    def steps():
        return max(records(output), default=0) if (output / "metrics.jsonl").is_file() else 0

    with ExitStack() as nodes:
        stays = nodes.enter_context(node(port, first, arguments, host=True))
        lost = nodes.enter_context(node(port, second, arguments))
        wait_for(lambda: steps() >= 12, "12 steps", first, second, seconds=LIMIT)
        lose(lost)
        wait_for(lambda: resumed() == 1, "resumed", first, seconds=LIMIT)
        alone = steps()
        wait_for(lambda: steps() > alone, "steps of one node", first, seconds=LIMIT)
        nodes.enter_context(node(port, third, arguments))
        wait_for(lambda: resumed() == 2 or stays.poll() is not None, "resumed again", first, third, seconds=LIMIT)
        (tmp_path / "taken-up").touch()
        wait_for(lambda: stays.poll() is not None, "the end", first, third, seconds=LIMIT)
    printed = first.read_text()
    assert stays.returncode == 0, printed[-3000:]
    assert "lost contact with another rank" in printed
    assert resumed() == 2, "once alone, once with the new node"
    assert list(records(output)) == list(range(1, STEPS + 1))
    run("jobs.train", *settings(base, "undisturbed", *more))
    expected = orders((base / "undisturbed" / "metrics.jsonl").read_text())
    assert len(expected) == STEPS // (65 // 8)
    assert orders((output / "metrics.jsonl").read_text()) == expected
