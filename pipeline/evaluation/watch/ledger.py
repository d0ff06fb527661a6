"""Which watcher evaluates which checkpoint: leases and outcomes are files that are created once and never changed.

The ledger uses files and not a database, because watchers on several machines share only a file system. SQLite's locks
are unreliable on NFS, and its write-ahead log needs shared memory. On every file system, however, `link` creates a name
only once. So each fact is one small file with its own name, written under a temporary name first:

    LEDGER/step-00000500/
        lease-0001.json    an attempt: who, where, since when
        lease-0001.beat    rewritten by the lease's owner only, to show that it is alive
        end-0001.json      the attempt ended without a result
        done.json          the outcome

The lease with the highest number is valid, unless it has ended or its owner is dead: then exactly one watcher can take
the next number. An owner is considered dead when its beat has not changed for `ttl` seconds, the longer of its own and
the observer's, of the *observer's* clock; clocks of different machines are never compared. An owner that was only
suspended writes the same results again, byte for byte, and finds `done.json` there.

The ledger is for scheduling only; the results themselves are authoritative. A watcher that finds a checkpoint done but
its results missing, or `done.json` damaged, sets the outcome aside (`superseded-0001.json`), and the checkpoint is
evaluated again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.files import read_tree, write_text
from pipeline.run_files import PREFIX, is_name, step_of

LEDGER_FOLDER = "evaluation-ledger"
DONE = "done.json"
RELEASED, FAILED = "released", "failed"
FINISHED, ABANDONED = "done", "abandoned"
ATTEMPTS = 3
"""After so many that failed or whose owner died, a checkpoint is abandoned: it cannot kill its watchers forever."""
_LEASE = re.compile(r"^lease-(\d+)\.json$")


def create_once(path: Path, text: str) -> bool:
    """Create a complete file unless the name is already taken. Returns whether it was created. Safe on NFS."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    write_text(temporary, text, durable=True)
    try:
        os.link(temporary, path)
        return True
    except OSError as error:
        # The server's reply may be lost although the link was made, and the repeated request then finds the name
        # taken. The link count shows whether it was made.
        if temporary.stat().st_nlink == 2:
            return True
        return False if isinstance(error, FileExistsError) else _create_exclusively(path, text)
    finally:
        temporary.unlink(missing_ok=True)


