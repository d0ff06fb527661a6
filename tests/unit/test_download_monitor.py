"""Reactions to trouble: a collapsing success rate, dead workers, hanging engines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from data_prep.dataset.dataset_folder import Folder, ShardRecord
from data_prep.fetching import monitor as monitor_module
from data_prep.fetching import supervisor
from data_prep.fetching.monitor import Counts, Monitor, SuccessWindow
from data_prep.fetching.supervisor import Paused
from data_prep.settings.download_config import DownloadConfig, MonitorConfig
from pipeline.config import parse


def counts(samples: int, **failures: int) -> Counts:
    return Counts(samples, Counter(failures))


def test_collapse_is_detected_within_one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "WINDOW", 100)
    window = SuccessWindow(MonitorConfig(min_success=0.2))
    for done in range(0, 1_000, 50):
        assert window.collapse(counts(done)) is None
    assert window.collapse(counts(950, dns=60)) is None, "too few to judge"
    reason = window.collapse(counts(950, dns=100))
    assert reason is not None
    assert "of the last 100 URLs only 0.0% gave a sample" in reason
    assert "dns 100%" in reason
    assert window.suspect_from <= 850, "one window before the bad one began"


def test_constant_low_success_and_a_disabled_limit_are_no_collapse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "WINDOW", 100)
    low = SuccessWindow(MonitorConfig(min_success=0.2))
    for done in range(100, 2_000, 100):
        assert low.collapse(counts(done // 4, **{"http 404": done - done // 4})) is None
    off = SuccessWindow(MonitorConfig(min_success=0))
    assert off.collapse(counts(0, dns=1_000)) is None


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path)
    folder.make()
    return folder


def write(folder: Folder, record: ShardRecord) -> None:
    folder.record(record.shard).write_text(record.text())


def live(folder: Folder, shard: int, pid: int, samples: int) -> None:
    state = {"pid": pid, "host": socket.gethostname(), "samples": samples, "failures": {"dns": 1}}
    (folder.staging / f"{shard:05d}.live").write_text(json.dumps(state))


def test_monitor_adds_finished_shards_and_shards_in_progress(folder: Folder) -> None:
    monitor = Monitor(folder, (0, 1, 2))
    write(folder, ShardRecord(0, "p", 10, 8, 1, "", {"http 404": 2}))
    live(folder, 1, os.getpid(), 3)
    monitor.poll()
    assert (monitor.now.samples, monitor.now.failures) == (11, {"http 404": 2, "dns": 1})
    assert (monitor.waiting, monitor.finished) == ({1, 2}, [(0, 14)])
    assert monitor.dead_workers() == []


def test_monitor_notices_a_dead_worker(folder: Folder) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    live(folder, 1, gone.pid, 3)
    monitor = Monitor(folder, (1,))
    monitor.poll()
    assert monitor.dead_workers() == [gone.pid]


def test_retry_counts_only_the_changes(folder: Folder) -> None:
    write(folder, ShardRecord(0, "p", 10, 6, 1, "", {"http 404": 2, "timeout": 2}))
    monitor = Monitor(folder, (0,))
    monitor.poll()
    assert monitor.waiting == {0}
    write(folder, ShardRecord(0, "p", 10, 7, 1, "", {"http 404": 2, "timeout": 1}))
    monitor.poll()
    assert monitor.waiting == set()
    assert (monitor.now.samples, monitor.now.failures) == (1, {"timeout": 1})


def test_record_that_is_being_replaced_does_not_count_yet(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry's worker deletes the older record before its date is checked, or between that check and the read."""
    write(folder, ShardRecord(0, "p", 10, 6, 1, "", {"timeout": 4}))
    monitor = Monitor(folder, (0,))
    with monkeypatch.context() as taken:
        taken.setattr(Folder, "finished", lambda self: [0])
        folder.record(0).unlink()
        monitor.poll()
        assert monitor.waiting == {0}
    write(folder, ShardRecord(0, "p", 10, 7, 1, "", {"timeout": 3}))
    with monkeypatch.context() as taken:
        taken.setattr(Folder, "read_record", lambda self, shard: (_ for _ in ()).throw(FileNotFoundError()))
        monitor.poll()
        assert monitor.waiting == {0}
    monitor.poll()
    assert monitor.waiting == set()
    assert (monitor.now.samples, monitor.now.failures) == (1, {"timeout": 3})


