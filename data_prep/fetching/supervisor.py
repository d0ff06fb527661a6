"""One fetching session: starts and monitors the engine, restarts it when it hangs, pauses when success collapses.

While a worker works on a shard, it reports in a file in the staging folder (`ShardWriter`), on any machine.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from data_prep import reasons
from data_prep.dataset.commit import recover
from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.shard_files import withdraw
from data_prep.download_config import DownloadConfig
from data_prep.fetching.shard_writer import SUCCESS, Outcomes
from pipeline.config import to_tree
from pipeline.errors import UserError
from pipeline.files import LEFTOVERS, read_tree, write_json, write_text

_POLL_SECONDS = 0.25
_GRACE_SECONDS = 10.0
WINDOW = 1_000
"""URLs over which success is measured."""
RESTARTS = 3
"""In a row, without a finished shard, before the run pauses."""
STALL = 300.0
"""Seconds in which no URL is finished and no sample stored before the engine is restarted."""
_CLUSTER_SECONDS = 3600.0
"""Spark and Ray start a cluster first, or wait for their turn in that of others: a restart would lose their place."""
_ENGINE = "import sys; from data_prep.fetching.downloader import main; main(sys.argv[1])"
"""Not `-m`: then the pickled classes would be those of `__main__`, which workers on other machines do not have."""


def fetch(
    config: DownloadConfig,
    shards: tuple[int, ...],
    *,
    total: int,
    on_progress: Callable[[int, Outcomes], None] = lambda total, outcomes: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> None:
    """Fetch these shards, restarting the engine as often as necessary.

    Of shards that have a record, only the rows that failed for a transient reason are requested. `on_progress` is
    called a few times a second with `total`, the number of URLs to request, and the outcomes so far; `on_note` with one
    line for each restart.

    Raises:
        UserError: Success collapses, the engine no longer makes progress, or a shard to be written again is damaged.
            Finished shards are kept, and the same command continues.
    """
    folder = Folder(Path(config.output), config.fetch.worker)
    monitor, log, fruitless = Monitor(folder, shards), folder.staging / "engine.log", 0
    # A retry requests rows that failed before: low success does not indicate a collapse.
    window = SuccessWindow(0.0 if monitor.recorded else config.monitor.min_success)
    to_begin = STALL if config.fetch.distributor == "multiprocessing" else max(STALL, _CLUSTER_SECONDS)
    while monitor.waiting:
        finished = len(monitor.finished)
        with _engine(config, folder, shards=sorted(monitor.waiting), log=log) as engine:
            for problem in _watch(engine, monitor, to_begin=to_begin):
                on_progress(total, monitor.now)
                if window.has_collapsed(monitor.now) or problem:
                    break
        monitor.end()
        if window.collapse:  # what it may have hit is withdrawn, so that it is requested again
            suspect = [shard for shard, attempted in monitor.finished if attempted >= window.suspect_from]
            for shard in suspect:
                withdraw(folder, shard)
            raise UserError(
                f"Paused: {window.collapse}. Check the network, the name server and whether the hosts have banned this "
                f"address. {len(monitor.finished) - len(suspect):,} shards of this run are kept, {len(suspect):,} that "
                "it may have hit were withdrawn, and the same command continues. If the list is simply that old, lower "
                "monitor.min_success."
            )
        fruitless = 0 if len(monitor.finished) > finished else fruitless + 1
        if not monitor.waiting:
            break
        try:
            write_text(folder.staging / "probe", "x" * (1 << 20), durable=True).unlink()
        except OSError as error:
            raise UserError(
                f"Cannot write to {folder.root}: {error.strerror}. Free some space; then the same command continues."
            ) from error
        if fruitless > RESTARTS:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
            raise UserError(
                f"The engine was started {fruitless} times without finishing a shard; {len(monitor.waiting):,} "
                f"of {len(shards):,} are left. The last time {problem}. "
                f"The end of its log ({log}): {' | '.join(filter(None, map(str.strip, lines))) or 'nothing'}"
            )
        on_note(f"The engine is restarted: {problem}. What was not published is fetched again.")


@contextmanager
def _engine(
    config: DownloadConfig, folder: Folder, *, shards: list[int], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the engine in a process group of its own; at the end of the block, all of the group's processes stop."""
    job = write_json(folder.staging / "job.json", {"config": to_tree(config), "shards": shards})
    log.unlink(missing_ok=True)
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