def _create_exclusively(path: Path, text: str) -> bool:
    """For file systems without hard links: the file exists before its content is written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return True
    except FileExistsError:
        return False


@dataclass
class Lease:
    """One attempt at one checkpoint, held by this process; a thread writes its heartbeat until it ends."""

    folder: Path
    number: int
    owner: Mapping[str, Any]
    interval: float
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> Lease:
        self._beat(0)
        self._thread = threading.Thread(target=self._live, name=f"heartbeat {self.folder.name}", daemon=True)
        self._thread.start()
        return self

    def finish(self, outcome: Mapping[str, Any]) -> bool:
        """Write the outcome. Returns False if another watcher considered this one dead and wrote an outcome first."""
        self._end_heartbeat()
        record = {"checkpoint": self.folder.name, **outcome, "attempt": self.number, **self.owner}
        return create_once(self.folder / DONE, json.dumps(record, indent=1) + "\n")

    def give_up(self, reason: str, *, how: str = FAILED) -> None:
        """End the attempt without an outcome. With `how` = released it is not counted as an attempt."""
        self._end_heartbeat()
        record = {"how": how, "reason": reason, **self.owner}
        create_once(self.folder / f"end-{self.number:04d}.json", json.dumps(record, indent=1) + "\n")

    def _live(self) -> None:
        for count in itertools.count(1):
            if self._stop.wait(self.interval):
                return
            with contextlib.suppress(OSError):  # the file system may be temporarily unreachable; the work continues
                self._beat(count)

    def _beat(self, count: int) -> None:
        beat = self.folder / f"lease-{self.number:04d}.beat"
        write_text(beat, f"{self.owner['token']} {count}\n", durable=True)

    def _end_heartbeat(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


class Ledger:
    """The leases and outcomes below `folder`, as one watcher sees them.

    Args:
        folder: The ledger of one run and one suite.
        ttl: Seconds without a heartbeat after which an owner is considered dead.
        clock: Seconds, for tests.
    """

    def __init__(self, folder: Path, *, ttl: float = 180.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.ttl = folder, ttl
        self._clock = clock
        self._seen: dict[Path, tuple[str, float]] = {}  # the last heartbeat, and when it was first seen
        self._first: dict[Path, str] = {}

    def outcome(self, name: str) -> dict[str, Any]:
        """The outcome of a checkpoint, finished or abandoned; empty if it has none, or the record is damaged."""
        return read_tree(self.folder / name / DONE)

    def done(self, name: str) -> bool:
        """Whether a checkpoint has an outcome."""
        return bool(self.outcome(name))

    def reopen(self, name: str, reason: str) -> None:
        """Set an outcome aside, so that the checkpoint is evaluated again; this is not counted as an attempt."""
        folder = self.folder / name
        number = self._highest(folder)
        if number:
            record = {"how": RELEASED, "reason": reason, "at": _now()}
            create_once(folder / f"end-{number:04d}.json", json.dumps(record, indent=1) + "\n")
        with contextlib.suppress(FileNotFoundError):  # another watcher was faster
            os.replace(folder / DONE, folder / f"superseded-{number:04d}.json")

    def claim(self, name: str, *, weights: str = "") -> Lease | None:
        """A lease on a checkpoint; None when it is done, held by a live watcher, or taken by another one first.

        `weights` tell it from another checkpoint of the same name; attempts at others are not counted.
        """
        folder = self.folder / name
        if self.done(name):
            return None
        if (folder / DONE).exists():
            self.reopen(name, f"{DONE} was damaged")
        number = self._highest(folder)
        if number and not self._is_over(folder, number):
            return None
        if self._spent(folder, weights) >= ATTEMPTS:
            self._abandon(name, folder, number, weights)
            return None
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "token": uuid.uuid4().hex,
            "at": _now(),
            "weights": weights,
            "ttl": self.ttl,
        }
        path = folder / f"lease-{number + 1:04d}.json"
        if not create_once(path, json.dumps(owner, indent=1) + "\n"):
            return None
        lease = Lease(folder, number + 1, owner, interval=self.ttl / 6).start()
        if self.done(name):  # network file systems cache directories, so it may be visible only now
            lease.give_up("it was done already", how=RELEASED)
            return None
        return lease

    def in_doubt(self, name: str) -> bool:
        """Whether the owner of this checkpoint has neither been seen alive nor been silent for `ttl` seconds yet."""
        folder = self.folder / name
        number = self._highest(folder)
        if not number or self.done(name) or self._is_over(folder, number):
            return False
        beat = folder / f"lease-{number:04d}.beat"
        return self._first[beat] == _read(beat)

    def _is_over(self, folder: Path, number: int) -> bool:
        if (folder / f"end-{number:04d}.json").exists():
            return True
        beat = folder / f"lease-{number:04d}.beat"
        value, now = _read(beat), self._clock()
        self._first.setdefault(beat, value)
        if beat not in self._seen or self._seen[beat][0] != value:
            self._seen[beat] = (value, now)
        own = read_tree(folder / f"lease-{number:04d}.json").get("ttl")  # it may beat less often than we would
        return now - self._seen[beat][1] >= max(self.ttl, own if isinstance(own, int | float) else 0)

    def _abandon(self, name: str, folder: Path, number: int, weights: str) -> None:
        reasons = [read_tree(path).get("reason", "") for path in sorted(folder.glob("end-*.json"))]
        outcome = {"checkpoint": name, "outcome": ABANDONED, "attempts": number, "reasons": reasons, "at": _now()}
        outcome["weights"] = weights
        create_once(folder / DONE, json.dumps(outcome, indent=1) + "\n")

    @staticmethod
    def _highest(folder: Path) -> int:
        found = (_LEASE.match(path.name) for path in folder.glob("lease-*.json"))
        return max((int(match[1]) for match in found if match), default=0)

    @staticmethod
    def _spent(folder: Path, weights: str) -> int:
        """Attempts at these weights that were not released."""
        released = {path.stem[4:] for path in folder.glob("end-*.json") if read_tree(path).get("how") == RELEASED}
        leases = (path for path in folder.glob("lease-*.json") if path.stem[6:] not in released)
        return sum(read_tree(path).get("weights", weights) == weights for path in leases)

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """The outcome of every checkpoint that has one, by name."""
        names = [path.parent.name for path in sorted(self.folder.glob(f"*/{DONE}"))]
        return {name: outcome for name in names if (outcome := self.outcome(name))}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")  # opening, not stat: NFS revalidates a file when it is opened
    except OSError:
        return ""


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def forget_after(run: Path, last: int) -> None:
    """Remove scores and outcomes of steps after `last`: the run was rolled back, and their names will be reused."""
    for folder in ("evaluation", f"{LEDGER_FOLDER}/*"):
        for path in run.glob(f"{folder}/{PREFIX}*"):
            if is_name(path.name) and path.is_dir() and step_of(path) > last:
                shutil.rmtree(path, ignore_errors=True)
