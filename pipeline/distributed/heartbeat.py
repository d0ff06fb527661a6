"""Heartbeats of every rank, which identify a rank that hangs or has died.

A thread on every rank writes step and phase of the training thread to `RUN/heartbeats/rank-R.json` every few seconds,
also while the training thread waits in a collective or elsewhere. At every beat it looks for ranks that have ended with
an error or are dead (`peers.py`), and ends, too: a collective with them would wait until its time limit.

When no rank has made progress for `engine.timeout_minutes`, every rank reads all ranks' files twice: a rank whose file
has not changed is dead or frozen, and the rank that has entered the fewest phases is the one that the others wait for.
The rank prints this and the stacks of its own threads, and exits with EXIT_STALLED. The rank that is behind prints the
same, but exits later than the others. A rank that waits for one that works, such as in an evaluation, goes on waiting.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from pipeline.distributed.exit_record import (
    EXIT_STALLED,
    FOLDER_NAME,
    fatal_errors_recorded,
    last_words_path,
    record_exit,
)
from pipeline.distributed.peers import PeerWatch
from pipeline.distributed.signals import signals_blocked
from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World, collectives_trace, lost_contact
from pipeline.files import write_text
from pipeline.run_files import read_as, read_run_id

HEAD_START = 1.25
"""The rank that is behind waits this many times the limit, so that the others report it first."""
HOW_TO_GO_ON = f"Exit code {EXIT_STALLED}; start again with --resume latest (checkpoints that were written are intact)."
LEAVE_SECONDS = 20.0
"""After which a process that leaves is ended from outside the interpreter, with code 1."""
COPIED_BYTES = 2**20
"""A copy of standard error that is larger is emptied."""


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
    run_id: str = ""
    start: str = ""
    """Id of this start of the run."""


class Heartbeat:
    """Context manager around a training loop. A single rank writes its heartbeat, but waits for no other rank.

    `timeout_seconds` limits one phase; a rank without a heartbeat for `lost_after` seconds is dead. `start` is an id of
    this start of the run, the same on all ranks.
    """

    def __init__(
        self,
        run: Path,
        *,
        world: World,
        phases: Phases,
        timeout_seconds: float,
        lost_after: float = 45.0,
        start: str = "",
    ) -> None:
        self._run, self._folder = run, run / FOLDER_NAME
        self._world, self._phases, self._limit = world, phases, timeout_seconds
        self._interval = min(5.0, timeout_seconds / 10, lost_after / 5)
        self._beats, self._reported = 0, False
        self._host, self._run_id, self._start = socket.gethostname(), read_run_id(run), start
        self._end, self._open = threading.Event(), contextlib.ExitStack()
        self._peers = PeerWatch(self._folder, rank=world.rank, size=world.size, lost_after=lost_after, start=start)
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        with contextlib.suppress(OSError):  # as in _write
            self._folder.mkdir(parents=True, exist_ok=True)
        self._open.enter_context(fatal_errors_recorded(self._run, rank=self._world.rank))
        if self._world.size > 1 and self._world.device.type == "cuda":  # NCCL's watchdog says there why it aborts
            self._open.enter_context(stderr_copied(last_words_path(self._run, self._world.rank)))
        self._write()
        self._thread.start()
        return self

    def __exit__(self, _: type | None, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None and self._world.size > 1 and lost_contact(error):
            self._stop_the_run(f"lost contact with another rank ({error})")
        self._end.set()
        self._thread.join()
        self._open.close()
        if error is None:
            with contextlib.suppress(OSError):  # as in _write
                self._path(self._world.rank).unlink()

    def _watch(self) -> None:
        while not self._end.wait(self._interval):
            written = self._write()
            if self._world.size == 1:
                continue
            if lost := self._peers.look(blind=not written):
                self._leave(f"{lost.rstrip('.')}. {HOW_TO_GO_ON}")
            waited = time.monotonic() - self._phases.latest.since
            if waited < self._limit:
                self._reported = False
            elif not self._reported or waited > HEAD_START * self._limit:
                self._reported = True
                early = waited < HEAD_START * self._limit
                self._stop_the_run(f"no progress for {waited:.0f} s", stalled=True, unless_behind=early)

    def _stop_the_run(self, what: str, *, stalled: bool = False, unless_behind: bool = False) -> None:
        """Report what this rank has noticed and which rank is behind, and exit.

        If `stalled`, it does not exit when another rank makes progress; if `unless_behind`, it does not when this rank
        is the one behind, or has moved.
        """
        before = self._read()
        count = self._phases.latest.count
        self._end.wait(2 * self._interval)
        if unless_behind and self._phases.latest.count != count:
            return
        self._write()
        if ended := self._peers.look():
            what = f"{what}: {ended}"
        after = self._read()
        alive = [a is not None and a != b for a, b in zip(after, before, strict=True)]
        if stalled and any(
            lives and beat and beat.seconds < self._limit for lives, beat in zip(alive, after, strict=True)
        ):
            self._reported = False  # this rank waits for one that works
            return
        text = diagnosis(after, alive=alive)
        faulthandler.dump_traceback(sys.stderr)
        if unless_behind and self._world.rank in behind(after):
            print(f"Rank {self._world.rank} on {self._host}: {what}. {text}", file=sys.stderr, flush=True)
        else:
            self._leave(f"{what}. {text}")

    def _leave(self, text: str) -> NoReturn:
        """Keep what says where this rank was, and end the process, whose training thread may wait forever."""
        # A driver that hangs may keep the trace from returning, and the interpreter's lock with it.
        faulthandler.dump_traceback_later(LEAVE_SECONDS, exit=True)
        print(f"Rank {self._world.rank} on {self._host}: {text}", file=sys.stderr, flush=True)
        record_exit(EXIT_STALLED, text)
        stem = f"{self._world.rank:05d}"
        with contextlib.suppress(OSError), (self._folder / f"stacks-{stem}.txt").open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)
        with contextlib.suppress(OSError):
            if trace := collectives_trace():
                (self._folder / f"nccl-{stem}.json").write_text(trace, encoding="utf-8")
        os._exit(EXIT_STALLED)

    def _write(self) -> bool:
        """Write a heartbeat, and return whether that was possible: a full or read-only disk must not end the run."""
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
            run_id=self._run_id,
            start=self._start,
        )
        try:
            write_text(self._path(rank), json.dumps(asdict(beat)) + "\n")
        except OSError:
            return False
        return True

    def _read(self) -> list[Beat | None]:
        return [read_beat(self._path(rank)) for rank in range(self._world.size)]

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.json"


@contextlib.contextmanager
def stderr_copied(path: Path, *, seconds: float = 5.0) -> Iterator[None]:
    """Inside, what this process writes to standard error, C++ libraries included, is also in a file.

    `tee` copies it, a process that reads what was written before an abort. Without it, nothing is copied. The file,
    whose size is looked at every few seconds, is removed at the end of the block.
    """
    original = os.dup(2)
    try:
        path.write_bytes(b"")
        with signals_blocked():  # a signal to all processes of a job must not end it before its writer
            tee = subprocess.Popen(["tee", "-a", str(path)], stdin=subprocess.PIPE, stdout=original)
    except OSError:
        os.close(original)
        yield
        return
    assert tee.stdin is not None
    os.dup2(tee.stdin.fileno(), 2)
    tee.stdin.close()

    def watch() -> None:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                tee.wait(seconds)
                os.dup2(original, 2)  # a writer without a reader would fail
                return
            with contextlib.suppress(OSError):
                if path.stat().st_size > COPIED_BYTES:
                    os.truncate(path, 0)

    watcher = threading.Thread(target=watch, name="stderr", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original, 2)  # tee ends, unless a process that was started meanwhile still writes
        watcher.join(1.0)
        with contextlib.suppress(OSError):
            path.unlink()


def read_beat(path: Path) -> Beat | None:
    """A rank's last heartbeat; None when the file is missing or damaged."""
    return read_as(Beat, path)


def behind(beats: Sequence[Beat | None]) -> list[int]:
    """The ranks that have entered fewer phases than others, so that the others wait for them."""
    marks = [-1 if beat is None else beat.marks for beat in beats]
    return [rank for rank, count in enumerate(marks) if count == min(marks) < max(marks)]


def diagnosis(beats: Sequence[Beat | None], *, alive: Sequence[bool]) -> str:
    """Where each rank is, one line per rank, and which rank is responsible.

    `beats` has the last heartbeat of every rank, and `alive` whether it has changed just now.
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
        if beat is None:
            who, where = "", "no heartbeat was ever written"
        else:
            who = f" ({beat.host}, process {beat.pid})"
            where = f"step {beat.step}, {beat.phase}, for {beat.seconds:.0f} s"
        remarks = [word for word, holds in (("BEHIND", rank in waited_for), ("no heartbeat", not lives)) if holds]
        lines.append(f"  rank {rank}{who}: {where}" + "".join(f"; {word}" for word in remarks))
    return "\n".join([verdict, *lines, HOW_TO_GO_ON])


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
