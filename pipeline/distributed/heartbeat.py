"""Heartbeats of every rank, which identify a rank that hangs or has died.

A thread on every rank writes step and phase of the training thread to a file every few seconds, also while the training
thread waits in a collective or elsewhere. It then looks for a reason to end this process, because a collective with a
rank that is gone would wait until its time limit:

- Another rank has recorded an error as its end. An error that all ranks raise is recorded by each of them, so a record
  counts from the second look on.
- The file of the next rank has not changed for a while: it is dead or frozen. Each rank looks at one other, and all see
  the record of the rank that ends because of it.
- No rank has made progress for the time limit of a phase. A rank that waits for one that works, such as in an
  evaluation, goes on waiting. The rank that has entered the fewest phases is the one that the others wait for.

The process then records what it has seen, and the stacks of its threads, and ends with EXIT_STALLED.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from pipeline.distributed.exit_record import EXIT_STALLED, ExitRecord, read_ends, record_exit, start_recording
from pipeline.distributed.signals import EXIT_PREEMPTED
from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World, lost_contact
from pipeline.files import write_text
from pipeline.run_files import read_as

HARMLESS = (0, 74, EXIT_PREEMPTED)
"""Exit codes at whose sight others go on: all ranks reach the same end by themselves."""


@dataclass(frozen=True)
class Beat:
    """Where a rank's training thread is."""

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    marks: int
    """Phases entered so far."""
    seconds: float
    """Time in this phase."""
    number: int
    """Of this heartbeat."""

    def __str__(self) -> str:
        who = f"rank {self.rank} ({self.host}, process {self.pid})"
        return f"{who}: step {self.step}, {self.phase}, for {self.seconds:.0f} s"


