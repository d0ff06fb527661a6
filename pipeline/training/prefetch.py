"""Fetches the next batch while the device is busy, instead of after the step, when the device is idle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.data.loading.loader import Batch
from pipeline.distributed.timing import Meter, Phases


@dataclass(frozen=True)
class _Copy:
    """A batch's images on their way to the GPU."""

    batch: Batch
    image: Tensor
    done: torch.cuda.Event


class PrefetchedBatches:
    """A loader's batches in their order, of which one may be fetched ahead and copied to a GPU on a stream of its own.

    An error while fetching ahead is raised by the call of `next` for that batch: the step before it, and its
    checkpoint, are not affected.

    Args:
        loader: The batches.
        steps: Steps of the run; nothing is fetched ahead of the last one.
        meter: Counts the wait for batches.
        phases: Where the phase "data" is marked.
        device: Whose queued work hides the wait.
    """

    def __init__(
        self, loader: Iterator[Batch], *, steps: int, meter: Meter, phases: Phases, device: torch.device
    ) -> None:
        self._loader, self._steps, self._meter, self._phases, self._device = loader, steps, meter, phases, device
        self._ahead: Batch | Exception | None = None
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copy: _Copy | None = None

    def next(self) -> Batch:
        """Return the next batch, prefetched or fetched now. Errors of the loader are raised here."""
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, Exception):
            raise ahead
        if ahead is not None:
            return ahead
        with self._meter.waiting():
            return next(self._loader)

    def fetch_ahead(self, step: int) -> None:
        """Fetch the batch that follows step number `step` (from 0), and start to copy its images."""
        if step + 1 >= self._steps:
            return
        self._phases.mark("data")
        try:
            with self._meter.waiting(hidden_by=self._device):
                self._ahead = next(self._loader)
            self._start_copy(self._ahead)
        except Exception as error:
            self._ahead = error

    def image(self, batch: Batch) -> Tensor:
        """The images of a batch on the device; the work queued there from now on waits for them, not the host."""
        copy, self._copy = self._copy, None
        if copy is None or copy.batch is not batch:
            return batch.image.to(self._device, non_blocking=True)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copy.done)
        copy.image.record_stream(stream)  # its memory belongs to the other stream
        return copy.image

    def _start_copy(self, batch: Batch) -> None:
        """Copy the images while the device computes: on the current stream the copy would wait for the step's end."""
        if self._copies is not None:
            with torch.cuda.stream(self._copies):
                image = batch.image.to(self._device, non_blocking=True)
                self._copy = _Copy(batch, image, self._copies.record_event())
