"""The memory of a rank's next batches of images: loading workers write their rows where the training process reads."""

from __future__ import annotations

import logging
import math
import mmap
import os
import weakref
from contextlib import suppress
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from torch import Tensor

SPARE = 3
"""Blocks besides those that workers fill ahead: of the batch that is taken, the one before it, and the next to fill."""
log = logging.getLogger(__name__)


class Blocks:
    """Blocks of images, uint8 [b, H, W, 3], each for one batch at a time.

    The memory is a file without a name (memfd), mapped once by each process and page-locked once for a GPU. So a batch
    costs the training process no copy and no page faults, the size of /dev/shm does not limit it, and nothing is left
    of it when processes are killed.

    A block is written again when no tensor of its batch exists any more. If none is free, because earlier batches are
    kept, `take` returns a copy.

    Args:
        rows: Of a batch, b.
        size: Side of the images in pixels.
        ahead: Batches that workers fill ahead of the one that is taken next.
        pin: The batches go to a GPU.
    """

    def __init__(self, rows: int, size: int, *, ahead: int, pin: bool) -> None:
        count = ahead + SPARE
        file = os.memfd_create("batches")
        weakref.finalize(self, os.close, file)
        os.ftruncate(file, mmap.PAGESIZE + count * rows * size * size * 3)
        self._map(file, (count, rows, size, size, 3))
        self._pin, self._in_place = pin, not pin or _page_locked(self._images)
        self._free = list(range(count))
        self._taken, self._planned = 0, 0
        for _ in range(ahead + 1):
            self._plan()

    def __getstate__(self) -> dict[str, Any]:
        return {"file": DupFd(self._file), "shape": self._images.shape}

    def __setstate__(self, state: dict[str, Any]) -> None:
        file = state["file"].detach()
        self._map(file, state["shape"])
        os.close(file)

    def rows(self, batch: int, first: int, count: int) -> Tensor:
        """Where a worker writes `count` rows of a batch, from row `first` on; batches are counted from 0."""
        return torch.from_numpy(self._images[self._block_of[batch % len(self._block_of)], first : first + count])

    def take(self) -> Tensor:
        """The images of the next batch, uint8 [b, 3, H, W], when all its rows are written."""
        block = int(self._block_of[self._taken % len(self._block_of)])
        self._taken += 1
        array = self._images[block]
        image = torch.from_numpy(array)  # keeps the array as long as any tensor shares its memory
        if self._free and self._in_place:
            weakref.finalize(array, self._free.append, block).atexit = False
        else:
            image = torch.empty(image.shape, dtype=torch.uint8, pin_memory=self._pin).copy_(image)
            self._free.append(block)
        self._plan()
        return image.permute(0, 3, 1, 2)

    def _plan(self) -> None:
        """Choose the block of the next batch that workers are asked for."""
        self._block_of[self._planned % len(self._block_of)] = self._free.pop()
        self._planned += 1

    def _map(self, file: int, shape: tuple[int, ...]) -> None:
        self._file = file
        memory = mmap.mmap(file, 0)
        self._block_of = np.frombuffer(memory, np.int64, shape[0])
        """Of the batches that are taken or filled, by their number modulo the count of blocks."""
        self._images = np.frombuffer(memory, np.uint8, math.prod(shape), mmap.PAGESIZE).reshape(shape)


def _page_locked(images: np.ndarray) -> bool:
    """Page-lock memory, so that copies from it are asynchronous. False, with a warning, where the driver refuses."""
    if not images.nbytes:
        return True
    cuda, start = torch.cuda.cudart(), images.ctypes.data
    if error := int(cuda.cudaHostRegister(start, images.nbytes, 0)):
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # or the next kernel would raise this error
        log.warning("CUDA cannot page-lock shared memory (error %d): each batch is copied once more.", error)
        return False
    weakref.finalize(images.base, cuda.cudaHostUnregister, start)  # the array that all views of the memory keep
    return True
