"""Rank heartbeats, and the diagnosis that is reported when a rank hangs."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError

from pipeline.distributed import heartbeat as heartbeat_module
from pipeline.distributed.exit_record import read_ends
from pipeline.distributed.heartbeat import Beat, Heartbeat, behind, diagnosis, read_beat, stderr_copied
from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World, lost_contact
from tests.launch import python, wait_for

BEAT = Beat(rank=0, host="a", pid=1, step=7, phase="objective", marks=40, seconds=61.0, beat=9)


def test_the_rank_with_the_fewest_marks_is_behind() -> None:
    late = replace(BEAT, rank=1, phase="data", marks=38, seconds=90.0)
    assert behind([BEAT, late, BEAT]) == [1]
    text = diagnosis([BEAT, late, BEAT], alive=[True] * 3)
    assert "The others wait for rank 1." in text
    assert "rank 1 (a, process 1): step 7, data, for 90 s; BEHIND" in text
    assert text.count("BEHIND") == 1
    assert text.endswith("start again with --resume latest (checkpoints that were written are intact).")


def test_no_rank_is_blamed_when_all_wait_at_the_same_place_and_one_without_a_heartbeat_is() -> None:
    assert behind([BEAT, BEAT]) == []
    assert "All ranks wait at the same place" in diagnosis([BEAT, BEAT], alive=[True, True])
    for last in (None, BEAT):
        text = diagnosis([BEAT, last], alive=[True, False])
        assert "rank 1 without a heartbeat" in text
        assert text.count("; no heartbeat") == 1


def test_heartbeats_are_written_and_removed_after_a_clean_exit(tmp_path: Path) -> None:
    path = tmp_path / "heartbeats" / "rank-00001.json"
    phases = Phases(torch.device("cpu"))
    world = World(rank=1, size=2)
    with Heartbeat(tmp_path, world=world, phases=phases, timeout_seconds=100.0) as heartbeat:
        phases.mark("data", step=3)
        with phases("forward"):
            pass
        heartbeat._write()
        beat = read_beat(path)
        assert beat is not None
        assert (beat.rank, beat.step, beat.phase, beat.marks, beat.beat) == (1, 3, "forward", 2, 2)
    assert not path.exists()
    path.write_text("{")
    assert read_beat(path) is None
    with Heartbeat(tmp_path, world=World(), phases=phases, timeout_seconds=0.01):  # a single rank waits for nobody
        time.sleep(0.1)  # beyond the limit
        assert read_beat(path.with_name("rank-00000.json")) is not None


def test_standard_error_is_copied_and_survives_the_copying_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, started = tmp_path / "stderr.txt", []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            started.append(self)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(heartbeat_module, "COPIED_BYTES", 10)

    with stderr_copied(path, seconds=0.05):
        os.write(2, b"one\n")
        wait_for(lambda: path.read_text() == "one\n", "the line is copied", path, seconds=20)
        os.write(2, b"much more than ten\n")
        wait_for(lambda: path.read_text() == "", "the copy is emptied", path, seconds=20)
        started[0].kill()
        started[0].wait()
        time.sleep(0.2)
        os.write(2, b"goes on\n")
    assert not path.exists()
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "one\nmuch more than ten\ngoes on\nafter\n"
    monkeypatch.setenv("PATH", "")
    with stderr_copied(path):
        os.write(2, b"without tee\n")
    assert capfd.readouterr().err == "without tee\n"


def test_which_errors_mean_lost_contact() -> None:
    assert lost_contact(RuntimeError("[gloo/transport/tcp/pair.cc:533] Connection closed by peer [127.0.0.1]:29"))
    assert not lost_contact(RuntimeError("CUDA out of memory"))
    assert not lost_contact(DistBackendError("NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'"))
    assert lost_contact(DistBackendError("NCCL error: remote process exited"))
    assert not lost_contact(ValueError("NCCL"))


def test_a_rank_that_waits_for_one_that_works_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's heartbeat shows progress within the limit; when it stops to, the waiting rank reports it."""
    ended: list[int] = []
    monkeypatch.setattr("pipeline.distributed.heartbeat.os._exit", ended.append)
    monkeypatch.setattr("pipeline.distributed.heartbeat.faulthandler.dump_traceback_later", lambda *_, **__: None)
    phases = Phases(torch.device("cpu"))
    phases.latest = replace(phases.latest, since=phases.latest.since - 60)
    waiting = Heartbeat(tmp_path, world=World(rank=0, size=2), phases=phases, timeout_seconds=0.1)
    (tmp_path / "heartbeats").mkdir()
    other, number = tmp_path / "heartbeats/rank-00001.json", 0

    def beats(seconds: float) -> None:
        """Stop the waiting rank, while the other one's heart beats and its progress was `seconds` ago."""

        def wait(_: float) -> None:
            nonlocal number
            number += 1
            other.write_text(json.dumps(asdict(replace(BEAT, rank=1, seconds=seconds, beat=number))))

        monkeypatch.setattr(waiting._end, "wait", wait)
        waiting._stop_the_run("no progress", stalled=True)

    beats(0.05)
    assert not ended
    beats(0.2)
    assert ended == [76]


def test_a_driver_that_hangs_does_not_keep_a_rank_from_ending(tmp_path: Path) -> None:
    """Regression test: NCCL's trace was read before the end was recorded, with the interpreter's lock held."""
    program = (
        "import ctypes, sys\n"
        "from pathlib import Path\n"
        "from pipeline.distributed import heartbeat\n"
        "from pipeline.distributed.exit_record import start_recording\n"
        "from pipeline.distributed.timing import Phases\n"
        "from pipeline.distributed.world import World\n"
        "heartbeat.LEAVE_SECONDS = 0.5\n"
        "heartbeat.collectives_trace = lambda: ctypes.PyDLL(None).sleep(600)\n"  # does not release the lock
        "world, run = World(size=2), Path(sys.argv[1])\n"
        "start_recording(run, rank=0)\n"
        "phases = Phases(world.device)\n"
        "beats = heartbeat.Heartbeat(run, world=world, phases=phases, timeout_seconds=60)\n"
        "beats._leave('rank 1 is gone.')\n"
    )
    (tmp_path / "heartbeats").mkdir()
    done = python("-c", program, str(tmp_path), timeout=300)
    assert done.returncode == 1, done.stderr
    assert "Rank 0 on " in done.stderr
    assert [(end.code, end.reason) for end in read_ends(tmp_path / "heartbeats")] == [(76, "rank 1 is gone.")]


def test_work_inside_a_phase_is_progress() -> None:
    phases = Phases(torch.device("cpu"))
    phases.mark("evaluation", step=3)
    before = phases.latest
    World(phases=phases).progress()
    assert phases.latest.since > before.since
    assert replace(phases.latest, since=before.since) == before
