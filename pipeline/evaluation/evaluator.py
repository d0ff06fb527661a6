"""Evaluate checkpoints on a suite: one pass over every task's images serves all of them.

Shape legend: M micro-batch, d feature dimension.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.errors import UserError
from pipeline.evaluation import results
from pipeline.evaluation.association import Association
from pipeline.evaluation.classification import ZeroShot
from pipeline.evaluation.compute import Compute
from pipeline.evaluation.data import TaskData, TaskError
from pipeline.evaluation.images import ImagePass, preprocessing_key
from pipeline.evaluation.results import TaskResult
from pipeline.evaluation.retrieval import Retrieval
from pipeline.evaluation.suite import Entry, Suite, open_task
from pipeline.evaluation.tasks import TASKS
from pipeline.evaluation.texts import check_finite
from pipeline.evaluation.webdataset import BlankClass
from pipeline.evaluation.world import Processes, first_error
from pipeline.model import EvaluationModel

T = TypeVar("T")
PROTOCOLS: dict[str, Callable[..., Any]] = {
    "classification": ZeroShot,
    "retrieval": Retrieval,
    "association": Association,
}


@section
class EvaluationConfig:
    """How to evaluate. Only `micro_batch` and `blank_class` can change a score, and results record them.

    batch_size: images per loader item. micro_batch: images or texts computed together, padded to this size.
    workers: processes that decode images, per process of the evaluation. threads: CPU threads (None: torch's number).
    blank_class: what a blank line of classnames.txt is. examples: captions whose retrieved images are saved.
    recompute: also what is there already with the same inputs.
    """

    batch_size: int = Field(default=64, ge=1)
    micro_batch: int = Field(default=64, ge=1)
    workers: int = Field(default=2, ge=0)
    threads: int | None = Field(default=None, ge=1)
    blank_class: BlankClass = "keep"
    examples: int = Field(default=8, ge=0)
    recompute: bool = False


@dataclass
class Evaluation:
    """What became of one checkpoint: results and failures by task key, and how long each task took.

    reused: keys of results that were there already with the same inputs.
    """

    model: EvaluationModel
    folder: Path
    results: dict[str, TaskResult] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    timings: dict[str, dict[str, float]] = field(default_factory=dict)
    reused: set[str] = field(default_factory=set)

    def path(self, stem: str) -> Path:
        return self.folder / f"{stem}.json"


class Evaluator:
    """Evaluates `evaluations`' models task by task; a failed task never hides the others."""

    def __init__(
        self, evaluations: Sequence[Evaluation], *, config: EvaluationConfig, world: Processes, device: torch.device
    ) -> None:
        self.evaluations, self.config, self.world = list(evaluations), config, world
        self.compute = Compute(device, threads=config.threads)
        self._transforms = {preprocessing_key(e.model): e.model.preprocess for e in evaluations}
        self._texts: dict[tuple[str, str], Tensor] = {}

    def run(self, suite: Suite, *, progress: Callable[[str, Sequence[Evaluation]], None] | None = None) -> None:
        """Every task of the suite; `progress` is told of each one that is done."""
        with self.compute:
            for entry in suite.entries:
                try:
                    self._task(entry)
                except TaskError as error:
                    for evaluation in self.evaluations:
                        evaluation.failures[entry.task.key] = str(error)
                if progress is not None:
                    progress(entry.task.key, self.evaluations)

    def _task(self, entry: Entry) -> None:
        task, started = entry.task, time.perf_counter()
        data = self._together(lambda: open_task(entry, blank_class=self.config.blank_class))
        digest, files = results.data_digest(data, world=self.world)
        _check_digests(entry, files)
        protocol = self._together(lambda: PROTOCOLS[task.protocol](task, data))
        inputs = [self._inputs(evaluation.model, data, digest) for evaluation in self.evaluations]
        wanted = self._wanted(entry, inputs)
        encoded = {index: self._text_features(index, protocol, entry) for index in wanted}
        texts = {index: features for index, features in encoded.items() if features is not None}
        if not texts:
            return
        kept = self._image_pass(protocol, texts, entry)
        for index in texts:
            if task.key in self.evaluations[index].failures:
                continue
            self._finish(index, protocol, entry, (kept[index], texts[index], inputs[index]))
            seconds = time.perf_counter() - started
            self.evaluations[index].timings[task.key] = {
                "seconds": seconds,
                "images": len(data.images),
                "images_per_second": len(data.images) / seconds,
                "checkpoints": len(texts),
            }

    def _together(self, action: Callable[[], T]) -> T:
        """Do `action` on every process; when one fails, all leave with its error."""
        value, error = attempt(action)
        message = first_error(self.world, error)
        if message is not None:
            raise TaskError(message)
        assert value is not None
        return value

    def _inputs(self, model: EvaluationModel, data: TaskData, digest: str) -> dict[str, Any]:
        settings = {
            "blank_class": self.config.blank_class,
            "micro_batch": self.config.micro_batch,
            "precision": "fp32",
            "device": self.compute.name(),
        }
        return results.inputs_of(model, data, data_digest=digest, settings=settings)

    def _wanted(self, entry: Entry, inputs: Sequence[Mapping[str, Any]]) -> list[int]:
        """Which checkpoints need this task: the first process looks, so that all agree."""
        found: list[TaskResult | None] = [None] * len(inputs)
        if self.world.rank == 0 and not self.config.recompute:
            found = [results.read_result(e.path(entry.task.stem)) for e in self.evaluations]
        found = self.world.gather_objects(found)[0]
        wanted = []
        for index, (result, wished) in enumerate(zip(found, inputs, strict=True)):
            if result is not None and result.inputs == wished:
                self.evaluations[index].results[entry.task.key] = result
                self.evaluations[index].reused.add(entry.task.key)
            else:
                wanted.append(index)
        return wanted

    def _text_features(self, index: int, protocol: Any, entry: Entry) -> Tensor | None:
        model, side = self.evaluations[index].model, protocol.texts
        key = (model.digest, side.digest)
        if key not in self._texts:

            def encode() -> dict[int, Tensor]:
                mine = range(self.world.rank, len(side.units), self.world.size)
                settings = {"compute": self.compute, "micro_batch": self.config.micro_batch}
                return {unit: side.encode(model, unit, **settings) for unit in mine}

            parts, error = attempt(encode)
            error = first_error(self.world, error)
            if error is not None:
                self.evaluations[index].failures[entry.task.key] = error
                return None
            merged: dict[int, Tensor] = {}
            for part in self.world.gather_objects(parts):
                merged.update(part)
            self._texts[key] = side.assemble([merged[unit] for unit in range(len(side.units))])
        return self._texts[key]

    def _image_pass(self, protocol: Any, texts: Mapping[int, Tensor], entry: Entry) -> dict[int, dict[str, np.ndarray]]:
        """What the protocol keeps of every image, for every checkpoint in `texts`, in the order of the images."""
        parts, error = attempt(lambda: self._my_images(protocol, texts))
        message = first_error(self.world, error)
        if message is not None:
            raise TaskError(message)
        pieces = sorted((piece for part in self.world.gather_objects(parts) for piece in part), key=lambda p: p[0])
        kept = {}
        for index in texts:
            mine = [found[index] for _, found in pieces]
            failed = next((item for item in mine if isinstance(item, str)), None)
            if failed is not None:
                self.evaluations[index].failures[entry.task.key] = failed
                continue
            kept[index] = {name: np.concatenate([item[name] for item in mine]) for name in mine[0]}
        return kept

    def _my_images(self, protocol: Any, texts: Mapping[int, Tensor]) -> list[tuple[int, dict[int, Any]]]:
        source, device = protocol.data.images, self.compute.device
        on_device = {index: features.to(device) for index, features in texts.items()}
        keys = {index: preprocessing_key(self.evaluations[index].model) for index in texts}
        transforms = {key: self._transforms[key] for key in dict.fromkeys(keys.values())}
        config = self.config
        images = ImagePass(
            source, transforms, micro_batch=config.micro_batch, batch_size=config.batch_size, workers=config.workers
        )

        def encode(number: int, valid: int, tensors: dict[str, Tensor]) -> tuple[int, dict[int, Any]]:
            start = number * config.micro_batch
            moved = {key: tensor.to(device, non_blocking=True) for key, tensor in tensors.items()}
            found: dict[int, Any] = {}
            for index, text in on_device.items():
                features = self.evaluations[index].model.encode_image(moved[keys[index]])[:valid]
                try:
                    check_finite(features, what=lambda row: source.name(start + row))
                    found[index] = protocol.keep(features, text, start=start)
                except TaskError as error:
                    found[index] = str(error)
            return number, found

        passed = images.run(rank=self.world.rank, size=self.world.size, pin=device.type == "cuda")
        return list(self.compute.map(encode, passed))

    def _finish(self, index: int, protocol: Any, entry: Entry, parts: tuple[Any, Tensor, dict[str, Any]]) -> None:
        kept, texts, inputs = parts
        evaluation, task, data = self.evaluations[index], entry.task, protocol.data
        result, error = None, None
        if self.world.rank == 0:

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
                    samples=data.samples,
                    official=is_official(entry, data),
                    inputs=inputs,
                )
                if task.protocol == "retrieval" and self.config.examples:
                    from pipeline.evaluation.examples import write_examples

                    write_examples(
                        evaluation.folder / f"{task.stem}.examples",
                        data,
                        images=torch.from_numpy(kept["features"]),
                        captions=texts,
                        count=self.config.examples,
                    )
                results.write_result(evaluation.path(task.stem), result, outcomes)
                return result

            result, error = attempt(score)
        result, error = self.world.gather_objects((result, error))[0]
        if error is not None:
            evaluation.failures[task.key] = error
        else:
            evaluation.results[task.key] = result


def attempt(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """The value of `action`, or what went wrong: one task's fault must not end the others."""
    try:
        return action(), None
    except UserError as error:
        return None, str(error)
    except Exception as error:
        return None, f"Unexpected {type(error).__name__}: {error}. This is likely a fault of the program."


def is_official(entry: Entry, data: TaskData) -> bool:
    """Whether the data has the official counts of a task in the table."""
    task = entry.task
    classes = len(data.classnames) + data.blank_classes
    return task.key in TASKS and data.samples == task.samples and task.classes in (None, classes)


def _check_digests(entry: Entry, files: Mapping[str, str]) -> None:
    expected: Mapping[str, str] = entry.expected.get("sha256", {})
    wrong: Iterable[str] = [name for name in expected if name in files and files[name] != expected[name]]
    wrong = [*wrong, *(name for name in expected if name not in files)]
    if wrong:
        raise TaskError(
            f"{entry.task.key}: the SHA-256 of {', '.join(list(wrong)[:3])} is not the expected one. Fetch it again."
        )
