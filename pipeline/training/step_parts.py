"""Parts of a step: its micro-batches, their random streams, the statistics of batch norms, and flags for the host."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def seeded(seed: int, step: int, rank: int, micro_batch: int) -> Iterator[None]:
    """Inside, the global random state is a function of the arguments only; it is restored at the end.

    A second forward pass under the same arguments drops the same units, and no random state is in a checkpoint.
    """
    name = f"forward {seed} {step} {rank} {micro_batch}".encode()
    value = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "big")
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(value)
        yield


def batch_norms_of(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The batch norms of a model."""
    return [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


class BatchStatistics:
    """The running statistics of batch norms as they are now, for a step that turns out to be skipped."""

    def __init__(self, batch_norms: list[nn.modules.batchnorm._BatchNorm]) -> None:
        self._now = [buffer for norm in batch_norms for buffer in norm.buffers(recurse=False)]
        self._kept = [buffer.clone() for buffer in self._now]

    def restore(self) -> None:
        """Undo what forward passes have changed since."""
        with torch.no_grad():
            for buffer, kept in zip(self._now, self._kept, strict=True):
                buffer.copy_(kept)


@contextlib.contextmanager
def frozen_statistics(batch_norms: list[nn.modules.batchnorm._BatchNorm]) -> Iterator[None]:
    """Inside, batch norms normalize with the batch's statistics, but do not update their running statistics."""
    before = [(norm.track_running_stats, norm.running_mean, norm.running_var) for norm in batch_norms]
    counters = [norm.num_batches_tracked for norm in batch_norms]
    for norm in batch_norms:
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, (tracks, mean, var), counter in zip(batch_norms, before, counters, strict=True):
            norm.track_running_stats, norm.running_mean, norm.running_var = tracks, mean, var
            norm.num_batches_tracked = counter


def micro_batches(local_batch: int, micro_batch: int | None) -> list[slice]:
    """The rows of each micro-batch of a rank; None makes one of the whole local batch."""
    size = micro_batch or local_batch
    return [slice(i, min(i + size, local_batch)) for i in range(0, local_batch, size)]


class Flags:
    """Numbers of the device on their way to the host; reading them waits for nothing that is queued after them."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._on_host, self._arrived = values, None
        if values.is_cuda:
            self._on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._on_host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.current_stream(values.device).record_event()

    def read(self) -> list[bool]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return [bool(value) for value in self._on_host.tolist()]
