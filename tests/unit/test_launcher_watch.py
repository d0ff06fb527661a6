"""Which processes a rank regards as its launcher, and when it regards them as gone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pipeline.distributed.launch import find_launchers, runs
from tests.launch import wait_for

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_a_process_without_a_launcher_may_outlive_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert find_launchers(os.getppid()) == []


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
