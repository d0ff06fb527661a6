"""One pass over a task's images for several models: every image is read and decoded once, by loader workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pipeline.distributed.processes import (
    live_with_parent,
    means_worker_died,
    preload,
    start_forkserver,
    start_workers,
    worker_died_message,
)
from pipeline.evaluation.compute import check_finite, microbatches
from pipeline.evaluation.datasets.task_data import StoredImages, TaskData, TaskError, decode
from pipeline.evaluation.protocol import Outcomes, Protocol
from pipeline.evaluation.run.session import Session
from pipeline.model.evaluation_model import EvaluationModel
from pipeline.pictures.pixels import Colour

Transform = Callable[[Any], Tensor]
WORKER_IMPORTS = ("pipeline.evaluation.run.images", "open_clip")
"""What the fork server imports, because new workers are started for every task."""
Piece = tuple[int, int, Outcomes | str]
"""What is kept of a micro-batch: its number, the model's, and the values or the error."""


class ImagePass(Dataset[Any]):
    """The micro-batches `rank`, `rank + size`, ... of a task's images.

    Item k is the k-th batch of them for the loader: the stacked images under every preprocessing, or the error for one
    of them. What is transparent is put on `background`; without one the colours under it are taken.
    """

    def __init__(
        self,
        source: StoredImages,
        transforms: Mapping[str, Transform],
        *,
        micro_batch: int,
        batch_size: int,
        workers: int,
        background: Colour | None = None,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self._source, self._transforms, self._background = source, dict(transforms), background
        self._micro_batch, self._workers = micro_batch, workers
        self._numbers = range(rank, -(-len(source) // micro_batch), size)
        mine = [i for k in self._numbers for i in range(k * micro_batch, min((k + 1) * micro_batch, len(source)))]
        self._batches = [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> tuple[Tensor, ...] | str:
        rows = []
        try:
            for index in self._batches[number]:
                image = decode(self._source.read(index), name=self._source.name(index), background=self._background)
                rows.append([transform(image) for transform in self._transforms.values()])
        except TaskError as error:
            return str(error)  # an exception from a worker would be wrapped in its traceback
        return tuple(map(torch.stack, zip(*rows, strict=True)))

    def run(self, *, pin: bool = False) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """Yield `(number, valid, {key: [M, 3, H, W]})`."""
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

        def checked() -> Iterator[tuple[Tensor, ...]]:
            try:
                for batch in start_workers(loader):
                    if isinstance(batch, str):
                        raise TaskError(batch)
                    yield tuple(batch)
            except (RuntimeError, OSError, EOFError) as error:
                if not (workers and means_worker_died(error)):
                    raise
                raise TaskError(worker_died_message(error, memory="Lower `workers` or `batch_size`.")) from error

        for number, (valid, tensors) in zip(self._numbers, microbatches(checked(), self._micro_batch), strict=True):
            yield number, valid, dict(zip(self._transforms, tensors, strict=True))


def _start_worker(number: int) -> None:
    live_with_parent()


def image_pass(
    session: Session,
    *,
    data: TaskData,
    protocol: Protocol,
    models: Mapping[int, EvaluationModel],
    texts: Mapping[int, Tensor],
) -> tuple[dict[int, Outcomes], dict[int, str]]:
    """What the protocol keeps of every image, in the images' order, for every model; and the models that failed.

    Models and their text features are by number. An image that cannot be read is a `TaskError` on every process.
    """

    def mine() -> list[Piece]:
        try:
            pieces = _my_images(session, data, protocol, models=models, texts=texts)
        except Exception:  # but no interrupt
            data.check_unchanged()  # says more than an error that a change has caused
            raise
        data.check_unchanged()
        return pieces

    kept: dict[int, list[Outcomes]] = {index: [] for index in models}
    failed: dict[int, str] = {}
    gathered = (piece for part in session.world.gather_objects(session.together(mine)) for piece in part)
    for _, index, piece in sorted(gathered, key=lambda piece: piece[0]):
        if isinstance(piece, str):
            failed.setdefault(index, piece)
        else:
            kept[index].append(piece)
    whole = {
        index: {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        for index, pieces in kept.items()
        if index not in failed
    }
    return whole, failed


def _my_images(
    session: Session,
    data: TaskData,
    protocol: Protocol,
    *,
    models: Mapping[int, EvaluationModel],
    texts: Mapping[int, Tensor],
) -> list[Piece]:
    """What is kept of this process's micro-batches.

    A work item is one micro-batch for one model, so that several checkpoints keep all threads busy on small tasks.
    """
    device, config, world = session.compute.device, session.config, session.world
    on_device = {index: texts[index].to(device) for index in models}
    # Models with the same key see the same pixels.
    described = {i: {**m.architecture.preprocess_cfg, **m.architecture.own_background} for i, m in models.items()}
    keys = {index: json.dumps(facts, sort_keys=True, default=list) for index, facts in described.items()}
    reading = ImagePass(
        data.images,
        {keys[index]: model.preprocess for index, model in models.items()},
        micro_batch=config.micro_batch,
        batch_size=config.batch_size,
        workers=config.loader_workers(world.cores),
        background=background_of(models.values()) if data.on_background else None,
        rank=world.rank,
        size=world.size,
    )

    def work() -> Iterator[tuple[int, int, int, Tensor]]:
        for number, valid, tensors in reading.run(pin=device.type == "cuda"):
            world.progress()
            moved = {key: tensor.to(device, non_blocking=True) for key, tensor in tensors.items()}
            yield from ((number, valid, index, moved[keys[index]]) for index in models)

    def encode(number: int, valid: int, index: int, pixels: Tensor) -> Piece:
        start = number * config.micro_batch
        with session.compute.encoding():
            features = models[index].encode_image(pixels)[:valid]
        try:
            check_finite(features, what=lambda row: data.images.name(start + row))
            return number, index, protocol.keep(features, on_device[index], start=start)
        except TaskError as error:
            return number, index, str(error)

    return list(session.compute.map(encode, work()))


def background_of(models: Iterable[EvaluationModel]) -> Colour:
    """The background that models were trained with."""
    colours = {model.architecture.background for model in models}
    if len(colours) > 1:
        raise TaskError("The checkpoints were trained with different data.background: evaluate them one by one.")
    return colours.pop()
