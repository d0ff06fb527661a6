"""Rank heartbeats: a rank that hangs, has failed or is gone is noticed by all others, and named."""

import json
import re
import time
from dataclasses import asdict, replace

import pytest
import torch
from torch.distributed import DistBackendError

from pipeline.distributed.exit_record import ExitRecord, read_ends
from pipeline.distributed.heartbeat import Beat, Heartbeat, diagnosis
from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World, lost_contact
from pipeline.planning.diagnosis import diagnose
from pipeline.run_files import read_as
from tests.launch import run

BEAT = Beat(rank=0, host="a", pid=1, step=7, phase="objective", marks=40, seconds=61.0, number=9)
LATE = replace(BEAT, rank=1, phase="data", marks=38, seconds=90.0)


def heartbeat(folder, *, size=2):
    """That of rank 0, which has not begun to watch: ranks are dead after 9 looks."""
    world = World(size=size, phases=Phases(torch.device("cpu")))
    return Heartbeat(folder, world=world, lost_after=45.0, limit=60.0)


def beat(folder, rank, number=1, *, seconds=0.0):
    text = json.dumps(asdict(replace(BEAT, rank=rank, number=number, seconds=seconds)))
    (folder / f"rank-{rank:05d}.json").write_text(text)


def end(folder, rank, code, *, reason=""):
    text = json.dumps(asdict(ExitRecord(rank, f"node{rank}", 7, 1.0, code, reason)))
    (folder / f"exit-{rank:05d}.json").write_text(text)


def test_the_diagnosis_names_the_rank_that_the_others_wait_for():
    for beats, said, remarks in (
        ([BEAT, LATE, BEAT], "The others wait for rank 1.", ["1 (a, process 1): step 7, data, for 90 s; BEHIND"]),
        ([BEAT, BEAT], "All ranks wait at the same place", []),
        ([BEAT, None], "The others wait for rank 1.", ["rank 1: no heartbeat was ever written; BEHIND"]),
    ):
        text = diagnosis(beats)
        assert text.startswith(said)
        assert all(remark in text for remark in remarks)
        assert text.count(";") == len(remarks)


def test_heartbeats_are_written_and_removed_after_a_clean_exit(tmp_path):
    path, phases = tmp_path / "new" / "rank-00001.json", Phases(torch.device("cpu"))
    world = World(rank=1, size=2, phases=phases)
    with Heartbeat(tmp_path / "old", world=world, lost_after=45.0, limit=100.0) as heart:
        phases.mark("data", step=3)
        world.progress()
        with phases("forward"):
            pass
        heart.move(tmp_path / "new")
        found = read_as(Beat, path)
        assert found is not None
        assert (found.rank, found.step, found.phase, found.marks, found.number) == (1, 3, "forward", 2, 2)
    assert not path.exists()
    path.write_text("{")
    assert read_as(Beat, path) is None
    with Heartbeat(tmp_path, world=World(), lost_after=0.05, limit=0.01):  # a single rank waits for nobody
        time.sleep(0.1)
        assert read_as(Beat, tmp_path / "rank-00000.json") is not None


def test_which_errors_mean_lost_contact():
    assert lost_contact(RuntimeError("[gloo/transport/tcp/pair.cc:533] Connection closed by peer [127.0.0.1]:29"))
    assert not lost_contact(RuntimeError("CUDA out of memory"))
    assert not lost_contact(DistBackendError("NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'"))
    assert lost_contact(DistBackendError("NCCL error: remote process exited"))
    assert not lost_contact(ValueError("NCCL"))


def test_a_collective_that_fails_names_the_rank_that_is_gone(tmp_path, monkeypatch):
    heart, said = heartbeat(tmp_path), list[str]()
    heart._interval = 0.0
    beat(tmp_path, 1)
    monkeypatch.setattr(heart, "_leave", said.append)
    with pytest.raises(RuntimeError), heart.training(1.0):
        raise RuntimeError("gloo: Connection closed by peer")
    gone = "rank 1 without a heartbeat, its last one: rank 1 (a, process 1): step 7, objective, for 0 s"
    assert said == [f"lost contact with another rank (gloo: Connection closed by peer): {gone}."]


