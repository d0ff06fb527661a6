"""One pass over a task's images for several models: every image is read and decoded once, by loader workers."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pipeline.evaluation.datasets.task_data import ImageSource, TaskError, decode
from pipeline.evaluation.runner.compute import microbatches
from pipeline.model.evaluation_model import EvaluationModel

Transform = Callable[[Any], Tensor]


def preprocessing_key(model: EvaluationModel) -> str:
    """Models with the same key see the same pixels."""
    return json.dumps(dict(model.architecture.preprocess_cfg), sort_keys=True, default=list)


class _Decoded(Dataset[tuple[Tensor, ...]]):
    """Item i: the image at `order[i]` under every transform; decoding errors travel as text in `errors`."""

    def __init__(self, source: ImageSource, transforms: Sequence[Transform]) -> None:
        self.source, self.transforms = source, transforms

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image = decode(self.source.read(index), name=self.source.name(index))
        return tuple(transform(image) for transform in self.transforms)


class _Batches(Dataset[Any]):
    """Item k: the stacked images of the k-th loader batch, or the message of what was wrong with one of them."""

    def __init__(self, images: _Decoded, batches: list[np.ndarray]) -> None:
        self.images, self.batches = images, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[Tensor, ...] | str:
        try:
            columns = zip(*(self.images[int(i)] for i in self.batches[index]), strict=True)
            return tuple(torch.stack(column) for column in columns)
        except TaskError as error:
            return str(error)  # an exception would come back from a worker wrapped in its traceback


class ImagePass:
    """The images of one task, preprocessed for every distinct key, in this process's micro-batches.

    Args: transforms: preprocessing by key. micro_batch: M. batch_size: images per loader item; `workers`: processes
      that decode (0: this one).
    """

    def __init__(
        self, source: ImageSource, transforms: dict[str, Transform], *, micro_batch: int, batch_size: int, workers: int
    ) -> None:
        self._decoded = _Decoded(source, list(transforms.values()))
        self._keys = list(transforms)
        self._micro_batch, self._batch_size, self._workers = micro_batch, batch_size, workers

    def run(self, *, rank: int = 0, size: int = 1, pin: bool = False) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """Yield `(number, valid, {key: [M, 3, H, W]})` for micro-batches number = rank, rank + size, ...

        Raises: TaskError for an image that cannot be read.
        """
        m, n = self._micro_batch, len(self._decoded)
        numbers = range(rank, -(-n // m), size)
        mine = np.concatenate([np.arange(k * m, min((k + 1) * m, n)) for k in numbers] or [np.arange(0)])
        batches = [mine[start : start + self._batch_size] for start in range(0, len(mine), self._batch_size)]
        workers = min(self._workers, len(batches))
        loader: DataLoader[Any] = DataLoader(
            _Batches(self._decoded, batches),
            batch_size=None,
            num_workers=workers,
            pin_memory=pin,
            # A fork of a process with a GPU, and in training with threads of NCCL's, may hang.
            multiprocessing_context=_fork_server() if pin and workers else None,
        )
        cut = microbatches(self._checked(loader), m)
        for number, (valid, tensors) in zip(numbers, cut, strict=True):
            yield number, valid, dict(zip(self._keys, tensors, strict=True))

    @staticmethod
    def _checked(loader: DataLoader[Any]) -> Iterator[tuple[Tensor, ...]]:
        for batch in loader:
            if isinstance(batch, str):
                raise TaskError(batch)
            yield tuple(batch)


def _fork_server() -> Any:
    """A clean process that has imported what workers need: they are started anew for every task."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pipeline.evaluation.runner.images", "open_clip"])
    return context
