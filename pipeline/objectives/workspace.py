"""Buffers that are used again."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Named buffers: page faults of fresh megabytes can cost a CPU more than the pass over memory that fills them.

    On a GPU, whose allocator keeps memory anyway, every taking is fresh: between steps the towers can use it.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], *, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor; whoever took this name before has lost it."""
        if like.is_cuda:
            return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
        key, size = (name, dtype or like.dtype, like.device), math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=key[1], device=key[2])
        return buffer[:size].view(shape)
