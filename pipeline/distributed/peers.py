"""Notices within a minute that another rank has ended with an error or has died.

While a run trains, `PeerWatch` reads the ranks' files in RUN/heartbeats. At its start, when nothing may be written
there yet, `start_watched` exchanges the same through the ranks' store. `work_on_main` is what rank 0 does meanwhile for
all.

Each rank looks at all exit records, and at the heartbeats of the next two ranks. Whoever finds a rank dead ends with a
record of its own, which all others see at their next look: the number of files that are read grows with the number of
ranks, and not with its square.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pipeline.distributed.exit_record import EXIT_STALLED, ExitRecord, read_ends, record_exit
from pipeline.distributed.signals import EXIT_PREEMPTED
from pipeline.distributed.world import World
from pipeline.errors import UserError, exit_code_of

HARMLESS = (0, 74, EXIT_PREEMPTED)
"""Exit codes at whose sight others go on: all ranks reach the same end by themselves."""
NEIGHBOURS = 2
WORK_SECONDS, WORK_LOST_AFTER = 2.0, 60.0
"""How often rank 0 says that it works, and after how many seconds without that it is lost."""
T = TypeVar("T")


@dataclass
class _Seen:
    """A neighbour's heartbeat as it was last seen to change."""

    text: str
    """Empty: it has written none since the start."""
    since: float


class PeerWatch:
    """Looks for lost ranks in RUN/heartbeats: those without a new heartbeat for `lost_after` seconds are dead.

    Heartbeats with another id than `start`, which is that of this start of the run, were left by an earlier one.
    """

    def __init__(self, folder: Path, *, rank: int, size: int, lost_after: float, start: str) -> None:
        self._folder, self.rank, self._size, self.lost_after = folder, rank, size, lost_after
        self._start = start
        self._old = set(self._ends())
        self._suspects: set[ExitRecord] = set()
        self._seen: dict[int, _Seen] = {}
        self._looked = time.monotonic()

    def look(self, *, blind: bool = False) -> str:
        """Why the run cannot go on; empty while nothing is known.

        An exit record counts from its second look on: where all ranks raise the same error, each ends with its own.
        `blind`: heartbeats are not written now, for example because the disk is full, and nobody is dead for that.
        """
        now = time.monotonic()
        paused, self._looked = blind or now - self._looked > self.lost_after / 2, now
        ends = set(self._ends()) - self._old
        confirmed, self._suspects = sorted(ends & self._suspects, key=lambda end: end.time), ends
        if confirmed:
            return describe_end(confirmed[0])
        neighbours = {(self.rank + step) % self._size for step in range(1, NEIGHBOURS + 1)} - {self.rank}
        for rank in sorted(neighbours):
            text = self._beat(rank)
            seen = self._seen.get(rank)
            if seen is None or (text and text != seen.text):
                self._seen[rank] = _Seen(text, now)
            elif paused or text != seen.text:  # this process was stopped itself, or the other one has ended by itself
                seen.since = now
            elif now - seen.since > self.lost_after:
                last = f"Its last one: {text.strip()}" if text else "It has written none since the start."
                return (
                    f"rank {rank} without a heartbeat for {now - seen.since:.0f} s: its process or its node is dead or "
                    f"frozen. {last}"
                )
        return ""

    def _ends(self) -> Sequence[ExitRecord]:
        found = read_ends(self._folder, below=self._size)
        return [end for end in found if end.code not in HARMLESS and end.rank != self.rank]

    def _beat(self, rank: int) -> str:
        try:
            text = (self._folder / f"rank-{rank:05d}.json").read_text(encoding="utf-8")
            return text if json.loads(text).get("start", "") == self._start else ""
        except (OSError, ValueError, AttributeError):
            return ""


class StartWatch(PeerWatch):
    """The same through the store, in which each rank has a heartbeat and the failed ones their records.

    Nobody else uses the connection `store`. The names of this watch's entries there begin with `keys`.
    """

    def __init__(self, store: Any, keys: str, *, rank: int, size: int, lost_after: float) -> None:
        self._store, self._keys = store, keys
        super().__init__(Path(), rank=rank, size=size, lost_after=lost_after, start="")

    def beat(self, text: str) -> None:
        """Write this rank's heartbeat; an empty one is its last."""
        self._store.set(f"{self._keys}/beat-{self.rank}", text)

    def end(self, code: int, reason: str) -> None:
        """Write the record of this rank, which ends now."""
        end = ExitRecord(self.rank, socket.gethostname(), os.getpid(), time.time(), code, reason[:1000])
        self._store.set(f"{self._keys}/end-{self._store.add(f'{self._keys}/ends', 1)}", json.dumps(asdict(end)))

    def _ends(self) -> Sequence[ExitRecord]:
        keys = [f"{self._keys}/end-{number + 1}" for number in range(self._store.add(f"{self._keys}/ends", 0))]
        found = [ExitRecord(**json.loads(self._store.get(key))) for key in keys if self._store.check([key])]
        return [end for end in found if end.code not in HARMLESS and end.rank != self.rank]

    def _beat(self, rank: int) -> str:
        key = f"{self._keys}/beat-{rank}"
        text = self._store.get(key).decode() if self._store.check([key]) else ""
        return text or f"none at {time.monotonic()}"  # nobody is dead who is through, or still in the stage before


