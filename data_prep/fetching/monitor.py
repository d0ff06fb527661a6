"""Monitors a running engine through what its workers report: progress, published shards, collapse of success.

While a worker works on a shard, it reports in a file in the staging folder (`ShardWriter`), on any machine.
"""

from __future__ import annotations

import os
import socket
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from data_prep import reasons
from data_prep.dataset.commit import recover
from data_prep.dataset.dataset_folder import Folder
from data_prep.settings.download_config import MonitorConfig
from pipeline.errors import UserError
from pipeline.files import LEFTOVERS, read_tree

WINDOW = 1_000
"""URLs over which success is measured."""
SUCCESS = "success"
Outcomes = Counter[str]
"""Numbers of URLs: of samples under `SUCCESS`, of failures under their reasons."""


class Monitor:
    """Follows some shards until they are published."""

    def __init__(self, folder: Folder, shards: tuple[int, ...]) -> None:
        self._folder = folder
        self.waiting = set(shards)
        # Published shards in order, with the number of URLs done at the time this was noticed.
        self.finished: list[tuple[int, int]] = []
        self._done = Outcomes()
        self._live: list[dict[str, Any]] = []
        self._clear()

    def poll(self) -> None:
        """Read the reports.

        Raises:
            UserError: A worker has refused a shard.
        """
        self._live, published = [], {}
        for path in self._folder.staging.glob("*.live"):
            state = read_tree(path)  # empty if it is gone meanwhile
            if refusal := state.get("refusal"):
                raise UserError(refusal)
            if state.get("is_published"):
                published[int(path.stem)] = Outcomes(state["outcomes"])
                path.unlink()
            elif state:
                self._live.append(state)
        self._add(published)

    def end(self, *, had_records: bool) -> None:
        """Finish and count what an engine that has ended has committed, and remove what else it has left.

        Args:
            had_records: Whether the shards had records before, which do not show that they were published now.
        """
        recover(self._folder, self.waiting)
        self.poll()
        self._clear()
        published = () if had_records else self.waiting.intersection(self._folder.finished())  # without saying so
        records = map(self._folder.read_record, published)
        self._add({record.shard: Outcomes({SUCCESS: record.samples, **record.failures}) for record in records})

    def _add(self, published: Mapping[int, Outcomes]) -> None:
        new = self.waiting.intersection(published)
        self.waiting -= new
        self._done = sum((published[shard] for shard in new), self._done)
        self.finished += [(shard, self.now.total()) for shard in sorted(new)]

    def _clear(self) -> None:
        self._live = []
        for pattern in ("*.live", "*.spool", "*.arrow", "*_stats.json", LEFTOVERS):
            for path in self._folder.staging.glob(pattern):
                path.unlink(missing_ok=True)

    @property
    def now(self) -> Outcomes:
        """Of published shards and those in progress."""
        return sum((Outcomes(state["outcomes"]) for state in self._live), self._done)

    @property
    def activity(self) -> tuple[int, int]:
        """URLs done, and samples that are being stored: an engine in which neither changes makes no progress."""
        return self.now.total(), sum(state["stored"] for state in self._live)

    @property
    def is_working(self) -> bool:
        """Whether a worker is at work on a shard."""
        return bool(self._live)

    def dead_workers(self) -> list[int]:
        """Process ids on this machine that died while processing a shard."""
        here = socket.gethostname()
        return sorted({s["pid"] for s in self._live if s["host"] == here and not _is_alive(s["pid"])})


class SuccessWindow:
    """Detects that the latest URLs hardly ever give a sample: DNS or the network is down, or we were banned."""

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config
        self._history = deque([Outcomes()])
        # Shards that were finished after this many URLs may have been hit: one window before the bad one began.
        self.suspect_from = 0

    def collapse(self, now: Outcomes) -> str:
        """A sentence that describes the collapse; empty if there is none."""
        if now.total() > self._history[-1].total():
            self._history.append(now)
        start = self._before(now.total() - WINDOW)
        self.suspect_from = self._before(start.total() - WINDOW).total()
        while len(self._history) > 2 and self._history[1].total() <= self.suspect_from:
            self._history.popleft()
        latest = now - start
        attempted, samples = latest.total(), latest.pop(SUCCESS, 0)
        if attempted < WINDOW or samples >= self._config.min_success * attempted:
            return ""
        shares = ", ".join(f"{reason} {count / attempted:.0%}" for reason, count in latest.most_common(3))
        return (
            f"of the last {attempted:,} URLs only {samples / attempted:.1%} gave a sample "
            f"(monitor.min_success = {self._config.min_success:g}); reasons: {shares}"
            + (f" ({reasons.ALLOW_HINT})" if shares.startswith(reasons.REFUSED_ADDRESS) else "")
        )

    def _before(self, attempted: int) -> Outcomes:
        """The latest snapshot with at most that many URLs, or the first one."""
        return next((each for each in reversed(self._history) if each.total() <= attempted), self._history[0])


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
