"""Which processes a rank regards as its launcher, and when it regards them as gone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pipeline.distributed.launch import Process, find_launchers
from tests.launch import wait_for

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_a_process_without_a_launcher_may_outlive_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert find_launchers(os.getppid()) == []


def test_a_zombie_and_another_process_with_the_same_id_are_not_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    agent = subprocess.Popen(SLEEP)
    try:
        (found,) = find_launchers(agent.pid)
        assert (found.pid, found.runs()) == (agent.pid, True)
        assert not Process(agent.pid, found.started + "0").runs()
    finally:
        agent.kill()
    wait_for(lambda: not found.runs(), "the agent ends")  # it is a zombie until somebody waits for it
    agent.wait()
    assert not found.runs()
    assert find_launchers(agent.pid) == []
