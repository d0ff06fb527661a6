"""A rank that is gone is noticed by all others, and named."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist

from pipeline.distributed import peers
from pipeline.distributed.exit_record import ExitRecord, read_ends
from pipeline.distributed.peers import PeerWatch, StartWatch
from pipeline.postmortem.diagnosis import diagnose
from tests.launch import run


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(peers, "time", clock)
    return clock


def record(folder: Path, rank: int, code: int, *, reason: str = "", time: float = 1.0) -> None:
    text = json.dumps(asdict(ExitRecord(rank, f"node{rank}", 7, time, code, reason)))
    (folder / f"exit-{rank:05d}.json").write_text(text)


def watch_of(folder: Path, *, size: int = 2) -> PeerWatch:
    return PeerWatch(folder, rank=0, size=size, lost_after=45.0, start="now")


def beat(folder: Path, rank: int, number: int, *, start: str = "now") -> None:
    (folder / f"rank-{rank:05d}.json").write_text(json.dumps({"beat": number, "start": start}))


@pytest.mark.parametrize(("code", "counts"), [(0, False), (75, False), (74, False), (2, True), (70, True), (134, True)])
def test_the_end_of_another_rank_counts_from_the_second_look_on(code: int, counts: bool, tmp_path: Path) -> None:
    watch = watch_of(tmp_path, size=4)
    assert watch.look() == ""
    record(tmp_path, 3, code, reason="a shard is damaged")
    assert watch.look() == ""
    assert watch.look() == (f"rank 3 (node3, process 7) ended with {code}: a shard is damaged" if counts else "")


def test_records_of_an_earlier_start_and_of_ranks_that_no_longer_exist_are_ignored(tmp_path: Path) -> None:
    record(tmp_path, 1, 76)
    watch = watch_of(tmp_path)
    record(tmp_path, 5, 2)
    assert [watch.look() for _ in range(3)] == [""] * 3
    record(tmp_path, 1, 2, time=9.0)
    assert [bool(watch.look()) for _ in range(2)] == [False, True]


def test_the_first_cause_is_passed_on(tmp_path: Path) -> None:
    watch = watch_of(tmp_path, size=4)
    record(tmp_path, 2, 76, reason="rank 3 (node3, process 7) ended with 2: damaged. Exit code 76; the newest ...")
    watch.look()
    assert watch.look() == "rank 3 (node3, process 7) ended with 2: damaged."


def test_a_neighbour_whose_heartbeat_stops_is_dead(tmp_path: Path, clock: Clock) -> None:
    beat(tmp_path, 1, 1)
    watch = watch_of(tmp_path, size=8)
    for number in range(30):
        clock.now += 5
        beat(tmp_path, 2, number)
        if number < 3:
            beat(tmp_path, 1, number)
        found = watch.look()
        assert bool(found) == (clock.now > 15 + 45), clock.now
        if found:
            break
    assert "rank 1 without a heartbeat for 50 s" in found
    assert clock.now == 65, "noticed here within 50 s, and by those who read this rank's record within 60"


@pytest.mark.parametrize("left", [None, "now", "earlier"])
def test_a_rank_that_freezes_before_its_second_heartbeat_is_dead(
    tmp_path: Path, clock: Clock, left: str | None
) -> None:
    if left is not None:
        beat(tmp_path, 1, 1, start=left)
    watch = watch_of(tmp_path)
    found = []
    for _ in range(12):
        clock.now += 5
        found.append(watch.look())
    assert [bool(text) for text in found] == [False] * 10 + [True] * 2
    assert "rank 1 without a heartbeat for 50 s" in found[-2]
    assert ("It has written none" in found[-2]) == (left != "now")


def test_a_rank_that_cannot_write_its_own_heartbeat_accuses_nobody(tmp_path: Path, clock: Clock) -> None:
    watch = watch_of(tmp_path)
    for _ in range(30):  # the disk is full
        clock.now += 5
        assert watch.look(blind=True) == ""


def test_a_rank_that_was_stopped_itself_accuses_nobody(tmp_path: Path, clock: Clock) -> None:
    watch = watch_of(tmp_path)
    for number in range(3):
        beat(tmp_path, 1, number)
        watch.look()
        clock.now += 5
    clock.now += 300  # Slurm suspends and resumes all ranks
    assert watch.look() == ""
    clock.now += 5
    assert watch.look() == ""
    (tmp_path / "rank-00001.json").unlink()  # it has ended by itself
    clock.now += 50
    assert watch.look() == ""


def test_a_rank_that_comes_late_to_a_start_or_is_through_is_not_dead(clock: Clock) -> None:
    """Between two stages, rank 0 may wait for an upload."""
    store = dist.HashStore()
    watch, other = (StartWatch(store, "start", rank=rank, size=2, lost_after=45.0) for rank in range(2))

    def looks(text: str | None) -> list[bool]:
        if text is not None:
            other.beat(text)
        found = []
        for _ in range(12):
            clock.now += 5
            found.append(bool(watch.look()))
        return found

    assert not any(looks(None))
    assert not any(looks(""))
    assert looks("node1, number 7") == [False] * 10 + [True] * 2
    other.end(2, "no memory")
    assert "rank 1 (" in watch.look() + watch.look()


NAMED = {
    "error": "rank {} .* ended with 2: a shard is damaged",
    "abort": "rank {} .* ended with 134: SIGABRT; the stacks are in .*fatal-0000{}.txt: .*remote process exited "
    "ncclRemoteError: A call failed possibly due to a network error",
    "killed": "rank {} without a heartbeat",
    "frozen": "rank {} without a heartbeat",
}
"""What the others record of the rank, and below what `neuclip doctor` says."""
SAID = {
    "error": "a shard is damaged",
    "abort": "ncclRemoteError: A call failed",
    "killed": "rank {} ended without",
    "frozen": "rank {} ended without",
}


@pytest.mark.parametrize(
    ("ranks", "how", "victim"), [(4, "error", 1), (2, "abort", 1), (4, "killed", 1), (2, "frozen", 1), (4, "frozen", 0)]
)
def test_all_ranks_end_when_one_is_lost_in_a_collective(ranks: int, how: str, victim: int, tmp_path: Path) -> None:
    done = run("tests.dist.lost_rank", str(tmp_path), how, str(victim), ranks=ranks, check=False, timeout=120)
    ends = {end.rank: end for end in read_ends(tmp_path / "heartbeats")}
    for rank in set(range(ranks)) - {victim}:
        assert ends[rank].code == 76, done.stderr
        assert f"Rank {rank} on " in done.stderr
        assert re.search(NAMED[how].format(victim, victim), ends[rank].reason), ends[rank]
        stacks = (tmp_path / "heartbeats" / f"stacks-{rank:05d}.txt").read_text()
        assert "lost_rank.py" in stacks, "where the training thread waited"
    (tmp_path / "config.yaml").write_text("{}")
    outcome = diagnose(tmp_path)[0]
    assert SAID[how].format(victim) in outcome.found
    assert how != "abort" or "SIGKILL" not in outcome.found


@pytest.mark.parametrize(
    ("place", "how", "victim", "said"),
    [
        ("start", "error", 3, r"rank 3 \(.*, process \d+\) ended with 2: UserError: its GPU has no free memory"),
        ("start", "error", 0, "store is gone, and with it rank 0|rank 0 .* its GPU has no free memory"),
        ("start", "killed", 2, r"rank 2 without a heartbeat for \d+ s.* Its last one: .*, process \d+, number \d+"),
        ("start", "killed", 0, "the ranks' store is gone, and with it rank 0"),
        ("start", "frozen", 0, "the ranks' store does not answer: rank 0, its node"),
        ("group", "error", 1, "gloo cannot connect rank 1 on .* with the others: NCCL error in: .* system error"),
        ("group", "frozen", 2, r"rank 2 without a heartbeat for \d+ s"),
    ],
)
def test_all_ranks_end_when_one_is_lost_at_the_start(place: str, how: str, victim: int, said: str) -> None:
    """Regression test: before the first step, the others waited in NCCL until its time limit."""
    done = run("tests.dist.lost_rank", place, how, str(victim), ranks=4, check=False, timeout=120)
    for rank in set(range(4)) - {victim}:
        (line,) = [line for line in done.stderr.splitlines() if line.startswith(f"Rank {rank} on ")]
        assert re.search(said, line), line
