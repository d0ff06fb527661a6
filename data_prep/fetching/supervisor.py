"""One session of fetching: starts the engine, watches it, pauses it on collapse, starts it anew when it hangs."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from data_prep.dataset.dataset_folder import Folder
from data_prep.fetching.monitor import Counts, Monitor, SuccessWindow
from data_prep.settings.download_config import DownloadConfig
from pipeline.config import to_tree
from pipeline.errors import UserError

_POLL_SECONDS = 0.25
# A look lists the records of all shards, hundreds of thousands in large sets: at most one part in so many of the time.
_POLL_SHARE = 20
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Progress:
    """What a session tells while it runs: its number of URLs, what became of those that are done, and the time."""

    total: int
    counts: Counts
    seconds: float


class Paused(UserError):
    """Fetching stopped itself; what was finished stays, and the same command continues."""


def fetch(
    config: DownloadConfig,
    shards: tuple[int, ...],
    *,
    total: int,
    retry: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Fetch these shards, starting the engine as often as it takes.

    Args: total: URLs in them, for the progress. retry: ask only for rows that failed for a passing reason.
    Raises: Paused when success collapses, or the engine makes no progress any more.
    """
    folder = Folder(Path(config.output), config.fetch.worker)
    _clean(folder)
    # What is asked again has failed before: a low success is expected there.
    limits = dataclasses.replace(config.monitor, min_success=0.0) if retry else config.monitor
    monitor, window = Monitor(folder, shards), SuccessWindow(limits)
    started, fruitless = time.monotonic(), 0

    def tell() -> None:
        on_progress(Progress(total, monitor.now, time.monotonic() - started))

    while monitor.waiting:
        finished = len(monitor.finished)
        with FetchEngine(config, tuple(sorted(monitor.waiting)), retry=retry) as engine:
            problem = _watch(engine, monitor, window, stall=limits.stall, tell=tell)
        _clean(folder)
        fruitless = fruitless + 1 if len(monitor.finished) == finished else 0
        if monitor.waiting and fruitless > limits.restarts:
            raise Paused(
                f"The engine was started {fruitless} times without finishing a shard; {len(monitor.waiting):,} "
                f"of {len(shards):,} are left. The last time {problem}. "
                f"Its last words ({engine.log}): {engine.last_words()}"
            )


def _watch(
    engine: FetchEngine, monitor: Monitor, window: SuccessWindow, *, stall: float, tell: Callable[[], None]
) -> str:
    """Follow one engine to its end. Returns: how it ended. Raises: Paused on collapse."""
    moved, attempted = time.monotonic(), -1
    while True:
        ended, began = engine.poll(), time.monotonic()
        monitor.poll()
        took = time.monotonic() - began
        tell()
        if ended is not None:
            return f"it ended with exit status {ended}"
        reason = window.collapse(monitor.now)
        if reason:
            engine.stop()
            raise Paused(_pause(engine, monitor, reason, suspect_from=window.suspect_from))
        if monitor.now.attempted != attempted:
            moved, attempted = time.monotonic(), monitor.now.attempted
        if time.monotonic() - moved > stall:
            return f"nothing moved for {stall:g} s"
        dead = monitor.dead_workers()
        if dead:
            return f"worker process {dead[0]} died in the middle of a shard (out of memory?)"
        time.sleep(max(_POLL_SECONDS, took * _POLL_SHARE))


def _pause(engine: FetchEngine, monitor: Monitor, reason: str, *, suspect_from: int) -> str:
    """Take back the shards that the collapse may have hit, so that their URLs are asked again. Returns: the message."""
    monitor.poll()
    folder = engine.folder
    spoilt = [shard for shard, attempted in monitor.finished if attempted >= suspect_from]
    for shard in spoilt:
        folder.withdraw(shard)
    _clean(folder)
    return (
        f"Paused: {reason}. Check the network, the name server and whether the hosts have banned this address. "
        f"{len(monitor.finished) - len(spoilt):,} shards of this run are kept, {len(spoilt):,} that it may "
        "have hit were taken back, and the same command continues. If the list is simply that old, lower "
        "monitor.min_success."
    )


class FetchEngine:
    """The engine process and its whole process group; leaving the block ends whatever is still running."""

    def __init__(self, config: DownloadConfig, shards: tuple[int, ...], *, retry: bool) -> None:
        self.folder = Folder(Path(config.output), config.fetch.worker)
        self.log = self.folder.staging / "engine.log"
        job = self.folder.staging / "job.json"
        job.write_text(json.dumps({"config": to_tree(config), "shards": shards, "retry": retry}), encoding="utf-8")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "data_prep.fetching.fetch_process", str(job)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        """Ask the group to end, then end it."""
        for how, patience in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, None)):
            try:
                os.killpg(self._process.pid, how)
            except ProcessLookupError:
                break
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()

    def last_words(self, lines: int = 5) -> str:
        """The end of what the engine printed."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return " | ".join(line.strip() for line in text.splitlines()[-lines:] if line.strip()) or "nothing"

    def __enter__(self) -> FetchEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _clean(folder: Folder) -> None:
    """Remove what an engine that is gone has left behind unfinished."""
    for pattern in ("*.live", ".*.tmp", "*.spool", "*.arrow", "*_stats.json"):
        for path in folder.staging.glob(pattern):
            path.unlink(missing_ok=True)
