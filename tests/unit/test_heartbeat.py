"""Rank heartbeats, and the diagnosis that is reported when a rank hangs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.distributed.heartbeat import Beat, Heartbeat, behind, diagnosis, read_beat
from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World, lost_contact

BEAT = Beat(rank=0, host="a", pid=1, step=7, phase="objective", marks=40, seconds=61.0, beat=9)


def test_the_rank_with_the_fewest_marks_is_behind() -> None:
    late = replace(BEAT, rank=1, phase="data", marks=38, seconds=90.0)
    assert behind([BEAT, late, BEAT]) == [1]
    text = diagnosis([BEAT, late, BEAT], alive=[True] * 3)
    assert "The others wait for rank 1." in text
    assert "rank 1 (a, process 1): step 7, data, for 90 s; BEHIND" in text
    assert text.count("BEHIND") == 1


def test_no_rank_is_blamed_when_all_wait_at_the_same_place() -> None:
    assert behind([BEAT, BEAT]) == []
    assert "All ranks wait at the same place" in diagnosis([BEAT, BEAT], alive=[True, True])


@pytest.mark.parametrize("last", [None, BEAT])
def test_a_rank_without_a_heartbeat_is_reported_first(last: Beat | None) -> None:
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


def test_a_single_rank_writes_its_heartbeat_and_waits_for_nobody(tmp_path: Path) -> None:
    phases = Phases(torch.device("cpu"))
    with Heartbeat(tmp_path, world=World(), phases=phases, timeout_seconds=0.01):
        phases.mark("data", step=4)
        time.sleep(0.1)  # beyond the limit
        beat = read_beat(tmp_path / "heartbeats" / "rank-00000.json")
    assert beat is not None
    assert (beat.rank, beat.step, beat.phase) == (0, 4, "data")


def test_which_errors_mean_lost_contact() -> None:
    assert lost_contact(RuntimeError("[gloo/transport/tcp/pair.cc:533] Connection closed by peer [127.0.0.1]:29"))
    assert not lost_contact(RuntimeError("CUDA out of memory"))
    assert not lost_contact(ValueError("NCCL"))
