"""Flags of a step, read without waiting for the whole device."""

from __future__ import annotations

import torch
from torch import Tensor


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
