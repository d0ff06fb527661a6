"""Which watcher evaluates which checkpoint: attempts and their ends are files that are created once and never changed.

The ledger uses files and not a database, because watchers on several machines share only a file system. SQLite's locks
are unreliable on NFS, and its write-ahead log needs shared memory. On every file system, however, `link` creates a name
only once. So each fact is one small file with its own name, written under a temporary name first:

    LEDGER/step-00000500/
        lease-0001.json    an attempt: who, where, since when, at which weights
        lease-0001.beat    rewritten by the lease's owner only, to show that it is alive
        end-0001.json      how the attempt ended: done, failed or released

The lease with the highest number is valid, unless it has ended or its owner is dead: then exactly one watcher can take
the next number. An owner is considered dead when its beat has not changed for `ttl` seconds, the longer of its own and
the observer's, of the *observer's* clock; clocks of different machines are never compared. An owner that was only
suspended writes the same results again, byte for byte.

The ledger is for scheduling only; the results themselves are authoritative. A checkpoint that is done but has no
results is evaluated again.
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
DONE, FAILED, RELEASED = "done", "failed", "released"
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

    def end(self, how: str, **facts: Any) -> bool:
        """Record how the attempt ended; one that was `RELEASED` does not count.

        Returns:
            Whether the lease was still valid; else another watcher considered this one dead, and took the next.
        """
        self._end_heartbeat()
        record = {"how": how, **facts, **self.owner}
        create_once(self.folder / f"end-{self.number:04d}.json", json.dumps(record, indent=1) + "\n")
        return self.number == _highest(self.folder)

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
    """The attempts below `folder`, as one watcher sees them.

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
        """How the last attempt at a checkpoint ended; empty if there was none, or it has not ended."""
        return _end(self.folder / name, _highest(self.folder / name))

    def is_abandoned(self, name: str, *, weights: str = "") -> bool:
        """Whether `ATTEMPTS` at these weights are over and none gave a result."""
        folder = self.folder / name
        return _spent(folder, weights) >= ATTEMPTS and self._is_over(folder)

    def claim(self, name: str, *, weights: str = "", again: bool = False) -> Lease | None:
        """A lease on a checkpoint; None when it is held by a live watcher, abandoned, or taken by another one first.

        Args:
            name: The checkpoint.
            weights: What tells it from another checkpoint of the same name; attempts at others are not counted.
            again: Also if it is done.
        """
        folder = self.folder / name
        number = _highest(folder)
        if not self._is_over(folder) or (_end(folder, number).get("how") == DONE and not again):
            return None
        if _spent(folder, weights) >= ATTEMPTS:
            return None
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "token": uuid.uuid4().hex,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "weights": weights,
            "ttl": self.ttl,
        }
        if not create_once(folder / f"lease-{number + 1:04d}.json", json.dumps(owner, indent=1) + "\n"):
            return None
        return Lease(folder, number + 1, owner, interval=self.ttl / 6).start()

    def in_doubt(self, name: str) -> bool:
        """Whether the owner of this checkpoint has neither been seen alive nor been silent for `ttl` seconds yet."""
        folder = self.folder / name
        if self._is_over(folder):
            return False
        beat = folder / f"lease-{_highest(folder):04d}.beat"
        return self._first[beat] == _read(beat)

    def _is_over(self, folder: Path) -> bool:
        """Whether nobody works on a checkpoint."""
        number = _highest(folder)
        if not number or (folder / f"end-{number:04d}.json").exists():
            return True
        beat = folder / f"lease-{number:04d}.beat"
        value, now = _read(beat), self._clock()
        self._first.setdefault(beat, value)
        if beat not in self._seen or self._seen[beat][0] != value:
            self._seen[beat] = (value, now)
        own = read_tree(folder / f"lease-{number:04d}.json").get("ttl")  # it may beat less often than we would
        return now - self._seen[beat][1] >= max(self.ttl, own if isinstance(own, int | float) else 0)


def _numbers(folder: Path) -> list[int]:
    names = (_LEASE.match(path.name) for path in folder.glob("lease-*.json"))
    return [int(match[1]) for match in names if match]


def _highest(folder: Path) -> int:
    return max(_numbers(folder), default=0)


def _end(folder: Path, number: int) -> dict[str, Any]:
    return read_tree(folder / f"end-{number:04d}.json")


def _spent(folder: Path, weights: str) -> int:
    """Attempts at these weights that failed, or have not ended."""
    tried = (number for number in _numbers(folder) if _end(folder, number).get("how", FAILED) == FAILED)
    return sum(read_tree(folder / f"lease-{n:04d}.json").get("weights", weights) == weights for n in tried)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")  # opening, not stat: NFS revalidates a file when it is opened
    except OSError:
        return ""


def forget_after(run: Path, last: int) -> None:
    """Remove scores and outcomes of steps after `last`: the run was rolled back, and their names will be reused."""
    for folder in ("evaluation", f"{LEDGER_FOLDER}/*"):
        for path in run.glob(f"{folder}/{PREFIX}*"):
            if is_name(path.name) and path.is_dir() and step_of(path) > last:
                shutil.rmtree(path, ignore_errors=True)