def test_a_shard_counts_once_while_its_live_file_is_still_there(folder: Folder) -> None:
    monitor = Monitor(folder, (0, 1))
    live(folder, 0, os.getpid(), 7)
    write(folder, ShardRecord(0, "p", 8, 7, 1, "", {"dns": 1}))
    monitor.poll()
    assert (monitor.now.samples, monitor.now.failures) == (7, {"dns": 1})
    assert monitor.finished == [(0, 8)]


def test_a_shard_that_finishes_during_the_poll_is_not_missed(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Monitor(folder, (0,))
    live(folder, 0, os.getpid(), 7)
    glob = Path.glob

    def finishing(self: Path, pattern: str) -> object:
        found = list(glob(self, pattern))
        if not folder.record(0).exists():
            write(folder, ShardRecord(0, "p", 8, 7, 1, "", {"dns": 1}))
            (folder.staging / "00000.live").unlink()
        return found

    monkeypatch.setattr(Path, "glob", finishing)
    monitor.poll()
    assert (monitor.now.attempted, monitor.finished) == (8, [(0, 8)])


@pytest.mark.parametrize("begins", [False, True])
def test_a_cluster_may_take_longer_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: bool) -> None:
    """Regression test: Spark on a busy machine, or waiting in a queue, was restarted until the download gave up."""
    tree = {"output": str(tmp_path), "fetch": {"distributor": "ray"}}
    folder = Folder(tmp_path)
    folder.make()
    state = json.dumps({"pid": os.getpid(), "host": "elsewhere", "samples": 0, "failures": {}})
    first = f"open({str(folder.staging / '00000.live')!r}, 'w').write({state!r}); " if begins else ""
    body, popen = f"import time; {first}time.sleep(60)", subprocess.Popen
    monkeypatch.setattr(
        supervisor.subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", body], **options)
    )
    monkeypatch.setattr(supervisor, "STALL", 0.3)
    monkeypatch.setattr(supervisor, "_CLUSTER_SECONDS", 8.0)
    monkeypatch.setattr(supervisor, "RESTARTS", 0)
    began = time.monotonic()
    with pytest.raises(Paused, match=r"no progress for 0\.3 s" if begins else "no progress for 8 s"):
        supervisor.fetch(parse(DownloadConfig, tree), (0, 1), total=10)
    assert begins or time.monotonic() - began > 8


@pytest.mark.parametrize(
    ("body", "stall", "problem"),
    [
        ("echo waiting; exec sleep 60", 0.3, "no progress for 0.3 s"),
        ("echo boom; exit 3", 60, "ended with exit status 3"),
    ],
)
def test_hanging_or_dying_engine_is_restarted_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, stall: float, problem: str
) -> None:
    config = parse(DownloadConfig, {"output": str(tmp_path)})
    Folder(tmp_path).make()
    started = []
    popen = subprocess.Popen

    def stand_in(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        started.append(command)
        return popen(["sh", "-c", body], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(supervisor.subprocess, "Popen", stand_in)
    monkeypatch.setattr(supervisor, "STALL", stall)
    monkeypatch.setattr(supervisor, "RESTARTS", 1)
    with pytest.raises(Paused) as caught:
        supervisor.fetch(config, (0, 1), total=10)
    assert len(started) == 2
    assert problem in str(caught.value)
    assert ("waiting" if "waiting" in body else "boom") in str(caught.value)
