"""Where the parts of a rank's batches come from: its worker processes, or this process if it has none.

The workers' fork server starts in `build_loader`, so that its imports overlap with building the model. A worker that is
stuck cannot answer, so its state is read from /proc.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from pipeline.data.data_config import PREFETCH, DataConfig
from pipeline.data.loading.worker import Part, StreamDataset, Tokenize, allow_open_files
from pipeline.data.shards.manifest_format import Manifest
from pipeline.distributed.exit_record import EXIT_STALLED, record_exit
from pipeline.distributed.workers import (
    means_worker_died,
    preload,
    start_forkserver,
    start_workers,
    worker_died_message,
)
from pipeline.errors import UserError

WORKER_IMPORTS = ("pipeline.data.loading.worker", "pipeline.data.loading.tokenize")
"""What the fork server imports once, for all workers."""
WAIT_SECONDS = 1.0
"""How often a wait for a worker process asks whether it is to end."""
PATIENCE_SECONDS = 2.0
"""After a stop signal, a batch that does not come within this time is given up: nothing is lost by that."""
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


def prepare_workers(config: DataConfig, *, tokenize: Tokenize, streams: int) -> None:
    """Check that the loader's workers can run on this machine, and start the process that forks them.

    Args:
        config: The `data` section.
        tokenize: Captions -> tokens; the workers receive a pickled copy.
        streams: Streams of this rank.

    Raises:
        UserError: `tokenize` cannot be pickled, or too few files may be open: streams keep shards open, and workers
            have pipes and semaphores.
    """
    try:
        pickle.dumps(tokenize)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"The tokenizer {tokenize!r} cannot be sent to worker processes ({error}): use data.workers=0, or a "
            "tokenizer that is an object of a module-level class."
        ) from error
    workers = config.workers or 1
    needed, limit = 64 + 16 * workers + -(-streams // workers), allow_open_files()
    if limit < needed:
        raise UserError(
            f"This process may have {limit} files open (ulimit -n), but {workers} loading workers with "
            f"{streams} streams need about {needed}: raise the limit (ulimit -n 65536; in a container --ulimit "
            "nofile=65536), or lower data.workers or data.streams."
        )
    preload(*WORKER_IMPORTS)
    start_forkserver()


class PartSource:
    """The parts of one batch after another; it can be closed and started again at another place.

    Args:
        workers: Number of processes; 0 loads in this process.
        minutes: Limit of a wait for the workers, which ends this process with exit code 76.
        manifest: Of all shards.
        rank: Of this process.
        place: The position in the data, in words.
        stopped: Whether the run is to stop.
    """

    def __init__(
        self,
        workers: int,
        *,
        minutes: float,
        manifest: Manifest,
        rank: int,
        place: Callable[[], str],
        stopped: Callable[[], bool],
    ) -> None:
        self._workers, self._minutes, self._manifest, self._rank, self._place = workers, minutes, manifest, rank, place
        self._stopped = stopped
        self._parts: Iterator[Part | UserError] = iter(())
        self._reading: MutableSequence[int] = []

    def start(self, dataset: StreamDataset) -> None:
        """Load parts from the epoch and batch of a dataset on."""
        if not self._workers:
            self._parts = iter(dataset)
            return
        context = start_forkserver()
        self._reading = context.RawArray("q", [-1] * self._workers)
        loader = DataLoader(
            replace(dataset, reading=self._reading),
            batch_size=None,
            num_workers=self._workers,
            prefetch_factor=PREFETCH,
            multiprocessing_context=context,
            collate_fn=_as_is,
            timeout=WAIT_SECONDS,
        )
        self._parts = start_workers(loader)

    def next_parts(self) -> list[Part]:
        """The parts of the next batch, in the order of their streams.

        Raises:
            UserError: The data cannot be read any more.
            NoBatch: The run is to stop, and no batch has come.
        """
        return [self._next_part() for _ in range(max(1, self._workers))]

    def close(self) -> None:
        """End the workers."""
        parts, self._parts = self._parts, iter(())
        if hasattr(parts, "_shutdown_workers"):
            parts._shutdown_workers()

    def _next_part(self) -> Part:
        try:
            part = self._wait()
        except (RuntimeError, OSError, EOFError) as error:
            if not (self._workers and means_worker_died(error)):
                raise
            memory = (
                "Each worker keeps about half of data.shuffle_buffer encoded samples for each of its streams, and "
                f"{PREFETCH} batches: lower data.shuffle_buffer or data.workers. `neuclip plan` estimates the memory."
            )
            raise UserError(worker_died_message(error, memory=memory)) from error
        if isinstance(part, UserError):
            raise part
        return part

    def _wait(self) -> Part | UserError:
        """The next part. A wait for a worker that takes too long ends this process."""
        began = time.monotonic()
        while True:
            try:
                return next(self._parts)
            except RuntimeError as error:  # after torch's time limit, the same part can be asked for again
                if "DataLoader timed out" not in str(error):
                    raise
            waited = time.monotonic() - began
            if waited > PATIENCE_SECONDS and self._stopped():
                self._kill_workers()
                raise NoBatch
            if waited > 60 * self._minutes:
                self._leave()

    def _leave(self) -> NoReturn:
        """Say what the workers are doing, and end them and this process, for which others may wait."""
        lines = []
        for number, worker in enumerate(getattr(self._parts, "_workers", [])):
            sample = self._reading[number]
            place = (
                f" at sample {sample} of {self._manifest.url(self._manifest.locate(sample)[0])}" if sample >= 0 else ""
            )
            lines.append(f"Worker {number} (process {worker.pid}) {state_of(worker.pid)}{place}.")
        self._kill_workers()
        text = (
            f"Rank {self._rank}: no batch came from the loading workers for {self._minutes:g} minutes "
            f"(data.timeout_minutes), {self._place()}. {' '.join(lines)} Start again with --resume latest when the "
            "cause is removed."
        )
        print(text, file=sys.stderr, flush=True)
        record_exit(EXIT_STALLED, text)
        os._exit(EXIT_STALLED)

    def _kill_workers(self) -> None:
        for worker in getattr(self._parts, "_workers", []):
            worker.kill()  # a stopped process ignores everything else, and would outlive this one


def _as_is(part: Any) -> Any:
    return part


def state_of(pid: int) -> str:
    """What a process is doing, in words."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "is gone"
    return STATES.get(text.rpartition(")")[2].split()[0], "is in an unknown state")
