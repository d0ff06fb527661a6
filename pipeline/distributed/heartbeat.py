"""Signs of life of every rank, so that a stalled or lost rank is named instead of guessed.

The training thread marks where it is: step and phase. A thread beside it writes that every few seconds to
`RUN/heartbeats/rank-R.json`, also while the training thread stands still in a collective or elsewhere. When a rank has
made no progress for `engine.timeout_minutes`, it reads all ranks' files twice: whose file no longer changes is gone or
frozen, and who has made the fewest marks is the one that the others wait for. It prints this and where its own threads
are, and ends with EXIT_STALLED. The rank that the others wait for prints the same and gives them a head start.
"""

from __future__ import annotations

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

from pipeline.distributed.world import World, lost_contact
from pipeline.files import write_text

EXIT_STALLED = 76
"""Another rank stands still or is gone. The newest checkpoint is intact: start again with --resume latest."""
HEAD_START = 1.25
"""The rank that is behind waits this many times the limit: the others' words are heard first."""


@dataclass(frozen=True)
class Beat:
    """Where a rank's training thread is. marks: how many phases it has entered; seconds: since the last of them;
    beat: number of this sign of life."""

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    marks: int
    seconds: float
    beat: int


class Heartbeat:
    """Context manager around a training loop; does nothing for a single rank."""

    def __init__(self, run: Path, *, world: World, timeout_seconds: float) -> None:
        self._folder, self._world, self._limit = run / "heartbeats", world, timeout_seconds
        self._interval = min(10.0, timeout_seconds / 10)
        self._step, self._phase, self._marks, self._since = 0, "start", 0, time.monotonic()
        self._beats, self._told = 0, False
        self._host = socket.gethostname()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def mark(self, phase: str, *, step: int | None = None) -> None:
        """The training thread enters a phase (of another step)."""
        self._step = self._step if step is None else step
        self._phase, self._marks, self._since = phase, self._marks + 1, time.monotonic()

    def __enter__(self) -> Heartbeat:
        if self._world.size > 1:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write()
            self._thread.start()
        return self

    def __exit__(self, _: type | None, error: BaseException | None, __: TracebackType | None) -> None:
        if self._world.size == 1:
            return
        if error is not None and lost_contact(error):
            self._stop_the_run(f"lost contact to another rank ({error})")
        self._end.set()
        self._thread.join()
        if error is None:
            self._path(self._world.rank).unlink(missing_ok=True)

    def _watch(self) -> None:
        while not self._end.wait(self._interval):
            self._write()
            stood = time.monotonic() - self._since
            if stood < self._limit:
                self._told = False
            elif not self._told or stood > HEAD_START * self._limit:
                self._told = True
                self._stop_the_run(f"no progress for {stood:.0f} s", unless_behind=stood < HEAD_START * self._limit)

    def _stop_the_run(self, what: str, *, unless_behind: bool = False) -> None:
        before = self._read()
        marks = self._marks
        time.sleep(2 * self._interval)
        if unless_behind and self._marks != marks:
            return  # it went on meanwhile
        self._write()
        after = self._read()
        text = diagnosis(after, alive=[a is not None and a != b for a, b in zip(after, before, strict=True)])
        print(f"Rank {self._world.rank}: {what}. {text}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr)
        if not (unless_behind and self._world.rank in behind(after)):
            os._exit(EXIT_STALLED)

    def _write(self) -> None:
        self._beats += 1
        rank = self._world.rank
        beat = Beat(rank=rank, host=self._host, pid=os.getpid(), step=self._step, phase=self._phase, marks=self._marks,
                    seconds=round(time.monotonic() - self._since, 1), beat=self._beats)  # fmt: skip
        write_text(self._path(rank), json.dumps(asdict(beat)) + "\n")

    def _read(self) -> list[Beat | None]:
        return [read_beat(self._path(rank)) for rank in range(self._world.size)]

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.json"


def read_beat(path: Path) -> Beat | None:
    """A rank's last sign of life; None when there is none that can be read."""
    try:
        return Beat(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def behind(beats: Sequence[Beat | None]) -> list[int]:
    """The ranks that the others wait for: those with the fewest marks, when some have more; else nobody."""
    marks = [-1 if beat is None else beat.marks for beat in beats]
    return [rank for rank, count in enumerate(marks) if count == min(marks) < max(marks)]


def diagnosis(beats: Sequence[Beat | None], *, alive: Sequence[bool]) -> str:
    """Who is where, one line per rank, and who is behind. Args: alive: whose sign of life has changed just now."""
    waited_for = behind(beats)
    gone = [rank for rank, lives in enumerate(alive) if not lives]
    if gone:
        verdict = f"{_ranks(gone)} without any sign of life: the process or its node is gone or frozen."
    elif waited_for:
        verdict = f"The others wait for {_ranks(waited_for)}."
    else:
        verdict = "All ranks wait at the same place: a GPU or the network between them stands still, not one rank."
    lines = []
    for rank, (beat, lives) in enumerate(zip(beats, alive, strict=True)):
        where = "never seen" if beat is None else f"step {beat.step}, {beat.phase}, for {beat.seconds:.0f} s"
        who = "" if beat is None else f" ({beat.host}, process {beat.pid})"
        remarks = [word for word, holds in (("BEHIND", rank in waited_for), ("no sign of life", not lives)) if holds]
        lines.append(f"  rank {rank}{who}: {where}" + "".join(f"; {word}" for word in remarks))
    return "\n".join([verdict, *lines, f"Exit code {EXIT_STALLED}; the newest checkpoint is intact (--resume latest)."])


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
