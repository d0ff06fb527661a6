"""Cache of decoded, resized and cropped images on disk, so that a second evaluation need not decode them.

A file holds one micro-batch as 8-bit pixels. Its name is derived from everything that determines the pixels: the task's
data, the preprocessing, the micro-batch's number and size, and the versions of the libraries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.evaluation.datasets.task_data import TaskError
from pipeline.evaluation.runner.array_file import load_array, store_array
from pipeline.evaluation.runner.results import package_versions

Transform = Callable[[Any], Tensor]


class PixelCache:
    """The cached micro-batches of one task.

    Args:
        folder: `evaluation.cache`, for all tasks and suites.
        data: Digest of the task's data.
        micro_batch: Images per micro-batch.
    """

    def __init__(self, folder: Path, *, data: str, micro_batch: int) -> None:
        self._folder, self._data, self._micro_batch = folder, data, micro_batch

    def path(self, preprocessing: str, number: int) -> Path:
        """The file of a micro-batch under a preprocessing, given as JSON."""
        packages = {name: package_versions()[name] for name in ("pillow", "torchvision", "open_clip_torch")}
        facts = json.dumps([self._data, preprocessing, self._micro_batch, packages], sort_keys=True)
        return self._folder / hashlib.sha256(facts.encode()).hexdigest()[:32] / f"{number:06d}.npy"

    def load(self, path: Path, rows: int) -> np.ndarray | None:
        """[rows, H, W, 3] uint8; None when the file is missing or incomplete."""
        pixels = load_array(path)
        return pixels if pixels is not None and pixels.ndim == 4 and len(pixels) == rows else None

    def store(self, path: Path, pixels: np.ndarray) -> None:
        """Write a micro-batch.

        Raises:
            TaskError: The disk refuses it.
        """
        try:
            store_array(path, pixels)
        except OSError as error:
            raise TaskError(
                f"The cache {self._folder} cannot be written ({error.strerror}): free some space, or leave cache out."
            ) from error


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
