"""One fetching session: starts and monitors the engine, restarts it when it hangs, pauses when success collapses."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from data_prep.dataset.commit import recover
from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.shard_files import withdraw
from data_prep.fetching.monitor import REFUSED, Counts, Monitor, SuccessWindow
from data_prep.settings.download_config import DownloadConfig
from pipeline.config import to_tree
from pipeline.errors import UserError
from pipeline.files import LEFTOVERS

_POLL_SECONDS = 0.25
# A poll lists the records of all shards, hundreds of thousands in large sets, and may take at most
# 1 / _POLL_SHARE of the time.
_POLL_SHARE = 20
_GRACE_SECONDS = 10.0
_PROBE_BYTES = 1 << 20
RESTARTS = 3
"""In a row, without a finished shard, before the run pauses."""
STALL = 300.0
"""Seconds in which no URL is finished and no sample stored before the engine is restarted."""
_CLUSTER_SECONDS = 3600.0
"""Spark and Ray start a cluster first, or wait for their turn in that of others: a restart would lose their place."""
_ENGINE = "import sys; from data_prep.fetching.downloader import main; main(sys.argv[1], int(sys.argv[2]))"
"""Not `-m`: then the pickled classes would be those of `__main__`, which workers on other machines do not have."""


@dataclass(frozen=True)
class Progress:
    """Progress of a session."""

    total: int
    """URLs of the session."""
    counts: Counts
    """Outcomes of the URLs done so far."""
    seconds: float


class Paused(UserError):
    """Fetching has paused itself; finished shards are kept, and the same command resumes."""


def fetch(
    config: DownloadConfig,
    shards: tuple[int, ...],
    *,
    total: int,
    mode: str = "fetch",
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> None:
    """Fetch these shards, restarting the engine as often as necessary.

    Args:
        config: All settings.
        shards: The numbers of the shards.
        total: Number of URLs to request, for progress.
        mode: See `downloader.Mode`.
        on_progress: Called a few times a second.
        on_note: Called with one line for each restart.

    Raises:
        Paused: Success collapses, or the engine no longer makes progress.
        UserError: A shard that is to be written again is damaged.
    """
    folder = Folder(Path(config.output), config.fetch.worker)
    discard_unfinished(folder, shards)
    # A retry requests rows that failed before: low success does not indicate a collapse.
    limits = config.monitor if mode == "fetch" else dataclasses.replace(config.monitor, min_success=0.0)
    to_begin = STALL if config.fetch.distributor == "multiprocessing" else max(STALL, _CLUSTER_SECONDS)
    monitor, window = Monitor(folder, shards), SuccessWindow(limits)
    started, fruitless = time.monotonic(), 0

    def show() -> None:
        on_progress(Progress(total, monitor.now, time.monotonic() - started))

    while monitor.waiting:
        finished = len(monitor.finished)
        with FetchEngine(config, tuple(sorted(monitor.waiting)), mode=mode) as engine:
            problem = _watch(engine, monitor, window, to_begin=to_begin, show=show)
        discard_unfinished(folder, shards)
        monitor.poll()
        fruitless = 0 if len(monitor.finished) > finished else fruitless + 1
        if not monitor.waiting:
            break
        _check_disk(folder)
        if fruitless > RESTARTS:
            raise Paused(
                f"The engine was started {fruitless} times without finishing a shard; {len(monitor.waiting):,} "
                f"of {len(shards):,} are left. The last time {problem}. "
                f"The end of its log ({engine.log}): {engine.log_tail()}"
            )
        on_note(f"The engine is restarted: {problem}. What was not published is fetched again.")


def _watch(
    engine: FetchEngine,
    monitor: Monitor,
    window: SuccessWindow,
    *,
    to_begin: float,
    show: Callable[[], None],
) -> str:
    """Follow one engine until it ends, or makes no progress: for `STALL` seconds, or `to_begin` before its first shard.

    Returns:
        How it ended.

    Raises:
        Paused: Success collapsed.
        UserError: A worker has refused a shard.
    """
    moved, activity, limit = time.monotonic(), monitor.activity, to_begin
    while True:
        ended, began = engine.poll(), time.monotonic()
        monitor.poll()
        took = time.monotonic() - began
        show()
        for refusal in engine.folder.staging.glob(f"*{REFUSED}"):
            raise UserError(refusal.read_text(encoding="utf-8"))
        if ended is not None:
            return f"it ended with exit status {ended}"
        reason = window.collapse(monitor.now)
        if reason:
            engine.stop()
            raise Paused(_pause(engine, monitor, reason, suspect_from=window.suspect_from))
        if monitor.activity != activity or (monitor.is_working and limit != STALL):
            moved, activity, limit = time.monotonic(), monitor.activity, STALL
        if time.monotonic() - moved > limit:
            return f"no progress for {limit:g} s"
        dead = monitor.dead_workers()
        if dead:
            return f"worker process {dead[0]} died in the middle of a shard (out of memory?)"
        time.sleep(max(_POLL_SECONDS, took * _POLL_SHARE))


def _check_disk(folder: Folder) -> None:
    """Check whether the engine ended because the disk cannot be written to.

    Raises:
        Paused: It cannot.
    """
    path = folder.staging / "probe"
    try:
        with path.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise Paused(
            f"Cannot write to {folder.root}: {error.strerror}. Free some space; then the same command continues."
        ) from error
    finally:
        path.unlink(missing_ok=True)


def _pause(engine: FetchEngine, monitor: Monitor, reason: str, *, suspect_from: int) -> str:
    """Withdraw the shards that the collapse may have affected, so that their URLs are requested again.

    Returns:
        The message for the user.
    """
    folder = engine.folder
    recover(folder, monitor.waiting)
    monitor.poll()
    suspect = [shard for shard, attempted in monitor.finished if attempted >= suspect_from]
    for shard in suspect:
        withdraw(folder, shard)
    discard_unfinished(folder, monitor.waiting)
    return (
        f"Paused: {reason}. Check the network, the name server and whether the hosts have banned this address. "
        f"{len(monitor.finished) - len(suspect):,} shards of this run are kept, {len(suspect):,} that it may "
        "have hit were withdrawn, and the same command continues. If the list is simply that old, lower "
        "monitor.min_success."
    )


class FetchEngine:
    """The engine process and its process group; leaving the block stops all of its processes."""

    def __init__(self, config: DownloadConfig, shards: tuple[int, ...], *, mode: str) -> None:
        self.folder = Folder(Path(config.output), config.fetch.worker)
        self.log = self.folder.staging / "engine.log"
        job = self.folder.staging / "job.json"
        job.write_text(json.dumps({"config": to_tree(config), "shards": shards, "mode": mode}), encoding="utf-8")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _ENGINE, str(job), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        """Ask the process group to stop, then kill it."""
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

    def log_tail(self, lines: int = 5) -> str:
        """The end of what the engine printed."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return " | ".join(line.strip() for line in text.splitlines()[-lines:] if line.strip()) or "nothing"

    def __enter__(self) -> FetchEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def discard_unfinished(folder: Folder, shards: Collection[int]) -> None:
    """Finish what a dead engine has committed, and remove what it has left unfinished."""
    recover(folder, shards)
    for pattern in ("*.live", "*.spool", "*.arrow", "*_stats.json", f"*{REFUSED}", LEFTOVERS):
        for path in folder.staging.glob(pattern):
            path.unlink(missing_ok=True)
