"""Notices within a minute that another rank has ended with an error or has died.

Each rank looks at all exit records, and at the heartbeats of the next two ranks. Whoever finds a rank dead ends with a
record of its own, which all others see at their next look: the number of files that are read grows with the number of
ranks, and not with its square.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.distributed.exit_record import ExitRecord, read_ends
from pipeline.distributed.signals import EXIT_PREEMPTED

HARMLESS = (0, 74, EXIT_PREEMPTED)
"""Exit codes at whose sight others go on: all ranks reach the same end by themselves."""
NEIGHBOURS = 2


@dataclass
class _Seen:
    """A neighbour's heartbeat as it was last seen to change."""

    text: str
    """Empty: it has written none since the start."""
    since: float


class PeerWatch:
    """Looks for lost ranks.

    Args:
        folder: RUN/heartbeats.
        rank: This rank.
        size: Number of ranks.
        lost_after: Seconds without a new heartbeat after which a rank is dead.
        start: Id of this start of the run. Heartbeats with another one are files that an earlier start has left.
    """

    def __init__(self, folder: Path, *, rank: int, size: int, lost_after: float, start: str) -> None:
        self._folder, self._rank, self._size, self._lost_after = folder, rank, size, lost_after
        self._start = start
        self._old = set(self._ends())
        self._suspects: set[ExitRecord] = set()
        self._seen: dict[int, _Seen] = {}
        self._looked = time.monotonic()

    def look(self, *, blind: bool = False) -> str:
        """Why the run cannot go on; empty while nothing is known.

        An exit record counts from its second look on: where all ranks raise the same error, each ends with its own.

        Args:
            blind: Heartbeats are not written now, for example because the disk is full: nobody is dead for that.
        """
        now = time.monotonic()
        paused, self._looked = blind or now - self._looked > self._lost_after / 2, now
        ends = set(self._ends()) - self._old
        confirmed, self._suspects = sorted(ends & self._suspects, key=lambda end: end.time), ends
        if confirmed:
            return describe_end(confirmed[0])
        neighbours = {(self._rank + step) % self._size for step in range(1, NEIGHBOURS + 1)} - {self._rank}
        for rank in sorted(neighbours):
            text = self._beat(rank)
            seen = self._seen.get(rank)
            if seen is None or (text and text != seen.text):
                self._seen[rank] = _Seen(text, now)
            elif paused or text != seen.text:  # this process was stopped itself, or the other one has ended by itself
                seen.since = now
            elif now - seen.since > self._lost_after:
                last = f"Its last one: {text.strip()}" if text else "It has written none since the start."
                return (
                    f"rank {rank} without a heartbeat for {now - seen.since:.0f} s: its process or its node is dead or "
                    f"frozen. {last}"
                )
        return ""

    def _ends(self) -> Sequence[ExitRecord]:
        found = read_ends(self._folder, below=self._size)
        return [end for end in found if end.code not in HARMLESS and end.rank != self._rank]

    def _beat(self, rank: int) -> str:
        try:
            text = (self._folder / f"rank-{rank:05d}.json").read_text(encoding="utf-8")
            return text if json.loads(text).get("start", "") == self._start else ""
        except (OSError, ValueError, AttributeError):
            return ""


def describe_end(end: ExitRecord) -> str:
    """Which rank ended, and why; of ranks that ended because of another one, the first cause."""
    if "rank " in end.reason and end.code == 76:
        return end.reason.partition(" Exit code ")[0]
    return f"rank {end.rank} ({end.host}, process {end.pid}) ended with {end.code}: {end.reason}"