def _watch(engine: subprocess.Popen[bytes], monitor: Monitor, *, to_begin: float) -> Iterator[str]:
    """Follow one engine, polling it before each item, which is empty, or says how the engine ended.

    It also ends when it makes no progress: for `STALL` seconds, or `to_begin` before its first shard.
    """
    moved, activity, limit = time.monotonic(), monitor.activity, to_begin
    while True:
        status = engine.poll()
        monitor.poll()
        if monitor.activity != activity or (monitor.live and limit != STALL):
            moved, activity, limit = time.monotonic(), monitor.activity, STALL
        if status is not None:
            yield f"it ended with exit status {status}"
        elif time.monotonic() - moved > limit:
            yield f"no progress for {limit:g} s"
        elif dead := monitor.dead_workers():
            yield f"worker process {dead[0]} died in the middle of a shard (out of memory?)"
        else:
            yield ""
        time.sleep(_POLL_SECONDS)


class Monitor:
    """Follows some shards until they are published."""

    def __init__(self, folder: Folder, shards: tuple[int, ...]) -> None:
        self._folder = folder
        self.waiting = set(shards)
        self.recorded = self.waiting.intersection(folder.finished())
        """Shards that are retried: that they have records does not show that they were published now."""
        # Published shards in order, with the number of URLs done at the time this was noticed.
        self.finished: list[tuple[int, int]] = []
        self.live: list[dict[str, Any]] = []
        """The reports of workers that are at work on a shard."""
        self._done = Outcomes()
        self._clear()

    def poll(self) -> None:
        """Read the reports; a UserError if a worker has refused a shard."""
        self.live, published = [], {}
        for path in self._folder.staging.glob("*.live"):
            state = read_tree(path)  # empty if it is gone meanwhile
            if refusal := state.get("refusal"):
                raise UserError(refusal)
            if state.get("is_published"):
                published[int(path.stem)] = Outcomes(state["outcomes"])
                path.unlink()
            elif state:
                self.live.append(state)
        self._add(published)

    def end(self) -> None:
        """Finish and count what an engine that has ended has committed, and remove what else it has left."""
        recover(self._folder, self.waiting)
        self.poll()
        self._clear()
        published = self.waiting.intersection(self._folder.finished()) - self.recorded  # without saying so
        records = map(self._folder.read_record, published)
        self._add({record.shard: Outcomes({SUCCESS: record.samples, **record.failures}) for record in records})

    def _add(self, published: Mapping[int, Outcomes]) -> None:
        new = self.waiting.intersection(published)
        self.waiting -= new
        self._done = sum((published[shard] for shard in new), self._done)
        self.finished += [(shard, self.now.total()) for shard in sorted(new)]

    def _clear(self) -> None:
        self.live = []
        for pattern in ("*.live", "*.spool", "*.arrow", "*_stats.json", LEFTOVERS):
            for path in self._folder.staging.glob(pattern):
                path.unlink(missing_ok=True)

    @property
    def now(self) -> Outcomes:
        """Of published shards and those in progress."""
        return sum((Outcomes(state["outcomes"]) for state in self.live), self._done)

    @property
    def activity(self) -> tuple[int, int]:
        """URLs done, and samples that are being stored: an engine in which neither changes makes no progress."""
        return self.now.total(), sum(state["stored"] for state in self.live)

    def dead_workers(self) -> list[int]:
        """Process ids on this machine that died while processing a shard."""
        here = socket.gethostname()
        return sorted({s["pid"] for s in self.live if s["host"] == here and not psutil.pid_exists(s["pid"])})


class SuccessWindow:
    """Detects that fewer than `min_success` of `WINDOW` URLs give a sample: no network, or we were banned."""

    def __init__(self, min_success: float) -> None:
        self._min_success = min_success
        self._start = Outcomes()
        self.suspect_from = 0
        """Shards that were finished after so many URLs may have been hit: one window before the present one."""
        self.collapse = ""
        """A sentence that describes it."""

    def has_collapsed(self, now: Outcomes) -> bool:
        """Judge the window, if it is full, and begin the next one."""
        latest, attempted = now - self._start, now.total() - self._start.total()
        if attempted < WINDOW:
            return False
        samples = latest.pop(SUCCESS, 0)
        if samples >= self._min_success * attempted:
            self.suspect_from, self._start = self._start.total(), now
            return False
        shares = ", ".join(f"{reason} {count / attempted:.0%}" for reason, count in latest.most_common(3))
        self.collapse = (
            f"of the last {attempted:,} URLs only {samples / attempted:.1%} gave a sample "
            f"(monitor.min_success = {self._min_success:g}); reasons: {shares}"
            + "".join(f" ({hint})" for reason, hint in reasons.HINTS.items() if shares.startswith(reason))
        )
        return True
