"""Reactions to trouble: a collapsing success rate, dead workers, hanging engines."""

import json
import os
import socket
import subprocess
import sys
from unittest import mock

import pytest

from data_prep.dataset.dataset_folder import Folder, ShardRecord
from data_prep.download_config import DownloadConfig
from data_prep.fetching import supervisor
from data_prep.fetching.shard_writer import SUCCESS, Outcomes
from data_prep.fetching.supervisor import Monitor, SuccessWindow
from pipeline.config import parse
from pipeline.errors import UserError


def outcomes(samples, **failures):
    return Outcomes({SUCCESS: samples, **failures})


def test_collapse_is_detected_when_a_window_is_full(monkeypatch):
    """Constant low success and a disabled limit are none."""
    monkeypatch.setattr(supervisor, "WINDOW", 100)
    window, low = SuccessWindow(0.2), SuccessWindow(0.2)
    for done in range(0, 1_000, 50):
        assert not window.has_collapsed(outcomes(done))
    assert not window.has_collapsed(outcomes(950, dns=40)), "too few to judge"
    assert window.has_collapsed(outcomes(905, dns=110))
    assert "of the last 115 URLs only 4.3% gave a sample" in window.collapse
    assert "reasons: dns 96%" in window.collapse
    assert window.suspect_from == 800, "one window before the bad one began"
    for done in range(100, 2_000, 100):
        assert not low.has_collapsed(outcomes(done // 4, **{"http 404": done - done // 4}))
    assert not SuccessWindow(0).has_collapsed(outcomes(0, dns=1_000))
    assert low.has_collapsed(outcomes(475, **{"http 404": 1_425, "hash mismatch": 100}))
    assert "hash mismatch 100% (source.hash must name" in low.collapse


@pytest.fixture
def folder(tmp_path):
    folder = Folder(tmp_path)
    folder.make()
    return folder


def live(folder, shard, *, pid=None, published=False, **done):
    state = {
        "pid": pid or os.getpid(),
        "host": socket.gethostname(),
        "outcomes": done,
        "stored": 3,
        "is_published": published,
    }
    path = folder.staging / f"{shard:05d}.live"
    path.write_text(json.dumps(state))
    return path


def test_monitor_counts_each_shard_once(folder):
    """In progress, published, published by a worker that died before it said so, and reported again."""
    live(folder, 3, success=5)
    monitor = Monitor(folder, (0, 1, 2))
    live(folder, 0, published=True, success=8, timeout=2)
    live(folder, 1, success=3, dns=1)
    monitor.poll()
    assert monitor.now == {"success": 11, "timeout": 2, "dns": 1}
    assert (monitor.waiting, monitor.finished, bool(monitor.live)) == ({1, 2}, [(0, 14)], True)
    assert (monitor.activity, monitor.dead_workers()) == ((14, 3), [])
    live(folder, 0, published=True, success=8, timeout=2)
    folder.record(1).write_text(ShardRecord(1, "p", 10, 6, 1, "", {"dns": 4}).text())
    left = live(folder, 2, success=2)
    monitor.end()
    assert (monitor.waiting, monitor.finished) == ({2}, [(0, 14), (1, 20)])
    assert monitor.now == {"success": 14, "timeout": 2, "dns": 4}
    assert (left.exists(), bool(monitor.live)) == (False, False)


def test_a_record_from_before_a_retry_does_not_end_it(folder):
    folder.record(0).write_text(ShardRecord(0, "p", 10, 6, 1, "", {"timeout": 4}).text())
    monitor = Monitor(folder, (0,))
    monitor.end()
    assert monitor.waiting == {0}
    live(folder, 0, published=True, success=1, timeout=3)
    monitor.poll()
    assert (monitor.waiting, monitor.now) == (set(), {"success": 1, "timeout": 3})


def test_monitor_notices_a_dead_worker(folder):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monitor = Monitor(folder, (0, 1))
    live(folder, 0, pid=gone.pid, published=True)
    live(folder, 1, pid=gone.pid, success=3)
    monitor.poll()
    assert (monitor.waiting, monitor.dead_workers()) == ({1}, [gone.pid])


HANGS = "import time; time.sleep(60)"
ENGINES = {
    "hangs": ("multiprocessing", f"print('waiting', flush=True); {HANGS}", "no progress for 1.5 s.*waiting"),
    "dies": ("multiprocessing", "import sys; print('boom'); sys.exit(3)", "ended with exit status 3.*boom"),
    "full disk": ("multiprocessing", "", r"Cannot write to .*: No space left on device\. Free some space"),
    # Spark on a busy machine, or waiting in a queue, was restarted until the download gave up.
    "cluster that does not begin": ("ray", HANGS, "no progress for 6 s"),
    "cluster that hangs": ("ray", f"import sys; open(LIVE, 'w').write(STATE); {HANGS}", "no progress for 1.5 s"),
}


@pytest.mark.parametrize(("distributor", "body", "problem"), ENGINES.values(), ids=ENGINES)
def test_hanging_or_dying_engine_is_restarted_and_then_given_up(folder, monkeypatch, distributor, body, problem):
    path = live(folder, 0)
    program = f"LIVE = {str(path)!r}; STATE = {path.read_text()!r}; {body}"
    started, popen = [], subprocess.Popen

    def stand_in(command, **options):
        started.append(command)
        return popen([sys.executable, "-c", program], **options)

    monkeypatch.setattr(supervisor.subprocess, "Popen", stand_in)
    monkeypatch.setattr(supervisor, "STALL", 1.5 if "sleep" in body else 60.0)
    monkeypatch.setattr(supervisor, "_CLUSTER_SECONDS", 6.0)
    monkeypatch.setattr(supervisor, "RESTARTS", 1)
    if not body:
        monkeypatch.setattr(supervisor, "write_text", mock.Mock(side_effect=OSError(28, "No space left on device")))
    config = parse(DownloadConfig, {"output": str(folder.root), "fetch": {"distributor": distributor}})
    with pytest.raises(UserError, match=problem):
        supervisor.fetch(config, (0, 1), total=10)
    assert len(started) == (2 if body else 1)
