"""Batches on their way to the device: the next one for a GPU is fetched in a thread, from the begin of a step on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.data.loading.loader import Batch
from pipeline.distributed.timing import Meter
from pipeline.distributed.world import NEXT_BATCH
from pipeline.model.trimming import TextChunks


@dataclass(frozen=True)
class Inputs:
    """What a step reads of a batch, on the device."""

    image: Tensor
    """uint8 [b, 3, H, W]."""
    texts: TextChunks
    sample_ids: Tensor
    """int64 [b]."""

    @classmethod
    def of(cls, batch: Batch, *, texts: Callable[[Tensor], TextChunks], device: torch.device) -> Inputs:
        """Copy a batch to the device, without waiting for it if the batch is in page-locked memory."""
        image, ids = (values.to(device, non_blocking=True) for values in (batch.image, batch.sample_id))
        return cls(image, texts(batch.text), ids)


@dataclass(frozen=True)
class _Copy:
    """A batch on its way to the GPU."""

    batch: Batch
    inputs: Inputs
    done: torch.cuda.Event


class PrefetchedBatches:
    """A loader's batches in their order. On a GPU, one is fetched ahead in a thread.

    The thread joins and pins the batch, lays out its texts and copies all of it on a stream of its own, while the
    training thread queues the step before: wherever that waits for the device, the next batch is being prepared. On a
    CPU, where operators need the cores, batches are fetched when they are due.

    An error while fetching ahead is raised by the call of `next` for that batch: the step before it, and its
    checkpoint, are not affected.

    Args:
        texts: Tokens [b, L] of the host -> the texts of the batch's micro-batches, on the device.
        steps: Steps of the run; nothing is fetched ahead of the last one.
    """

    def __init__(
        self,
        loader: Iterator[Batch],
        *,
        texts: Callable[[Tensor], TextChunks],
        steps: int,
        meter: Meter,
        device: torch.device,
    ) -> None:
        self._loader, self._steps, self._meter, self._device = loader, steps, meter, device
        self._texts = texts
        self._ahead: Future[_Copy] | None = None
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copy: _Copy | None = None

    def next(self) -> Batch:
        """Return the next batch, prefetched or fetched now. Errors of the loader are raised here."""
        if self._ahead is None:
            with self._meter.waiting():
                return next(self._loader)
        ahead, self._ahead = self._ahead, None
        with self._meter.waiting(hidden_by=self._device):
            self._copy = ahead.result()
        return self._copy.batch

    def fetch_ahead(self, step: int) -> None:
        """Start to fetch the batch that follows step number `step` (from 0), and to copy it."""
        if self._copies is not None and self._ahead is None and step + 1 < self._steps:
            self._ahead = Future()
            threading.Thread(target=self._fetch, args=(self._ahead, self._copies), name=NEXT_BATCH, daemon=True).start()

    def wait(self) -> None:
        """Wait until the loader is not in use; the batch that was fetched ahead is still the next one."""
        if self._ahead is not None:
            self._ahead.exception()

    def inputs(self, batch: Batch) -> Inputs:
        """A batch on the device; the work queued there from now on waits for it, not the host."""
        copy, self._copy = self._copy, None
        if copy is None or copy.batch is not batch:
            return Inputs.of(batch, texts=self._texts, device=self._device)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copy.done)
        for values in (copy.inputs.image, copy.inputs.sample_ids, *copy.inputs.texts.tensors()):
            values.record_stream(stream)  # its memory belongs to the other stream
        return copy.inputs

    def _fetch(self, ahead: Future[_Copy], copies: torch.cuda.Stream) -> None:
        try:
            with torch.cuda.stream(copies):  # and its device, which a new thread would not use for pinned memory
                batch = next(self._loader)
                inputs = Inputs.of(batch, texts=self._texts, device=self._device)
                done = copies.record_event(torch.cuda.Event(blocking=True))
            ahead.set_result(_Copy(batch, inputs, done))
        except Exception as error:
            ahead.set_exception(error)
        else:
            done.synchronize()  # the batch is kept here until then: workers may write its memory again
