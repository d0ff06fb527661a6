"""The next batch, put together while the device is busy instead of after the step, when it is idle."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pipeline.data.loading.loader import Batch
from pipeline.distributed.timing import Meter


class BatchesAhead:
    """A loader's batches in their order, of which one may be prepared ahead.

    What goes wrong with that one is told at its own turn: the step before it, and its checkpoint, are none the worse.
    """

    def __init__(self, loader: Iterator[Batch], *, meter: Meter, device: torch.device) -> None:
        self._loader, self._meter, self._device = loader, meter, device
        self._ahead: Batch | Exception | None = None

    def next(self) -> Batch:
        """The next batch, prepared or not. Raises: what the loader raised."""
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, Exception):
            raise ahead
        if ahead is not None:
            return ahead
        with self._meter.waiting():
            return next(self._loader)

    def prepare(self) -> None:
        """Get the batch after the last one given out."""
        try:
            with self._meter.waiting(hidden_by=self._device):
                self._ahead = next(self._loader)
        except Exception as error:
            self._ahead = error
