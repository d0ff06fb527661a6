"""Work of rank 0 at the start of a run for which the other ranks wait, such as the download of a checkpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from pipeline.distributed.heartbeat import EXIT_STALLED
from pipeline.distributed.world import World
from pipeline.errors import UserError

BEAT_SECONDS, LOST_AFTER = 2.0, 60.0
"""How often rank 0 says that it works, and after how many seconds without that it is lost."""
T = TypeVar("T")


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
        while not done.wait(BEAT_SECONDS):
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
        elif time.monotonic() - since > LOST_AFTER:
            raise LostRank(
                f"Rank 0 has ended or hangs while this rank, {world.rank}, waits for it at the start, for example "
                "for the download of a checkpoint: its own message, if there is one, says why."
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
