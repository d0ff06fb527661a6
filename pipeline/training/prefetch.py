"""Fetches the next batch while the device is busy, instead of after the step, when the device is idle."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pipeline.data.loading.loader import Batch
from pipeline.distributed.timing import Meter, Phases


class PrefetchedBatches:
    """A loader's batches in their order, of which one may be fetched ahead.

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
        """Fetch the batch that follows step number `step` (from 0)."""
        if step + 1 >= self._steps:
            return
        self._phases.mark("data")
        try:
            with self._meter.waiting(hidden_by=self._device):
                self._ahead = next(self._loader)
        except Exception as error:
            self._ahead = error