class Heartbeat:
    """Context manager: the heartbeat of this rank, with which it watches the others, if there are any.

    Heartbeats and the ends of ranks are in `folder`, until `move`. A rank without a heartbeat for `lost_after` seconds
    is dead; `limit` is that of a phase, in seconds, outside of `training`.
    """

    def __init__(self, folder: Path, *, world: World, lost_after: float, limit: float) -> None:
        self.folder, self.world, self._lost_after, self._limit = folder, world, lost_after, limit
        self._phases = world.phases or Phases(world.device)
        self._host, self._interval = socket.gethostname(), min(5.0, lost_after / 5)
        self._number, self._suspects = 0, set[ExitRecord]()
        self._next: Beat | None = None
        self._looks = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self.move(self.folder)
        self._thread.start()
        return self

    def __exit__(self, _: type | None, error: BaseException | None, __: object) -> None:
        self.stop()
        if error is None:
            with suppress(OSError):
                self._path(self.world.rank).unlink()

    def move(self, folder: Path) -> None:
        """Write heartbeats, and record the end of this process, in another folder from now on."""
        with suppress(OSError):  # as in _write
            folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._next, self._looks = folder, None, 0
        start_recording(folder, rank=self.world.rank)
        self._write()

    def stop(self) -> None:
        """Write no more heartbeats, and watch no longer."""
        self._end.set()
        self._thread.join()

    @contextmanager
    def training(self, limit: float) -> Iterator[None]:
        """Inside, a phase may take `limit` seconds, and a collective that fails names the rank that is gone."""
        before, self._limit = self._limit, limit
        try:
            yield
        except Exception as error:
            if self.world.size > 1 and lost_contact(error):
                self._leave(self._explain(error))
            raise
        finally:
            self._limit = before

    def _watch(self) -> None:
        while not self._end.wait(self._interval):
            written = self._write()
            if self.world.size > 1 and (problem := self._lost(blind=not written) or self._stalled()):
                self._leave(problem)

    def _lost(self, *, blind: bool = False) -> str:
        """Which rank is gone, and why; empty while none is known to be.

        `blind`: heartbeats cannot be written now, for example because the disk is full, and nobody is dead for that.
        """
        ends = {end.rank: end for end in read_ends(self.folder) if end.rank != self.world.rank}
        errors = {end for end in ends.values() if end.code not in HARMLESS}
        confirmed, self._suspects = errors & self._suspects, errors
        if confirmed:
            end = min(confirmed, key=lambda end: end.time)
            if end.code == EXIT_STALLED:  # because of another rank, which is the first cause
                return end.reason
            return f"rank {end.rank} ({end.host}, process {end.pid}) ended with {end.code}: {end.reason}"
        following = (self.world.rank + 1) % self.world.size
        before, self._next = self._next, read_as(Beat, self._path(following))
        # Looks are counted, not seconds: this process may have been suspended itself, with all others.
        self._looks = 0 if self._next != before or blind or following in ends else self._looks + 1
        if (seconds := self._looks * self._interval) <= self._lost_after:
            return ""
        last = f"Its last one: {self._next}." if self._next else "It has written none since the start."
        why = "its process or its node is dead or frozen."
        return f"rank {following} without a heartbeat for {seconds:.0f} s: {why} {last}"

    def _stalled(self) -> str:
        """Where all ranks are, if none has made progress within the limit; else empty."""
        waited = time.monotonic() - self._phases.latest.since
        if waited < self._limit:
            return ""
        beats = self._read()
        if any(beat is not None and beat.seconds < self._limit for beat in beats):
            return ""
        return f"no progress for {waited:.0f} s. {diagnosis(beats)}"

    def _explain(self, error: Exception) -> str:
        """Which ranks are behind an error of a collective; one that has recorded its end is named by `_watch` first."""
        before = self._read()
        self._end.wait(2.5 * self._interval)
        others = [beat for beat in self._read() if beat is not None and beat.rank != self.world.rank]
        gone = [f"rank {beat.rank} without a heartbeat, its last one: {beat}" for beat in others if beat in before]
        return f"lost contact with another rank ({error}): {'; '.join(gone) or 'all others have heartbeats'}."

    def _leave(self, text: str) -> NoReturn:
        """End this process, whose training thread may wait forever."""
        with suppress(OSError, ValueError):
            advice = "start again with --resume latest (checkpoints that were written are intact)."
            said = f"Rank {self.world.rank} on {self._host}: {text}\nExit code {EXIT_STALLED}; {advice}"
            print(said, file=sys.stderr, flush=True)
        record_exit(EXIT_STALLED, text)
        path = self.folder / f"stacks-{self.world.rank:05d}.txt"
        with suppress(OSError), path.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)
        os._exit(EXIT_STALLED)

    def _write(self) -> bool:
        """Write a heartbeat, and return whether that was possible: a full or read-only disk must not end the run."""
        self._number += 1
        latest, me = self._phases.latest, (self.world.rank, self._host, os.getpid())
        seconds = round(time.monotonic() - latest.since, 1)
        beat = Beat(*me, latest.step, latest.phase, marks=latest.count, seconds=seconds, number=self._number)
        try:
            write_text(self._path(self.world.rank), json.dumps(asdict(beat)) + "\n")
        except OSError:
            return False
        return True

    def _read(self) -> list[Beat | None]:
        return [read_as(Beat, self._path(rank)) for rank in range(self.world.size)]

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.json"


def diagnosis(beats: Sequence[Beat | None]) -> str:
    """Which rank the others wait for, and where each rank is by its last heartbeat, one line per rank."""
    marks = [-1 if beat is None else beat.marks for beat in beats]
    behind = [rank for rank, count in enumerate(marks) if count == min(marks) < max(marks)]
    lines = ["All ranks wait at the same place: a GPU or the network between the ranks hangs, not one rank."]
    if behind:
        lines = [f"The others wait for rank {', '.join(map(str, behind))}."]
    for rank, beat in enumerate(beats):
        place = str(beat) if beat else f"rank {rank}: no heartbeat was ever written"
        lines.append(f"  {place}{'; BEHIND' * (rank in behind)}")
    return "\n".join(lines)
