"""Heartbeats of every rank, which identify a rank that hangs or has died.

A thread on every rank writes step and phase of the training thread to `RUN/heartbeats/rank-R.json` every few seconds,
also while the training thread waits in a collective or elsewhere. When a rank has made no progress for
`engine.timeout_minutes`, it reads all ranks' files twice: a rank whose file has not changed is dead or frozen, and the
rank that has entered the fewest phases is the one that the others wait for. The rank prints this and the stacks of its
own threads, and exits with EXIT_STALLED. The rank that is behind prints the same, but exits later than the others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from pipeline.distributed.exit_record import FOLDER_NAME, record_exit
from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World, lost_contact
from pipeline.files import write_text

EXIT_STALLED = 76
"""Another rank hangs or is gone. The newest checkpoint is intact: start again with --resume latest."""
HEAD_START = 1.25
"""The rank that is behind waits this many times the limit, so that the others report it first."""


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
    beat: int
    """Number of this heartbeat."""


class Heartbeat:
    """Context manager around a training loop. A single rank writes its heartbeat, but waits for no other rank.

    Args:
        run: The run's folder, which the ranks share.
        world: The ranks.
        phases: Where the training thread is.
        timeout_seconds: Limit for one phase.
    """

    def __init__(self, run: Path, *, world: World, phases: Phases, timeout_seconds: float) -> None:
        self._folder, self._world, self._phases, self._limit = run / FOLDER_NAME, world, phases, timeout_seconds
        self._interval = min(10.0, timeout_seconds / 10)
        self._beats, self._reported = 0, False
        self._host = socket.gethostname()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        with contextlib.suppress(OSError):  # as in _write
            self._folder.mkdir(parents=True, exist_ok=True)
        self._write()
        self._thread.start()
        return self

    def __exit__(self, _: type | None, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None and self._world.size > 1 and lost_contact(error):
            self._stop_the_run(f"lost contact with another rank ({error})")
        self._end.set()
        self._thread.join()
        if error is None:
            self._path(self._world.rank).unlink(missing_ok=True)

    def _watch(self) -> None:
        while not self._end.wait(self._interval):
            self._write()
            if self._world.size == 1:
                continue
            waited = time.monotonic() - self._phases.latest.since
            if waited < self._limit:
                self._reported = False
            elif not self._reported or waited > HEAD_START * self._limit:
                self._reported = True
                self._stop_the_run(f"no progress for {waited:.0f} s", unless_behind=waited < HEAD_START * self._limit)

    def _stop_the_run(self, what: str, *, unless_behind: bool = False) -> None:
        """Report which rank is behind, and exit.

        Args:
            what: What this rank has noticed.
            unless_behind: Do not exit if this rank is the one behind, or has moved.
        """
        before = self._read()
        count = self._phases.latest.count
        time.sleep(2 * self._interval)
        if unless_behind and self._phases.latest.count != count:
            return
        self._write()
        after = self._read()
        text = diagnosis(after, alive=[a is not None and a != b for a, b in zip(after, before, strict=True)])
        print(f"Rank {self._world.rank}: {what}. {text}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr)
        if not (unless_behind and self._world.rank in behind(after)):
            record_exit(EXIT_STALLED, f"{what}. {text}")
            os._exit(EXIT_STALLED)

    def _write(self) -> None:
        self._beats += 1
        rank, latest = self._world.rank, self._phases.latest
        beat = Beat(
            rank=rank,
            host=self._host,
            pid=os.getpid(),
            step=latest.step,
            phase=latest.phase,
            marks=latest.count,
            seconds=round(time.monotonic() - latest.since, 1),
            beat=self._beats,
        )
        with contextlib.suppress(OSError):  # a full disk must not end the run
            write_text(self._path(rank), json.dumps(asdict(beat)) + "\n")

    def _read(self) -> list[Beat | None]:
        return [read_beat(self._path(rank)) for rank in range(self._world.size)]

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.json"


def read_beat(path: Path) -> Beat | None:
    """A rank's last heartbeat; None when the file is missing or damaged."""
    try:
        return Beat(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def behind(beats: Sequence[Beat | None]) -> list[int]:
    """The ranks that have entered fewer phases than others, so that the others wait for them."""
    marks = [-1 if beat is None else beat.marks for beat in beats]
    return [rank for rank, count in enumerate(marks) if count == min(marks) < max(marks)]


def diagnosis(beats: Sequence[Beat | None], *, alive: Sequence[bool]) -> str:
    """Where each rank is, one line per rank, and which rank is responsible.

    Args:
        beats: The last heartbeat of every rank.
        alive: Whether each rank's heartbeat has changed just now.
    """
    waited_for = behind(beats)
    gone = [rank for rank, lives in enumerate(alive) if not lives]
    if gone:
        verdict = f"{_ranks(gone)} without a heartbeat: the process or its node is dead or frozen."
    elif waited_for:
        verdict = f"The others wait for {_ranks(waited_for)}."
    else:
        verdict = "All ranks wait at the same place: a GPU or the network between the ranks hangs, not one rank."
    lines = []
    for rank, (beat, lives) in enumerate(zip(beats, alive, strict=True)):
        where = "no heartbeat was ever written" if beat is None else ""
        if beat is not None:
            where = f"step {beat.step}, {beat.phase}, for {beat.seconds:.0f} s"
        who = "" if beat is None else f" ({beat.host}, process {beat.pid})"
        remarks = [word for word, holds in (("BEHIND", rank in waited_for), ("no heartbeat", not lives)) if holds]
        lines.append(f"  rank {rank}{who}: {where}" + "".join(f"; {word}" for word in remarks))
    return "\n".join([verdict, *lines, f"Exit code {EXIT_STALLED}; the newest checkpoint is intact (--resume latest)."])


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
