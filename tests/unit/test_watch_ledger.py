"""Leases have one owner at a time, are taken over only from dead watchers, and lead to one outcome."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from pipeline.evaluation.watch import ledger as module
from pipeline.evaluation.watch.ledger import DONE, FAILED, RELEASED, Lease, Ledger, create_once

NAME = "step-00000100"


class Clock:
    """A monotonic clock controlled by the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def watcher(folder: Path, *, clock: Clock | None = None) -> Ledger:
    return Ledger(folder, ttl=60, clock=clock or Clock())


def claimed(ledger: Ledger) -> Lease:
    lease = ledger.claim(NAME)
    assert lease is not None
    return lease


def kill(lease: Lease) -> None:
    """Leave the lease as kill -9 would: its heartbeat has stopped."""
    lease._end_heartbeat()


def test_a_checkpoint_has_one_owner_and_then_one_outcome(tmp_path):
    first, second = watcher(tmp_path), watcher(tmp_path)
    lease = claimed(first)
    assert second.claim(NAME) is None
    assert second.outcome(NAME) == {}
    assert lease.end(DONE, scores={"a": 0.5})
    assert second.claim(NAME) is None
    outcome = second.outcome(NAME)
    assert (outcome["scores"], outcome["how"]) == ({"a": 0.5}, DONE)
    again = second.claim(NAME, again=True)
    again.end(RELEASED)


def test_attempts_that_fail_or_kill_their_watchers_are_few_and_released_ones_do_not_count(tmp_path):
    clock = Clock()
    ledger = watcher(tmp_path, clock=clock)
    for _ in range(5):
        claimed(ledger).end(RELEASED, reason="stopped")
    for number in range(3):
        assert not ledger.is_abandoned(NAME)
        lease = claimed(ledger)
        if number == 1:
            lease.end(FAILED, reason="a reason")
        else:
            kill(lease)
            assert ledger.claim(NAME) is None
            assert not ledger.is_abandoned(NAME), "it may be alive"
            clock.now += 61
    assert ledger.claim(NAME) is None
    assert ledger.is_abandoned(NAME)
    other = ledger.claim(NAME, weights="another checkpoint of this name")
    other.end(DONE)
    assert ledger.outcome(NAME)["how"] == DONE


def test_dead_watchers_are_detected_by_the_clock_of_the_observer(tmp_path):
    clock = Clock()
    lease, observer = claimed(watcher(tmp_path)), watcher(tmp_path, clock=clock)
    kill(lease)
    assert observer.claim(NAME) is None
    assert observer.in_doubt(NAME)
    clock.now += 59
    assert observer.claim(NAME) is None
    clock.now += 1
    successor = claimed(observer)
    assert successor.number == 2
    kill(successor)


def test_heartbeats_keep_a_lease(tmp_path):
    clock = Clock()
    lease, observer = claimed(watcher(tmp_path)), watcher(tmp_path, clock=clock)
    kill(lease)  # stops only its thread; the test writes the heartbeats itself
    for count in range(1, 6):
        assert observer.claim(NAME) is None
        clock.now += 50
        lease._beat(count)
    assert not observer.in_doubt(NAME)
    assert observer.claim(NAME) is None


@pytest.mark.parametrize("skew", [-1e9, 1e9])
def test_clocks_of_other_machines_and_their_settings_do_not_matter(skew, tmp_path, monkeypatch):
    """Both clocks of the observer and all dates are decades away; it would beat more often than the owner does."""
    lease, clock = claimed(Ledger(tmp_path, ttl=600, clock=Clock())), Clock()
    kill(lease)
    clock.now += skew
    monkeypatch.setattr(module.time, "time", lambda: 1.8e9 + skew)
    monkeypatch.setattr(module.time, "gmtime", lambda gmtime=time.gmtime: gmtime(1.8e9 + skew))
    observer = watcher(tmp_path, clock=clock)
    for count in range(1, 4):
        for path in tmp_path.rglob("*"):
            os.utime(path, (4e9, 4e9))
        assert observer.claim(NAME) is None
        clock.now += 599
        assert observer.claim(NAME) is None, "it is alive until its own ttl has passed"
        lease._beat(count)
    assert observer.claim(NAME) is None
    clock.now += 601
    successor = claimed(observer)
    kill(successor)


def test_only_one_watcher_takes_over_and_a_resumed_one_cannot_overwrite(tmp_path):
    clock = Clock()
    sleeper = claimed(watcher(tmp_path))
    kill(sleeper)
    observers = [watcher(tmp_path, clock=clock) for _ in range(5)]
    assert [observer.claim(NAME) for observer in observers] == [None] * 5
    clock.now += 61
    taken = [lease for observer in observers if (lease := observer.claim(NAME)) is not None]
    assert len(taken) == 1
    assert not sleeper.end(DONE)
    assert observers[0].outcome(NAME) == {}, "the successor is at work"
    assert taken[0].end(DONE, by="successor")
    assert observers[0].outcome(NAME)["by"] == "successor"


def _claim(folder: str, barrier: object, queue: object) -> None:
    barrier.wait()
    lease = Ledger(Path(folder), ttl=600).claim(NAME)
    queue.put(lease is not None)


def test_only_one_of_several_concurrent_claims_gets_the_lease(tmp_path):
    context = multiprocessing.get_context("fork")
    for number in range(2):
        barrier, queue = context.Barrier(6), context.Queue()
        arguments = (str(tmp_path / str(number)), barrier, queue)
        processes = [context.Process(target=_claim, args=arguments) for _ in range(6)]
        for process in processes:
            process.start()
        won = [queue.get(timeout=60) for _ in processes]
        for process in processes:
            process.join()
        assert sum(won) == 1


def test_exclusive_creation_is_atomic_even_without_hard_links(tmp_path, monkeypatch):
    assert create_once(tmp_path / "a", "first")
    assert not create_once(tmp_path / "a", "second")
    assert (tmp_path / "a").read_text() == "first"

    def refuse(*_: object) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(module.os, "link", refuse)
    assert create_once(tmp_path / "b", "first")
    assert not create_once(tmp_path / "b", "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("answer", [OSError("stale answer"), FileExistsError("asked again")])
def test_a_lost_server_reply_is_detected_by_the_link_count(tmp_path, monkeypatch, answer):
    link = module.os.link

    def lose(source: Path, target: Path) -> None:
        link(source, target)
        raise answer

    monkeypatch.setattr(module.os, "link", lose)
    assert create_once(tmp_path / "a", "mine")
    assert (tmp_path / "a").read_text() == "mine"


def test_heartbeats_run_in_the_background_and_survive_disk_errors(tmp_path, monkeypatch):
    lease = Ledger(tmp_path, ttl=0.06).claim(NAME)
    beat = tmp_path / NAME / "lease-0001.beat"
    waits = threading.Event()
    write, broken = module.write_text, {"left": 3}

    def flaky(path: Path, text: str, *, durable: bool) -> None:
        if path.suffix == ".beat" and broken["left"]:
            broken["left"] -= 1
            raise OSError("away")
        write(path, text, durable=durable)

    monkeypatch.setattr(module, "write_text", flaky)
    seen = set()
    for _ in range(2000):
        seen.add(beat.read_text())
        if len(seen) >= 3 and not broken["left"]:
            break
        waits.wait(0.005)
    lease.end(DONE)
    assert len(seen) >= 3
