"""The worker processes of a rank's loader.

The workers' fork server starts in `build_loader`, so that its imports overlap with building the model. A worker that is
stuck cannot answer, so its state is what the system says.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import psutil
from torch.utils.data import DataLoader

from pipeline.data.data_config import PREFETCH, DataConfig
from pipeline.data.loading.worker import Part, StreamDataset, Tokenize, allow_open_files
from pipeline.distributed.workers import preload, start_forkserver, start_workers
from pipeline.errors import UserError

WORKER_IMPORTS = ("pipeline.data.loading.worker", "pipeline.data.loading.tokenize")
"""What the fork server imports once, for all workers."""
WAIT_SECONDS = 1.0
"""How often a wait for a worker process asks whether it is to end."""


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


def start_parts(dataset: StreamDataset, *, workers: int) -> tuple[Iterator[Part | UserError], Sequence[int]]:
    """The parts of a rank's batches from the epoch and batch of a dataset on, from so many processes or from this one.

    Those of a batch come in the order of their streams. The second value is of each worker the id of the sample that it
    has last begun to read.
    """
    if not workers:
        return iter(dataset), []
    context = start_forkserver()
    reading = context.RawArray("q", [-1] * workers)
    loader = DataLoader(
        replace(dataset, reading=reading),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=PREFETCH,
        multiprocessing_context=context,
        collate_fn=_as_is,
        timeout=WAIT_SECONDS,
    )
    return start_workers(loader), reading


def _as_is(part: Any) -> Any:
    return part


def state_of(pid: int) -> str:
    """What a process is doing, in words."""
    try:
        return f"is {psutil.Process(pid).status()}"
    except psutil.NoSuchProcess:
        return "is gone"
