"""Monitors a running engine through its workers' files: progress, collapse of success, stalls, dead workers."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from data_prep import reasons
from data_prep.dataset.dataset_folder import Folder, ShardRecord
from data_prep.settings.download_config import MonitorConfig
from pipeline.errors import UserError
from pipeline.files import read_tree

WINDOW = 1_000
"""URLs over which success is measured."""
REFUSED = ".refused"
"""Of files in which workers say why they refuse a shard."""


@dataclass
class Counts:
    """Outcomes of the URLs so far."""

    samples: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def attempted(self) -> int:
        return self.samples + self.failures.total()

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.samples + other.samples, self.failures + other.failures)


class Monitor:
    """Reads records and live files on each `poll`; `done` counts finished shards, `now` adds those in progress.

    A shard that already has a record (in a retry or a rebuild) is finished when its record has changed.
    """

    def __init__(self, folder: Folder, shards: tuple[int, ...]) -> None:
        self._folder = folder
        self._before = {shard: _stamp(folder, shard) for shard in shards}
        self._old: dict[int, ShardRecord] = {}
        for shard, stamp in self._before.items():
            with contextlib.suppress(UserError):  # damaged: about to be replaced
                if stamp:
                    self._old[shard] = folder.read_record(shard)
        self.waiting = set(shards)
        # Finished shards in order, with the number of URLs done at the time this was noticed.
        self.finished: list[tuple[int, int]] = []
        self.done = Counts()
        self.now = Counts()
        self._live: dict[int, dict[str, Any]] = {}

    def poll(self) -> None:
        # Live files first: a worker removes its own only once the record exists, so that no shard is missed.
        # It may be finished or replaced in the meantime, and is empty then.
        live = {int(path.stem): state for path in self._folder.staging.glob("*.live") if (state := read_tree(path))}
        new = []
        for shard in self._folder.finished():
            changed = shard in self.waiting and _stamp(self._folder, shard) not in (0, self._before[shard])
            if changed and (outcome := self._outcome(shard)) is not None:
                self.done += outcome
                new.append(shard)
        self.waiting.difference_update(new)
        self._live = live
        self.now = self.done
        for shard, state in live.items():
            if shard in self.waiting:
                self.now = self.now + Counts(state["samples"], Counter(state["failures"]))
        self.finished.extend((shard, self.now.attempted) for shard in new)

    def _outcome(self, shard: int) -> Counts | None:
        """The outcome of this session's requests for a shard: in a retry, the difference to the older record.

        None when the record has disappeared.
        """
        try:
            record = self._folder.read_record(shard)
        except FileNotFoundError:
            return None
        failures = Counter(record.failures)
        if shard not in self._old:
            return Counts(record.samples, failures)
        lasting = Counter({r: n for r, n in self._old[shard].failures.items() if not reasons.is_transient(r)})
        return Counts(max(0, record.samples - self._old[shard].samples), failures - lasting)

    @property
    def activity(self) -> tuple[int, int]:
        """URLs done, and samples that are being stored: an engine in which neither changes makes no progress."""
        return self.now.attempted, sum(state.get("stored", 0) for state in self._live.values())

    @property
    def is_working(self) -> bool:
        """Whether a worker has begun a shard."""
        return bool(self._live)

    def dead_workers(self) -> list[int]:
        """Process ids on this machine that died while processing a shard."""
        here = socket.gethostname()
        return sorted({s["pid"] for s in self._live.values() if s["host"] == here and not _is_alive(s["pid"])})


class SuccessWindow:
    """Detects that the latest URLs hardly ever give a sample: DNS or the network is down, or we were banned."""

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config
        self._history: deque[Counts] = deque([Counts()])
        # Shards that were finished after this many URLs may have been hit: one window before the bad one began.
        self.suspect_from = 0

    def collapse(self, now: Counts) -> str | None:
        """A sentence that describes the collapse, or None."""
        if now.attempted > self._history[-1].attempted:
            self._history.append(now)
        window = WINDOW
        start = self._before(now.attempted - window)
        self.suspect_from = self._before(start.attempted - window).attempted
        while len(self._history) > 2 and self._history[1].attempted <= self.suspect_from:
            self._history.popleft()
        attempted, samples = now.attempted - start.attempted, now.samples - start.samples
        if attempted < window or samples >= self._config.min_success * attempted:
            return None
        reasons_seen = (now.failures - start.failures).most_common(3)
        shares = ", ".join(f"{reason} {count / attempted:.0%}" for reason, count in reasons_seen)
        return (
            f"of the last {attempted:,} URLs only {samples / attempted:.1%} gave a sample "
            f"(monitor.min_success = {self._config.min_success:g}); reasons: {shares}"
            + (f" ({reasons.ALLOW_HINT})" if reasons_seen[0][0] == reasons.REFUSED_ADDRESS else "")
        )

    def _before(self, attempted: int) -> Counts:
        """The latest snapshot with at most that many URLs, or the first one."""
        return next((counts for counts in reversed(self._history) if counts.attempted <= attempted), self._history[0])


def _stamp(folder: Folder, shard: int) -> int:
    """When the shard's record was written, in nanoseconds; 0 if there is none."""
    try:
        return folder.record(shard).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
