"""The loader's worker processes: what they need from the machine, and what they are doing when no batch comes.

Their fork server starts in `build_loader`, so that its imports overlap with building the model. A worker that is stuck
cannot answer, so its state is read from /proc.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import NoReturn

from pipeline.data.data_config import DataConfig
from pipeline.data.loading.worker import Tokenize, allow_open_files
from pipeline.distributed.exit_record import EXIT_STALLED, record_exit
from pipeline.distributed.signals import EXIT_PREEMPTED
from pipeline.distributed.workers import preload, start_forkserver
from pipeline.errors import UserError

WORKER_IMPORTS = "pipeline.data.loading.preload"
"""What the fork server imports once, for all workers."""


def prepare_workers(config: DataConfig, *, tokenize: Tokenize, streams: int) -> None:
    """Check that the loader's workers can run on this machine, and start the process that forks them.

    Args:
        config: The `data` section.
        tokenize: Captions -> tokens; the workers receive a pickled copy.
        streams: Streams of this rank.

    Raises:
        UserError: `tokenize` cannot be pickled, or too few files may be open.
    """
    _check_picklable(tokenize)
    _check_open_files(config, streams=streams)
    preload(WORKER_IMPORTS)
    start_forkserver()


def _check_picklable(tokenize: Tokenize) -> None:
    try:
        pickle.dumps(tokenize)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"The tokenizer {tokenize!r} cannot be sent to worker processes ({error}): use data.workers=0, or a "
            "tokenizer that is an object of a module-level class."
        ) from error


def _check_open_files(config: DataConfig, *, streams: int) -> None:
    """Refuse too low a limit of open files: streams keep shards open, and workers have pipes and semaphores."""
    workers = config.workers or 1
    needed = 64 + 16 * workers + -(-streams // workers)
    limit = allow_open_files()
    if limit < needed:
        raise UserError(
            f"This process may have {limit} files open (ulimit -n), but {workers} loading workers with "
            f"{streams} streams need about {needed}: raise the limit (ulimit -n 65536; in a container --ulimit "
            "nofile=65536), or lower data.workers or data.streams."
        )


PATIENCE_SECONDS = 2.0
"""After a stop signal, a batch that does not come within this time is given up: nothing is lost by that."""
LEAVE_SECONDS = 20.0
"""After that, a wait that cannot be ended, such as for a file server in this process, ends the process."""
STOPPED = "Stopped by a signal, in a wait for a batch that could not be ended: start again with --resume latest."
PROC = Path("/proc")
STATES = {
    "R": "is computing",
    "S": "is waiting",
    "D": "waits for storage or the network (uninterruptible)",
    "T": "is stopped (SIGSTOP; SIGCONT continues it)",
    "t": "is stopped by a debugger",
    "Z": "has died",
    "X": "has died",
}


class NoBatch(Exception):
    """The run is to stop, and no batch has come."""


@dataclass
class StallWatch:
    """Watches each wait for a batch: a wait that takes too long ends this process with exit code 76.

    A thread watches, because the wait may be in the kernel, where torch's own limit does not end it.
    """

    seconds: float
    """Limit of one wait."""
    describe: Callable[[], str]
    """Returns what is printed, and kills what would outlive this process."""
    _: KW_ONLY
    stopped: Callable[[], bool] = lambda: False
    """Whether the run is to stop. It is asked in the thread."""
    give_up: Callable[[], None] = lambda: None
    """Called once in the thread when the run is to stop and a wait goes on: it lets the wait fail. If it goes on all
    the same, and the main thread waits, the process ends with exit code 75."""
    given_up: bool = False
    """`give_up` was called: no batch will come any more."""
    _since: float | None = None
    _by_main: bool = False
    _closed: threading.Event | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for a batch."""
        if self._closed is None:
            self._closed = threading.Event()
            threading.Thread(target=self._watch, args=(self._closed,), name="stalls", daemon=True).start()
        self._since, self._by_main = time.monotonic(), threading.current_thread() is threading.main_thread()
        try:
            yield
        finally:
            self._since = None

    def close(self) -> None:
        """End the thread when no wait goes on; another wait starts another."""
        if self._closed is not None:
            self._closed.set()
            self._closed = None

    def _watch(self, closed: threading.Event) -> None:
        given_up = 0.0
        while True:
            time.sleep(min(1.0, self.seconds / 10))
            since, now = self._since, time.monotonic()
            if since is None:
                if closed.is_set():
                    return
                continue
            if now - since > self.seconds:
                _leave(EXIT_STALLED, self.describe())
            if not self.given_up and now - since > PATIENCE_SECONDS and self.stopped():
                self.given_up, given_up = True, now
                self.give_up()
            if self.given_up and self._by_main and now - given_up > LEAVE_SECONDS:
                _leave(EXIT_PREEMPTED, STOPPED)


def _leave(code: int, text: str) -> NoReturn:
    print(text, file=sys.stderr, flush=True)
    record_exit(code, text)
    os._exit(code)


def describe_workers(pids: Sequence[int], *, places: Sequence[str] = ()) -> list[str]:
    """One sentence about each worker's process, with its place in the data."""
    lines = []
    for number, pid in enumerate(pids):
        place = places[number] if number < len(places) else ""
        shards = _open_shards(pid)
        reading = f", has open {', '.join(shards)}" if shards else ""
        lines.append(f"Worker {number} (process {pid}) {_state(pid)}{f' at {place}' if place else ''}{reading}.")
    return lines


def _state(pid: int) -> str:
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return "is gone"
    return STATES.get(text.rpartition(")")[2].split()[0], "is in an unknown state")


def _open_shards(pid: int) -> list[str]:
    """The tars that a process has open, on this machine's file systems."""
    names = set()
    with suppress(OSError):
        for link in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                target = os.readlink(link)
                if target.endswith(".tar"):
                    names.add(target)
    return sorted(names)
