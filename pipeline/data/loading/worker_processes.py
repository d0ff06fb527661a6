"""The start of the loader's worker processes, and checks of what they need from the machine.

The fork server of the workers starts in `build_loader`, so that its imports overlap with building the model.
"""

from __future__ import annotations

import os
import pickle

from pipeline.data.data_config import DataConfig
from pipeline.data.loading.stalls import SHARED_MEMORY
from pipeline.data.loading.worker import Tokenize, allow_open_files
from pipeline.distributed.workers import preload, start_forkserver
from pipeline.distributed.world import World, ranks_here
from pipeline.errors import UserError

WORKER_IMPORTS = "pipeline.data.loading.preload"
"""What the fork server imports once, for all workers."""


def prepare_workers(
    config: DataConfig, *, world: World, tokenize: Tokenize, streams: int, rows: int, image_size: int
) -> None:
    """Check that the loader's workers can run on this machine, and start the process that forks them.

    Args:
        config: The `data` section.
        world: The ranks.
        tokenize: Captions -> tokens; the workers receive a pickled copy.
        streams: Streams of this rank.
        rows: This rank's rows of a global batch.
        image_size: Side of the decoded images, in pixels.

    Raises:
        UserError: `tokenize` cannot be pickled, or open files or shared memory are too scarce.
    """
    _check_picklable(tokenize)
    _check_open_files(config, streams=streams)
    _check_shared_memory(config, world, rows=rows, image_size=image_size)
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


def _check_shared_memory(config: DataConfig, world: World, *, rows: int, image_size: int) -> None:
    """Refuse too little shared memory: workers pass images through it, and die without a message when it is full."""
    if not SHARED_MEMORY.is_dir():
        return
    ranks = ranks_here(world.size)
    needed = (config.prefetch + 1) * rows * 3 * image_size**2 * ranks
    stat = os.statvfs(SHARED_MEMORY)
    free = stat.f_bavail * stat.f_frsize
    if needed > free:
        raise UserError(
            f"The workers of this machine's {ranks} ranks need {needed >> 20} MiB in {SHARED_MEMORY} to pass on "
            f"images, but {free >> 20} MiB are free: lower data.prefetch (now {config.prefetch}), or give the "
            "container more (docker run --shm-size, or --ipc=host)."
        )


def means_worker_died(error: Exception) -> bool:
    """Whether torch noticed that a worker ended, or a tensor that a worker sent can no longer be fetched from it.

    Errors that a worker itself raised arrive as "Caught ... in DataLoader worker process ...".
    """
    message = str(error)
    return "DataLoader worker (pid" in message or (isinstance(error, (OSError, EOFError)) and "Caught" not in message)


def worker_died_message(error: Exception) -> str:
    """What to do about it."""
    return (
        f"A worker of the loader was killed ({type(error).__name__}: {error}), which usually means that the machine "
        "ran out of memory. Each worker keeps about half of data.shuffle_buffer encoded samples for each of its "
        "streams, and data.prefetch batches: lower one of them, or data.workers. `neuclip plan` estimates the memory."
    )