def start_watched(world: World, *, lost_after: float) -> AbstractContextManager[None]:
    """Inside, this process ends with EXIT_STALLED if another rank fails or dies. Collective.

    The start of a run has collectives, too, in which NCCL would wait for that rank until its time limit.
    """
    if world.size == 1:
        return nullcontext()
    world.traffic["start_watched.calls"] += 1
    keys = f"start/{world.traffic['start_watched.calls']}"
    return watched(StartWatch(world.store(), keys, rank=world.rank, size=world.size, lost_after=lost_after))


@contextmanager
def watched(watch: StartWatch) -> Iterator[None]:
    """As `start_watched`, also when there is no process group yet."""
    rank, lost_after = watch.rank, watch.lost_after
    done, interval = threading.Event(), min(5.0, lost_after / 5)
    who, looks = f"{socket.gethostname()}, process {os.getpid()}", 0
    failed: tuple[int, str] | None = None

    def leave(lost: str) -> NoReturn:
        text = f"Rank {rank} on {socket.gethostname()}: {lost.rstrip('.')}. This was at the start."
        print(text, file=sys.stderr, flush=True)
        record_exit(EXIT_STALLED, text)
        os._exit(EXIT_STALLED)

    def look() -> None:
        nonlocal looks
        gone = 0
        while True:  # the first beat comes at once: a rank without one counts as not yet here
            looks += 1
            try:
                watch.beat(f"{who}, number {looks}")
                if lost := watch.look():
                    watch.end(EXIT_STALLED, lost)
                    if rank == 0:  # the store may end with this process
                        time.sleep(3 * interval)
                    leave(lost)
                gone = 0
            except RuntimeError as error:
                gone += 1
                if gone > 1:
                    leave(f"the ranks' store is gone, and with it rank 0 or its launcher ({error})")
            if done.wait(interval):
                break
        with suppress(RuntimeError):
            if failed:
                watch.end(*failed)
            watch.beat("")

    def guard() -> None:
        """A store whose node is off does not answer. Counted in looks, because a job may be suspended for a while."""
        missed, seen = 0, -1
        while not done.wait(interval):
            missed, seen = (missed + 1 if looks == seen else 0), looks
            if missed * interval > lost_after:
                leave("the ranks' store does not answer: rank 0, its node or its launcher is dead or frozen")

    threads = [threading.Thread(target=work, name="start", daemon=True) for work in (look, guard)]
    for thread in threads:
        thread.start()
    try:
        yield
    except BaseException as error:
        failed = (exit_code_of(error), f"{type(error).__name__}: {error}")
        raise
    finally:
        done.set()
        threads[0].join(interval)


def describe_end(end: ExitRecord) -> str:
    """Which rank ended, and why; of ranks that ended because of another one, the first cause."""
    if "rank " in end.reason and end.code == 76:
        return end.reason.partition(" Exit code ")[0]
    return f"rank {end.rank} ({end.host}, process {end.pid}) ended with {end.code}: {end.reason}"


class LostRank(UserError):
    """Another rank has ended, in a phase in which no heartbeat watches, such as the start."""

    exit_code = EXIT_STALLED


def work_on_main(work: Callable[[], T], *, world: World, minutes: float) -> T | None:
    """Do on rank 0 what may take longer than a collective may. Collective.

    Args:
        work: What rank 0 does. It calls `world.progress` now and then.
        world: The ranks.
        minutes: After so long without progress, the other ranks give rank 0 up.

    Returns:
        What the work returns; None on other ranks, which wait until it is done.

    Raises:
        LostRank: Rank 0 has ended or hangs. On the other ranks.
    """
    if world.size == 1:
        return work()
    world.traffic["work_on_main.calls"] += 1
    name = f"work_on_main/{world.traffic['work_on_main.calls']}"
    if not world.is_main:
        _wait(name, world)
        return None
    done = threading.Event()
    world.progress()

    def beat() -> None:
        while not done.wait(WORK_SECONDS):
            if world.phases is None or time.monotonic() - world.phases.latest.since < 60 * minutes:
                world.count(f"{name}/beats", 1)

    thread = threading.Thread(target=beat, name="work", daemon=True)
    thread.start()
    try:
        return work()
    finally:
        done.set()
        thread.join()
        world.count(f"{name}/done", 1)


def _wait(name: str, world: World) -> None:
    """Return when rank 0 is done.

    Raises:
        LostRank: It says no more that it works.
    """
    beats, since, pause = -1, time.monotonic(), 1e-3
    while not world.count(f"{name}/done"):
        if (now := world.count(f"{name}/beats")) != beats:
            beats, since = now, time.monotonic()
        elif time.monotonic() - since > WORK_LOST_AFTER:
            raise LostRank(
                f"Rank 0 has ended or hangs while this rank, {world.rank}, waits for it at the start, for example "
                "for the download of a checkpoint: its own message, if there is one, says why."
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
