"""The two expensive passes of a task: over its texts, once per checkpoint, and over its images, once for all of them.

Shape legend: M micro-batch, d feature dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipeline.evaluation.datasets.suite import Entry
from pipeline.evaluation.datasets.task_data import TaskData, TaskError
from pipeline.evaluation.identity import data_digest
from pipeline.evaluation.protocol import Outcomes, Protocol
from pipeline.evaluation.protocols.texts import TextSide, check_finite
from pipeline.evaluation.run.images import ImagePass, PixelCache, preprocessing_key
from pipeline.evaluation.run.session import Session
from pipeline.model.evaluation_model import EvaluationModel
from pipeline.pictures.pixels import Colour


@dataclass(frozen=True)
class OpenedTask:
    """A task whose data has been opened and checked."""

    entry: Entry
    data: TaskData
    files: Mapping[str, str]
    """Digests of the data's files, by name."""
    protocol: Protocol


def text_features(session: Session, model: EvaluationModel, side: TextSide) -> Tensor:
    """Encode the texts of `side` as [distinct texts, d] features; the processes share the work.

    Raises:
        TaskError: Encoding failed; raised on every process.
    """
    world = session.world

    def encode() -> dict[int, Tensor]:
        return {
            unit: side.encode(model, unit, compute=session.compute, micro_batch=session.config.micro_batch)
            for unit in range(world.rank, len(side.units), world.size)
        }

    merged: dict[int, Tensor] = {}
    for part in world.gather_objects(session.together(encode)):
        merged.update(part)
    return torch.cat([merged[unit] for unit in range(len(side.units))])


def image_pass(
    session: Session, opened: OpenedTask, models: Mapping[int, EvaluationModel], texts: Mapping[int, Tensor]
) -> tuple[dict[int, Outcomes], dict[int, str]]:
    """What the protocol keeps of every image, in the images' order, for every model; and the models that failed.

    Models and their text features are by number.

    Raises:
        TaskError: On every process, when an image cannot be read.
    """
    parts = session.together(lambda: _my_images(session, opened, models, texts))
    gathered = (piece for part in session.world.gather_objects(parts) for piece in part)
    pieces = [piece_outcomes for _, piece_outcomes in sorted(gathered, key=lambda piece: piece[0])]
    kept: dict[int, Outcomes] = {}
    failed: dict[int, str] = {}
    for index in models:
        mine = [piece_outcomes[index] for piece_outcomes in pieces]
        error = next((item for item in mine if isinstance(item, str)), None)
        if error is not None:
            failed[index] = error
        else:
            kept[index] = {name: np.concatenate([item[name] for item in mine]) for name in mine[0]}
    return kept, failed


def background_of(models: Iterable[EvaluationModel]) -> Colour:
    """The background that models were trained with.

    Raises:
        TaskError: They were trained with several.
    """
    colours = {model.architecture.background for model in models}
    if len(colours) > 1:
        raise TaskError("The checkpoints were trained with different data.background: evaluate them one by one.")
    return colours.pop()


def _my_images(
    session: Session, opened: OpenedTask, models: Mapping[int, EvaluationModel], texts: Mapping[int, Tensor]
) -> list[tuple[int, dict[int, Outcomes | str]]]:
    """This process's micro-batches: their numbers, and per model the values to keep or the error.

    A work item is one micro-batch for one model, so that several checkpoints keep all threads busy on small tasks.
    """
    source, device, config = opened.data.images, session.compute.device, session.config
    background = background_of(models.values()) if opened.data.on_background else None
    cache = None
    if config.cache:
        digest = data_digest(opened.files, opened.data.columns)
        cache = PixelCache(Path(config.cache), data=digest, micro_batch=config.micro_batch, background=background)
    on_device = {index: texts[index].to(device) for index in models}
    keys = {index: preprocessing_key(model) for index, model in models.items()}
    reading = ImagePass(
        source,
        {keys[index]: model.preprocess for index, model in models.items()},
        micro_batch=config.micro_batch,
        batch_size=config.batch_size,
        workers=config.loader_workers(session.world.cores),
        cache=cache,
        background=background,
        rank=session.world.rank,
        size=session.world.size,
    )

    def work() -> Iterator[tuple[int, int, int, Tensor]]:
        for number, valid, tensors in reading.run(pin=device.type == "cuda"):
            session.world.progress()
            moved = {key: tensor.to(device, non_blocking=True) for key, tensor in tensors.items()}
            yield from ((number, valid, index, moved[keys[index]]) for index in models)

    def encode(number: int, valid: int, index: int, pixels: Tensor) -> tuple[int, int, Outcomes | str]:
        start = number * config.micro_batch
        with session.compute.encoding():
            features = models[index].encode_image(pixels)[:valid]
        try:
            check_finite(features, what=lambda row: source.name(start + row))
            return number, index, opened.protocol.keep(features, on_device[index], start=start)
        except TaskError as error:
            return number, index, str(error)

    def check_unchanged() -> None:
        try:
            opened.data.check_unchanged()
        except TaskError:
            if cache is not None:
                cache.remove(keys.values())
            raise

    outcomes: dict[int, dict[int, Outcomes | str]] = {}
    try:
        for number, index, kept in session.compute.map(encode, work()):
            outcomes.setdefault(number, {})[index] = kept
    except Exception:
        check_unchanged()  # says more, and images that were cached until then may be of changed files
        raise
    check_unchanged()
    return list(outcomes.items())
