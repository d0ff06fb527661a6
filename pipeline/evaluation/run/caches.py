"""Arrays on disk that a second evaluation need not compute: decoded images, and text features.

A file holds an array, the digest of its key, and a checksum over both. The key says everything that the array was made
of and from. A file that is damaged, or that was made for another key and renamed, is the same as none.
"""

from __future__ import annotations

import hashlib
import io
import json
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.evaluation.datasets.task_data import TaskError
from pipeline.evaluation.identity import ROOT, code_digest
from pipeline.files import replacing
from pipeline.versions import versions

Transform = Callable[[Any], Tensor]
DECODERS = ("pipeline.evaluation.run.images",)
"""The modules that make pixels of encoded images; with what they import they are part of a cached image's key."""


def load_array(path: Path, key: str) -> np.ndarray | None:
    """The array that `store_array` wrote with this key; None when the file is missing, damaged, or of another key."""
    try:
        with path.open("rb") as file:
            array: np.ndarray = np.load(file, allow_pickle=False)
            seal = file.read()
    except (OSError, ValueError, EOFError, MemoryError, SyntaxError, tokenize.TokenError):
        # A damaged header may state any shape, or be no Python literal.
        return None
    return array if seal == _seal(array, key) else None


def store_array(path: Path, array: np.ndarray, key: str) -> None:
    """Write an array; a file of that name is complete or not there.

    Raises:
        OSError: The disk refuses it.
    """
    buffer = io.BytesIO()  # numpy's own error on a full disk does not say that the disk is full
    np.save(buffer, array, allow_pickle=False)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(buffer.getbuffer())
        file.write(_seal(array, key))


def _seal(array: np.ndarray, key: str) -> bytes:
    """The digest of the key, and that of key and array."""
    own = hashlib.sha256(key.encode())
    whole = hashlib.sha256(own.digest() + f"{array.dtype.str} {array.shape}".encode())
    whole.update(np.ascontiguousarray(array).data)
    return own.digest() + whole.digest()


class PixelCache:
    """The cached micro-batches of one task, as 8-bit pixels.

    Args:
        folder: `evaluation.cache`, for all tasks and suites.
        data: Digest of the task's data.
        micro_batch: Images per micro-batch.
    """

    def __init__(self, folder: Path, *, data: str, micro_batch: int) -> None:
        self._folder = folder
        packages = versions(("pillow", "torchvision", "open_clip_torch", "numpy"))
        self._facts = [data, micro_batch, packages, code_digest(ROOT, DECODERS)]

    def load(self, preprocessing: str, number: int) -> np.ndarray | None:
        """[rows, H, W, 3] uint8, micro-batch `number` under a preprocessing; None when it is not there."""
        path, key = self._place(preprocessing, number)
        return load_array(path, key)

    def store(self, preprocessing: str, number: int, pixels: np.ndarray) -> None:
        """Write a micro-batch.

        Raises:
            TaskError: The disk refuses it.
        """
        path, key = self._place(preprocessing, number)
        try:
            store_array(path, pixels, key)
        except OSError as error:
            raise TaskError(
                f"The cache {self._folder} cannot be written ({error.strerror}): free some space, or leave cache out."
            ) from error

    def _place(self, preprocessing: str, number: int) -> tuple[Path, str]:
        key = json.dumps([*self._facts, preprocessing], sort_keys=True)
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        return self._folder / name / f"{number:06d}.npy", f"{key} {number}"


class ToPixels:
    """Image -> 8-bit pixels [H, W, 3]: the part of a preprocessing that is cached. Loading workers receive it pickled.

    Args:
        steps: The steps before `ToTensor`.
    """

    def __init__(self, steps: Callable[[Any], Any]) -> None:
        self._steps = steps

    def __call__(self, image: Any) -> np.ndarray:
        return np.asarray(self._steps(image).convert("RGB"))


def split_transform(transform: Any) -> tuple[ToPixels, Transform]:
    """Split a preprocessing into image -> 8-bit pixels [H, W, 3] and pixels -> tensor; together they are bit-identical.

    Raises:
        TaskError: It is not open_clip's sequence with `ToTensor` in it.
    """
    from torchvision.transforms import Compose, ToTensor

    steps = list(getattr(transform, "transforms", ()))
    place = next((k for k, step in enumerate(steps) if isinstance(step, ToTensor)), None)
    if place is None:
        raise TaskError("The preprocessing of this model has no ToTensor step, so its images cannot be cached.")
    return ToPixels(Compose(steps[:place])), Compose(steps[place:])


def to_tensors(after: Transform, pixels: np.ndarray) -> Tensor:
    """[rows, H, W, 3] uint8 -> [rows, 3, H, W] as the whole preprocessing returns it."""
    return torch.stack([after(np.array(image)) for image in pixels])
