"""One pass over a task's images for several models: every image is read and decoded once, by loader workers.

Decoded images can be kept in a cache. Each of its files holds pixels, and a key that says everything that they were
made of and from. A file that is damaged, or that was made for another key and renamed, is the same as none.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pipeline.distributed.workers import (
    live_with_parent,
    means_worker_died,
    preload,
    start_forkserver,
    start_workers,
    worker_died_message,
)
from pipeline.evaluation.compute import microbatches
from pipeline.evaluation.datasets.task_data import ImageSource, TaskError, decode
from pipeline.evaluation.identity import ROOT, code_digest
from pipeline.files import replacing
from pipeline.model.evaluation_model import EvaluationModel
from pipeline.pictures.pixels import Colour
from pipeline.versions import versions

T = TypeVar("T")
Transform = Callable[[Any], Tensor]
WORKER_IMPORTS = ("pipeline.evaluation.run.images", "open_clip")
"""What the fork server imports, because new workers are started for every task."""
DECODERS = ("pipeline/pictures/*.py", "pipeline/evaluation/datasets/task_data.py", "pipeline/evaluation/run/images.py")
"""What makes pixels of encoded images: its digest is part of a cached image's key."""


def preprocessing_key(model: EvaluationModel) -> str:
    """Models with the same key see the same pixels."""
    described = {**model.architecture.preprocess_cfg, **model.architecture.own_background}
    return json.dumps(described, sort_keys=True, default=list)


