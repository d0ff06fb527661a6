"""Reusable buffers, and copies to a GPU for which the host does not wait."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Named buffers: on a CPU, page faults of newly allocated memory can cost more than the pass that fills it.

    On a GPU every call allocates: the caching allocator makes that cheap, and the towers can use the memory in between.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], *, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor, which overwrites the one taken under the same name before."""
        if like.is_cuda:
            return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
        key, size = (name, dtype or like.dtype, like.device), math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=key[1], device=key[2])
        return buffer[:size].view(shape)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`; from page-locked memory, so that the host does not wait for the GPU."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
