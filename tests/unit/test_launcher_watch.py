"""Which processes a rank regards as its launcher, and when it regards them as gone."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from pipeline.distributed.launch import DEEPSPEED_NODE, find_launchers, runs
from tests.launch import wait_for

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_a_process_without_a_launcher_may_outlive_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert find_launchers(os.getppid()) == []


def test_deepspeed_has_a_process_on_each_node_below_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    code = f"import subprocess; subprocess.run({[*SLEEP, DEEPSPEED_NODE]})"
    for name, count in (("/usr/bin/deepspeed", 2), ("/usr/bin/sshd", 1)):
        with subprocess.Popen([sys.executable, "-c", code, name]) as above:
            tree = psutil.Process(above.pid)
            wait_for(lambda tree=tree: DEEPSPEED_NODE in [x for p in tree.children() for x in p.cmdline()], "the node")
            (node,) = tree.children()
            assert find_launchers(node.pid) == [node, tree][:count]
            node.kill()  # and the one above ends


def test_a_zombie_is_not_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    agent = subprocess.Popen(SLEEP)
    try:
        (found,) = find_launchers(agent.pid)
        assert (found.pid, runs(found)) == (agent.pid, True)
    finally:
        agent.kill()
    wait_for(lambda: not runs(found), "the agent ends")  # it is a zombie until somebody waits for it
    agent.wait()
    assert not runs(found)
    assert find_launchers(agent.pid) == []