class ImagePass(Dataset[Any]):
    """One process's micro-batches of a task's images: number = rank, rank + size, ...

    Item k is the k-th batch of them for the loader: the stacked images under every preprocessing, or the error for one
    of them. With a cache of decoded images a batch is a micro-batch, and only uncached images are decoded.

    Args:
        source: The images.
        transforms: Preprocessing by key.
        micro_batch: Images per micro-batch.
        batch_size: Images per loader item.
        workers: Processes that decode (0: this one).
        cache: Of decoded images.
        background: Behind what is transparent; None takes the colours under it.
        rank: This process.
        size: How many processes there are.
    """

    def __init__(
        self,
        source: ImageSource,
        transforms: Mapping[str, Transform],
        *,
        micro_batch: int,
        batch_size: int,
        workers: int,
        cache: PixelCache | None = None,
        background: Colour | None = None,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self._source, self._transforms, self._cache, self._background = source, dict(transforms), cache, background
        self._micro_batch, self._workers = micro_batch, workers
        self._numbers = range(rank, -(-len(source) // micro_batch), size)
        pieces = [np.arange(k * micro_batch, min((k + 1) * micro_batch, len(source))) for k in self._numbers]
        if cache is not None:
            self._parts = {key: split_transform(transform) for key, transform in transforms.items()}
            self._batches = pieces
        else:
            mine = np.concatenate(pieces or [np.arange(0)])
            self._batches = [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> tuple[Tensor, ...] | str:
        images = self._batches[index]
        try:
            if self._cache is not None:
                return self._cached(self._cache, self._numbers[index], images)
            return tuple(map(torch.stack, self._prepared(images, self._transforms.values())))
        except TaskError as error:
            return str(error)  # an exception from a worker would be wrapped in its traceback

    def _prepared(self, images: np.ndarray, functions: Iterable[Callable[[Any], T]]) -> Iterator[tuple[T, ...]]:
        """The images of a batch, decoded once, under every function."""
        functions, rows = list(functions), []
        for index in map(int, images):
            image = decode(self._source.read(index), name=self._source.name(index), background=self._background)
            rows.append([function(image) for function in functions])
        return zip(*rows, strict=True)

    def _cached(self, cache: PixelCache, number: int, images: np.ndarray) -> tuple[Tensor, ...]:
        loaded = {key: cache.load(key, number) for key in self._transforms}
        missing = [key for key, pixels in loaded.items() if pixels is None]
        if missing:
            columns = self._prepared(images, (self._parts[key][0] for key in missing))
            for key, column in zip(missing, columns, strict=True):
                loaded[key] = pixels = np.stack(column)
                cache.store(key, number, pixels)
        return tuple(to_tensors(self._parts[key][1], pixels) for key, pixels in loaded.items() if pixels is not None)

    def run(self, *, pin: bool = False) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """Yield `(number, valid, {key: [M, 3, H, W]})`.

        Raises:
            TaskError: An image cannot be read, or a worker died.
        """
        workers = min(self._workers, len(self))
        preload(*WORKER_IMPORTS)
        loader: DataLoader[Any] = DataLoader(
            self,
            batch_size=None,
            num_workers=workers,
            pin_memory=pin,
            multiprocessing_context=start_forkserver() if workers else None,
            worker_init_fn=_start_worker if workers else None,
        )
        cut = microbatches(self._checked(loader), self._micro_batch)
        for number, (valid, tensors) in zip(self._numbers, cut, strict=True):
            yield number, valid, dict(zip(self._transforms, tensors, strict=True))

    def _checked(self, loader: DataLoader[Any]) -> Iterator[tuple[Tensor, ...]]:
        try:
            for batch in start_workers(loader):
                if isinstance(batch, str):
                    raise TaskError(batch)
                yield tuple(batch)
        except (RuntimeError, OSError, EOFError) as error:
            if not (loader.num_workers and means_worker_died(error)):
                raise
            raise TaskError(worker_died_message(error, memory="Lower `workers` or `batch_size`.")) from error


def _start_worker(number: int) -> None:
    live_with_parent()


class PixelCache:
    """The cached micro-batches of one task (`data` is the digest of its data), as 8-bit pixels.

    The folder is `evaluation.cache`, for all tasks and suites.
    """

    def __init__(self, folder: Path, *, data: str, micro_batch: int, background: Colour | None = None) -> None:
        self._folder = folder
        packages = versions(("pillow", "torchvision", "open_clip_torch", "numpy"))
        self._facts = [data, micro_batch, background, packages, code_digest(ROOT, DECODERS)]

    def load(self, preprocessing: str, number: int) -> np.ndarray | None:
        """[rows, H, W, 3] uint8, micro-batch `number` under a preprocessing; None when it is not there, or damaged."""
        path, key = self._place(preprocessing, number)
        try:
            with np.load(path, allow_pickle=False) as stored:
                return stored["pixels"] if str(stored["key"]) == key else None
        except Exception:  # a damaged archive raises a dozen types, one of them for its checksums
            return None

    def store(self, preprocessing: str, number: int, pixels: np.ndarray) -> None:
        """Write a micro-batch.

        Raises:
            TaskError: The disk refuses it.
        """
        path, key = self._place(preprocessing, number)
        try:
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.savez(file, pixels=pixels, key=np.array(key))
        except OSError as error:
            raise TaskError(
                f"The cache {self._folder} cannot be written ({error.strerror}): free some space, or leave cache out."
            ) from error

    def remove(self, preprocessings: Iterable[str]) -> None:
        """Remove what is cached of the task: some of it may be of files that were changed meanwhile."""
        for preprocessing in preprocessings:
            shutil.rmtree(self._place(preprocessing, 0)[0].parent, ignore_errors=True)

    def _place(self, preprocessing: str, number: int) -> tuple[Path, str]:
        key = json.dumps([*self._facts, preprocessing], sort_keys=True)
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        return self._folder / name / f"{number:06d}.npz", f"{key} {number}"


def _to_pixels(image: Any) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


def split_transform(transform: Any) -> tuple[Callable[[Any], np.ndarray], Transform]:
    """Split a preprocessing into image -> 8-bit pixels [H, W, 3] and pixels -> tensor; together they are bit-identical.

    Raises:
        TaskError: It is not open_clip's sequence with `ToTensor` in it.
    """
    from torchvision.transforms import Compose, ToTensor

    steps = list(getattr(transform, "transforms", ()))
    place = next((k for k, step in enumerate(steps) if isinstance(step, ToTensor)), None)
    if place is None:
        raise TaskError("The preprocessing of this model has no ToTensor step, so its images cannot be cached.")
    return Compose([*steps[:place], _to_pixels]), Compose(steps[place:])


def to_tensors(after: Transform, pixels: np.ndarray) -> Tensor:
    """[rows, H, W, 3] uint8 -> [rows, 3, H, W] as the whole preprocessing returns it."""
    return torch.stack([after(np.array(image)) for image in pixels])
