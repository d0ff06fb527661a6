"""Evaluate checkpoints on a suite, task by task: one pass over a task's images serves all of them.

Shape legend: M micro-batch, d feature dimension.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.evaluation.datasets.suite import Entry, Suite, is_official, open_task
from pipeline.evaluation.datasets.task_data import TaskData, TaskError, check_digests, file_digests, plain
from pipeline.evaluation.identity import definition, identity_of
from pipeline.evaluation.protocol import PROTOCOLS, Outcomes, Protocol
from pipeline.evaluation.protocols.texts import TextSide, check_finite
from pipeline.evaluation.run.images import ImagePass, preprocessing_key
from pipeline.evaluation.run.results import Evaluation, TaskResult, read_outcomes, read_result, write_result
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


class Evaluator:
    """Evaluates the models of `evaluations` together; a failed task or checkpoint does not stop the others."""

    def __init__(self, evaluations: Sequence[Evaluation], *, session: Session) -> None:
        self.evaluations, self.session = list(evaluations), session
        self._texts_of: dict[tuple[int, str], Tensor] = {}
        """The text features of classification tasks, some of which have the same prompts."""

    def run(self, suite: Suite, *, progress: Callable[[str, Sequence[Evaluation]], None] | None = None) -> None:
        """Evaluate every task of the suite. `progress` is called after each."""
        with self.session.compute:
            for entry in suite.entries:
                try:
                    self._task(entry, suite)
                except TaskError as error:
                    for evaluation in self.evaluations:
                        self._fail(evaluation, entry, str(error))
                if progress is not None:
                    progress(entry.task.key, self.evaluations)

    def _task(self, entry: Entry, suite: Suite) -> None:
        self.session.world.progress()
        started = time.perf_counter()
        opened = self._open(entry)
        inputs = [identity_of(e.conditions, entry, opened.data, files=opened.files) for e in self.evaluations]
        wanted = self._wanted(opened, inputs)
        encoded = {index: self._texts(index, opened) for index in wanted}
        texts = {index: features for index, features in encoded.items() if features is not None}
        if texts:
            models = {index: self.evaluations[index].model for index in texts}
            kept, failed = image_pass(self.session, opened, models, texts)
            for index, message in failed.items():
                self._fail(self.evaluations[index], entry, message)
            for index, parts in kept.items():
                self._score(self.evaluations[index], opened, (parts, texts[index], inputs[index]))
            seconds, images = time.perf_counter() - started, len(opened.data.images)
            speed = {"seconds": seconds, "images": images, "images_per_second": images / seconds}
            for index in kept:
                self.evaluations[index].timings[entry.task.key] = {**speed, "checkpoints": len(models)}
        self._lock(opened, suite)

    def _open(self, entry: Entry) -> OpenedTask:
        """Open and check a task; the processes share the hashing of its files."""
        session, config = self.session, self.session.config
        data = session.together(
            lambda: open_task(entry, blank_class=config.blank_class, allow_outside=config.allow_outside)
        )
        world, files = session.world, dict[str, str]()

        def hash_mine() -> dict[str, str]:
            mine: dict[str, str] = {}
            for file in data.files[world.rank :: world.size]:
                mine |= file_digests([file], data.folder)
                world.progress()
            return mine

        for part in world.gather_objects(session.together(hash_mine)):
            files |= part
        files = dict(sorted(files.items()))
        key, expected = entry.task.key, entry.expected.get("sha256", {})
        check_digests(key, files, expected, folder=entry.folder, written="was recorded with the data")
        protocol = session.together(lambda: PROTOCOLS[entry.task.protocol](entry.task, data))
        return OpenedTask(entry, data, files, protocol)

    def _lock(self, opened: OpenedTask, suite: Suite) -> None:
        """Record the data of a task that was scored."""
        key, relock = opened.entry.task.key, self.session.config.relock
        scored = [evaluation.lock for evaluation in self.evaluations if key in evaluation.results]
        changed = [lock for lock in scored if lock.add(key, opened.data, opened.files) or relock]

        def write() -> None:
            for lock in changed:
                lock.write(suite, replacing=relock)

        self.session.on_main(write)

    def _wanted(self, opened: OpenedTask, inputs: Sequence[Mapping[str, Any]]) -> list[int]:
        """Which checkpoints need this task; the first process decides, so that all agree.

        Those that were first evaluated on other data fail.
        """
        config, key, wanted = self.session.config, opened.entry.task.key, []

        def read(path: Path) -> TaskResult | None:
            result = None if config.recompute else read_result(path)
            return result if result is not None and read_outcomes(path, result.outcomes) is not None else None

        stored = self.session.on_main(lambda: [read(evaluation.path(opened.entry)) for evaluation in self.evaluations])
        for index, evaluation in enumerate(self.evaluations):
            try:
                if not config.relock:
                    evaluation.lock.check(key, opened.data, opened.files)
            except TaskError as error:
                self._fail(evaluation, opened.entry, str(error))
                continue
            result = stored[index]
            if result is not None and result.task == key and result.inputs == inputs[index]:
                evaluation.results[key] = result
                evaluation.reused.add(key)
            else:
                wanted.append(index)
        return wanted

    def _texts(self, index: int, opened: OpenedTask) -> Tensor | None:
        evaluation, side = self.evaluations[index], opened.protocol.texts
        key = (index, side.digest)
        try:
            features = self._texts_of.get(key)
            if features is None:
                features = text_features(self.session, evaluation.model, side)
                if opened.data.classnames:
                    self._texts_of[key] = features
            return features
        except TaskError as error:
            self._fail(evaluation, opened.entry, str(error))
            return None

    def _score(
        self, evaluation: Evaluation, opened: OpenedTask, parts: tuple[Outcomes, Tensor, Mapping[str, Any]]
    ) -> None:
        self.session.world.progress()
        kept, texts, inputs = parts
        task, protocol, path = opened.entry.task, opened.protocol, evaluation.path(opened.entry)

        def score() -> TaskResult:
            outcomes = protocol.finish(kept, texts)
            metrics = protocol.metrics(outcomes)
            result = TaskResult(
                task=task.key,
                name=task.name,
                protocol=task.protocol,
                main_metric=task.main_metric,
                score=metrics[task.main_metric],
                metrics=metrics,
                chance=protocol.chance(),
                samples=opened.data.samples,
                official=is_official(opened.entry, opened.data),
                inputs=inputs,
            )
            protocol.write_details(path.with_suffix(""), outcomes=outcomes, kept=kept, texts=texts)
            return write_result(path, result, outcomes)

        try:
            evaluation.results[task.key] = self.session.on_main(score)
        except TaskError as error:
            self._fail(evaluation, opened.entry, str(error))

    def _fail(self, evaluation: Evaluation, entry: Entry, message: str) -> None:
        """Record a failure. An older result that could not be confirmed is renamed, not deleted.

        A result of the same task in another suite, which only has the same key, stays as it is. So does one of a task
        whose data is not where a `tasks.yaml` says: the place may be misspelt.
        """
        evaluation.failures[entry.task.key] = plain(message, longest=1200)
        path = evaluation.path(entry)
        if self.session.world.rank != 0 or (entry.own is not None and not entry.is_there):
            return
        stored = read_result(path)
        if stored is not None and entry.folder is not None and stored.inputs.get("task") != definition(entry):
            return
        with suppress(OSError):  # then the summary cannot be written either, which ends all processes alike
            path.replace(path.with_suffix(".json.stale"))


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
    kept: dict[int, list[Outcomes]] = {index: [] for index in models}
    failed: dict[int, str] = {}
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
) -> list[tuple[int, int, Outcomes | str]]:
    """This process's micro-batches: number, model, and the values to keep or the error.

    A work item is one micro-batch for one model, so that several checkpoints keep all threads busy on small tasks.
    """
    source, device, config = opened.data.images, session.compute.device, session.config
    background = background_of(models.values()) if opened.data.on_background else None
    on_device = {index: texts[index].to(device) for index in models}
    keys = {index: preprocessing_key(model) for index, model in models.items()}
    reading = ImagePass(
        source,
        {keys[index]: model.preprocess for index, model in models.items()},
        micro_batch=config.micro_batch,
        batch_size=config.batch_size,
        workers=config.loader_workers(session.world.cores),
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

    try:
        pieces = list(session.compute.map(encode, work()))
    except Exception:
        opened.data.check_unchanged()  # says more
        raise
    opened.data.check_unchanged()
    return pieces