def test_no_rank_ends_while_one_makes_progress(tmp_path):
    heart = heartbeat(tmp_path)
    phases = heart.world.phases
    assert phases is not None
    phases.latest = replace(phases.latest, since=phases.latest.since - 70)
    heart._write()
    beat(tmp_path, 1, seconds=50)
    assert heart._stalled() == "", "this rank waits for one that works"
    beat(tmp_path, 1, seconds=65)
    assert heart._stalled().startswith("no progress for 70 s. The others wait for rank 0.")
    heart.world.progress()
    assert heart._stalled() == ""


@pytest.mark.parametrize(("code", "counts"), [(0, False), (75, False), (74, False), (2, True), (70, True), (134, True)])
def test_the_end_of_another_rank_counts_from_the_second_look_on(code, counts, tmp_path):
    heart = heartbeat(tmp_path, size=4)
    assert heart._lost() == ""
    end(tmp_path, 3, code, reason="a shard is damaged")
    assert heart._lost() == ""
    said = f"rank 3 (node3, process 7) ended with {code}: a shard is damaged" if counts else ""
    assert heart._lost() == said
    end(tmp_path, 3, 76, reason="the first cause")
    assert (heart._lost(), heart._lost()) == ("", "the first cause")


def first_found(heart, before=lambda look: None, *, blind=False):
    """The number of the first of 30 looks that finds something, and what it finds; empty if none does."""
    for look in range(30):
        before(look)
        if lost := heart._lost(blind=blind):
            return f"{look}: {lost}"
    return ""


def test_the_next_rank_is_dead_when_its_heartbeat_stops(tmp_path):
    none, stops, ended, moved = (tmp_path / name for name in ("none", "stops", "ended", "moved"))
    for folder in (none, stops, ended):
        folder.mkdir()
    text = "rank 1 without a heartbeat for 50 s: its process or its node is dead or frozen."
    assert first_found(heartbeat(none)) == f"9: {text} It has written none since the start."
    heart = heartbeat(stops, size=8)
    last = "Its last one: rank 1 (a, process 1): step 7, objective, for 0 s."
    assert first_found(heart, lambda look: beat(stops, 1, min(look, 3))) == f"13: {text} {last}"
    heart.move(moved)
    assert heart._lost() == ""
    assert not first_found(heartbeat(none), blind=True), "the disk is full: nobody is dead for that"
    end(ended, 1, 0)
    assert not first_found(heartbeat(ended))


NAMED = {
    "error": "rank {} .* ended with 2: .*a shard is damaged",
    "abort": "rank {} .* ended with 134: SIGABRT; the stacks are in .*fatal-0000{}.txt",
    "killed": "rank {} without a heartbeat",
    "frozen": "rank {} without a heartbeat",
}
"""What the others record of the rank, and below what `neuclip doctor` says."""
SAID = {"error": "a shard is damaged", "abort": "SIGABRT; the stacks are in", "killed": "rank {} ended without"}


@pytest.mark.parametrize(
    ("place", "ranks", "how", "victim"),
    [("step", 2, "abort", 1), ("step", 3, "frozen", 0), ("start", 3, "error", 0), ("start", 2, "killed", 1)],
)
def test_all_ranks_end_when_one_is_lost(place, ranks, how, victim, tmp_path):
    """Regression test: they waited in NCCL until its time limit."""
    done = run("tests.dist.lost_rank", place, str(tmp_path), how, str(victim), ranks=ranks, check=False, timeout=120)
    for rank in set(range(ranks)) - {victim}:
        said = re.search(rf"Rank {rank} on [^:]*: (.*)", done.stderr)
        assert said, done.stderr
        assert re.match(NAMED[how].format(victim, victim), said[1]), said[1]
    if place == "start":
        return
    ends = {end.rank: end for end in read_ends(tmp_path / "heartbeats")}
    for rank in set(range(ranks)) - {victim}:
        assert ends[rank].code == 76, done.stderr
        assert re.search(NAMED[how].format(victim, victim), ends[rank].reason), ends[rank]
        stacks = (tmp_path / "heartbeats" / f"stacks-{rank:05d}.txt").read_text()
        assert "lost_rank.py" in stacks, "where the training thread waited"
    (tmp_path / "config.yaml").write_text("{}")
    outcome = next(diagnose(tmp_path))
    assert SAID.get(how, SAID["killed"]).format(victim) in outcome.found
