"""The loader's worker processes: what they need from the machine, and what they are doing when no batch comes.

Their fork server starts in `build_loader`, so that its imports overlap with building the model. A worker that is stuck
cannot answer, so its state is read from /proc.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.data.data_config import DataConfig
from pipeline.data.loading.worker import Tokenize, allow_open_files
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
