"""One fetching session: starts and monitors the engine, restarts it when it hangs, pauses when success collapses."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.shard_files import withdraw
from data_prep.fetching.monitor import Monitor, Outcomes, SuccessWindow
from data_prep.settings.download_config import DownloadConfig
from pipeline.config import to_tree
from pipeline.errors import UserError
from pipeline.files import write_text

_POLL_SECONDS = 0.25
_GRACE_SECONDS = 10.0
_PROBE_BYTES = 1 << 20
RESTARTS = 3
"""In a row, without a finished shard, before the run pauses."""
STALL = 300.0
"""Seconds in which no URL is finished and no sample stored before the engine is restarted."""
_CLUSTER_SECONDS = 3600.0
"""Spark and Ray start a cluster first, or wait for their turn in that of others: a restart would lose their place."""
_ENGINE = "import sys; from data_prep.fetching.downloader import main; main(sys.argv[1])"
"""Not `-m`: then the pickled classes would be those of `__main__`, which workers on other machines do not have."""


@dataclass(frozen=True)
class Progress:
    """Progress of a session."""

    total: int
    """URLs of the session."""
    outcomes: Outcomes
    """Of the URLs done so far."""
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
    folder, is_retry = Folder(Path(config.output), config.fetch.worker), mode == "retry"
    # A retry requests rows that failed before: low success does not indicate a collapse.
    limits = dataclasses.replace(config.monitor, min_success=0.0) if is_retry else config.monitor
    to_begin = STALL if config.fetch.distributor == "multiprocessing" else max(STALL, _CLUSTER_SECONDS)
    monitor, window = Monitor(folder, shards), SuccessWindow(limits)
    started, fruitless = time.monotonic(), 0

    def show() -> None:
        on_progress(Progress(total, monitor.now, time.monotonic() - started))

    while monitor.waiting:
        finished, log = len(monitor.finished), folder.staging / "engine.log"
        with _engine(config, folder, shards=sorted(monitor.waiting), mode=mode, log=log) as engine:
            problem, collapse = _watch(engine, monitor, window, to_begin=to_begin, show=show)
        monitor.end(had_records=is_retry)
        if collapse:
            raise Paused(_withdraw(folder, monitor, collapse, suspect_from=window.suspect_from))
        fruitless = 0 if len(monitor.finished) > finished else fruitless + 1
        if not monitor.waiting:
            break
        _check_disk(folder)
        if fruitless > RESTARTS:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
            raise Paused(
                f"The engine was started {fruitless} times without finishing a shard; {len(monitor.waiting):,} "
                f"of {len(shards):,} are left. The last time {problem}. "
                f"The end of its log ({log}): {' | '.join(filter(None, map(str.strip, lines))) or 'nothing'}"
            )
        on_note(f"The engine is restarted: {problem}. What was not published is fetched again.")


def _watch(
    engine: subprocess.Popen[bytes],
    monitor: Monitor,
    window: SuccessWindow,
    *,
    to_begin: float,
    show: Callable[[], None],
) -> tuple[str, str]:
    """Follow one engine until it ends, or makes no progress: for `STALL` seconds, or `to_begin` before its first shard.

    Returns:
        How it ended, and how success has collapsed; one of them is empty.

    Raises:
        UserError: A worker has refused a shard.
    """
    moved, activity, limit = time.monotonic(), monitor.activity, to_begin
    while True:
        ended = engine.poll()
        monitor.poll()
        show()
        if ended is not None:
            return f"it ended with exit status {ended}", ""
        if collapse := window.collapse(monitor.now):
            return "", collapse
        if monitor.activity != activity or (monitor.is_working and limit != STALL):
            moved, activity, limit = time.monotonic(), monitor.activity, STALL
        if time.monotonic() - moved > limit:
            return f"no progress for {limit:g} s", ""
        if dead := monitor.dead_workers():
            return f"worker process {dead[0]} died in the middle of a shard (out of memory?)", ""
        time.sleep(_POLL_SECONDS)


def _check_disk(folder: Folder) -> None:
    """Check whether the engine ended because the disk cannot be written to.

    Raises:
        Paused: It cannot.
    """
    path = folder.staging / "probe"
    try:
        write_text(path, "x" * _PROBE_BYTES, durable=True).unlink()
    except OSError as error:
        raise Paused(
            f"Cannot write to {folder.root}: {error.strerror}. Free some space; then the same command continues."
        ) from error


def _withdraw(folder: Folder, monitor: Monitor, collapse: str, *, suspect_from: int) -> str:
    """Withdraw the shards that a collapse may have affected, so that their URLs are requested again.

    Returns:
        The message for the user.
    """
    suspect = [shard for shard, attempted in monitor.finished if attempted >= suspect_from]
    for shard in suspect:
        withdraw(folder, shard)
    return (
        f"Paused: {collapse}. Check the network, the name server and whether the hosts have banned this address. "
        f"{len(monitor.finished) - len(suspect):,} shards of this run are kept, {len(suspect):,} that it may "
        "have hit were withdrawn, and the same command continues. If the list is simply that old, lower "
        "monitor.min_success."
    )


@contextmanager
def _engine(
    config: DownloadConfig, folder: Folder, *, shards: list[int], mode: str, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the engine in a process group of its own; at the end of the block, all of the group's processes stop."""
    job = write_text(
        folder.staging / "job.json", json.dumps({"config": to_tree(config), "shards": shards, "mode": mode})
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _ENGINE, str(job)],
            stdin=subprocess.PIPE,  # closed when this process is gone, however it ends
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with process:
        try:
            yield process
        finally:
            for how, patience in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, None)):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, how)
                    process.wait(patience)
