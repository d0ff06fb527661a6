"""One pass over a task's images for several models: every image is read and decoded once, by loader workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pipeline.distributed.workers import live_with_parent, preload, start_forkserver, start_workers
from pipeline.evaluation.compute import microbatches
from pipeline.evaluation.datasets.task_data import ImageSource, TaskError, decode
from pipeline.evaluation.run.caches import PixelCache, split_transform, to_tensors
from pipeline.model.evaluation_model import EvaluationModel

Transform = Callable[[Any], Tensor]
WORKER_IMPORTS = ("pipeline.evaluation.run.images", "open_clip")
"""What the fork server imports, because new workers are started for every task."""
Batch = tuple[int, np.ndarray]
"""The number of a loader item, and the images in it."""


def preprocessing_key(model: EvaluationModel) -> str:
    """Models with the same key see the same pixels."""
    return json.dumps(dict(model.architecture.preprocess_cfg), sort_keys=True, default=list)


class _Batches(Dataset[Any]):
    """Item k: the stacked images of the k-th batch under every preprocessing, or the error for one of them."""

    def __init__(self, source: ImageSource, transforms: Mapping[str, Transform], batches: list[Batch]) -> None:
        self.source, self.transforms, self.batches = source, transforms, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[Tensor, ...] | str:
        try:
            return self.tensors(*self.batches[index])
        except TaskError as error:
            return str(error)  # an exception from a worker would be wrapped in its traceback

    def tensors(self, number: int, images: np.ndarray) -> tuple[Tensor, ...]:
        """The images of one batch, one tensor per preprocessing."""
        rows = []
        for index in images:
            image = self.decoded(int(index))
            rows.append([transform(image) for transform in self.transforms.values()])
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))

    def decoded(self, index: int) -> Any:
        return decode(self.source.read(index), name=self.source.name(index))


class _CachedBatches(_Batches):
    """Like `_Batches`, with a cache of decoded images; a batch is a micro-batch. Only uncached images are decoded."""

    def __init__(
        self, source: ImageSource, transforms: Mapping[str, Transform], batches: list[Batch], cache: PixelCache
    ) -> None:
        super().__init__(source, transforms, batches)
        self.cache = cache
        self.parts = {key: split_transform(transform) for key, transform in transforms.items()}

    def tensors(self, number: int, images: np.ndarray) -> tuple[Tensor, ...]:
        loaded = {key: self.cache.load(key, number) for key in self.transforms}
        found = {key: pixels for key, pixels in loaded.items() if pixels is not None}
        missing = [key for key in self.transforms if key not in found]
        if missing:
            rows = []
            for index in images:
                image = self.decoded(int(index))
                rows.append([self.parts[key][0](image) for key in missing])
            for key, column in zip(missing, zip(*rows, strict=True), strict=True):
                found[key] = np.stack(column)
                self.cache.store(key, number, found[key])
        return tuple(to_tensors(self.parts[key][1], found[key]) for key in self.transforms)


class ImagePass:
    """The images of one task, preprocessed for every distinct key, in this process's micro-batches.

    Args:
        source: The images.
        transforms: Preprocessing by key.
        micro_batch: M.
        batch_size: Images per loader item.
        workers: Processes that decode (0: this one).
        cache: Where decoded images are kept.
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
    ) -> None:
        self._source, self._transforms, self._cache = source, dict(transforms), cache
        self._micro_batch, self._batch_size, self._workers = micro_batch, batch_size, workers

    def run(self, *, rank: int = 0, size: int = 1, pin: bool = False) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """Yield `(number, valid, {key: [M, 3, H, W]})` for micro-batches number = rank, rank + size, ...

        Raises:
            TaskError: An image cannot be read.
        """
        numbers = range(rank, -(-len(self._source) // self._micro_batch), size)
        items = self._items(numbers)
        workers = min(self._workers, len(items))
        preload(*WORKER_IMPORTS)
        loader: DataLoader[Any] = DataLoader(
            items,
            batch_size=None,
            num_workers=workers,
            pin_memory=pin,
            multiprocessing_context=start_forkserver() if workers else None,
            worker_init_fn=_start_worker if workers else None,
        )
        cut = microbatches(self._checked(loader), self._micro_batch)
        for number, (valid, tensors) in zip(numbers, cut, strict=True):
            yield number, valid, dict(zip(self._transforms, tensors, strict=True))

    def _items(self, numbers: range) -> _Batches:
        m, n = self._micro_batch, len(self._source)
        pieces = [np.arange(k * m, min((k + 1) * m, n)) for k in numbers]
        if self._cache is not None:
            batches = list(zip(numbers, pieces, strict=True))
            return _CachedBatches(self._source, self._transforms, batches, self._cache)
        mine = np.concatenate(pieces or [np.arange(0)])
        starts = range(0, len(mine), self._batch_size)
        batches = [(k, mine[start : start + self._batch_size]) for k, start in enumerate(starts)]
        return _Batches(self._source, self._transforms, batches)

    @staticmethod
    def _checked(loader: DataLoader[Any]) -> Iterator[tuple[Tensor, ...]]:
        for batch in start_workers(loader):
            if isinstance(batch, str):
                raise TaskError(batch)
            yield tuple(batch)


def _start_worker(number: int) -> None:
    live_with_parent()
