"""Evaluate checkpoints on a suite, task by task: one pass over a task's images serves all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.evaluation.datasets.suite import Entry, Suite, check_digests, is_official, open_task
from pipeline.evaluation.datasets.task_data import TaskData, TaskError
from pipeline.evaluation.protocols.association import Association
from pipeline.evaluation.protocols.classification import ZeroShot
from pipeline.evaluation.protocols.retrieval import Retrieval
from pipeline.evaluation.runner import results
from pipeline.evaluation.runner.encode import ClassifierCache, Kept, image_pass, text_features
from pipeline.evaluation.runner.examples import write_examples
from pipeline.evaluation.runner.results import TaskResult
from pipeline.evaluation.runner.session import EvaluationConfig as EvaluationConfig
from pipeline.evaluation.runner.session import Session
from pipeline.model.evaluation_model import EvaluationModel

PROTOCOLS: dict[str, Callable[..., Any]] = {
    "classification": ZeroShot,
    "retrieval": Retrieval,
    "association": Association,
}
CLASSIFIERS = "classifiers"


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

    def path(self, entry: Entry) -> Path:
        """The file of a task's result."""
        return self.folder / f"{entry.task.stem}.json"


class Evaluator:
    """Evaluates the models of `evaluations` together; a failed task or checkpoint never hides the others."""

    def __init__(self, evaluations: Sequence[Evaluation], *, session: Session) -> None:
        self.evaluations, self.session = list(evaluations), session
        self._classifiers = ClassifierCache(session)

    def run(self, suite: Suite, *, progress: Callable[[str, Sequence[Evaluation]], None] | None = None) -> None:
        """Every task of the suite; `progress` is told of each one that is done."""
        with self.session.compute:
            for entry in suite.entries:
                try:
                    self._task(entry)
                except TaskError as error:
                    for evaluation in self.evaluations:
                        self._fail(evaluation, entry, str(error))
                if progress is not None:
                    progress(entry.task.key, self.evaluations)

    def _task(self, entry: Entry) -> None:
        started = time.perf_counter()
        session, config = self.session, self.session.config
        data = session.together(lambda: open_task(entry, blank_class=config.blank_class))
        files = self._digests(data)
        check_digests(entry, files)
        protocol = session.together(lambda: PROTOCOLS[entry.task.protocol](entry.task, data))
        inputs = [self._inputs(evaluation.model, data, files) for evaluation in self.evaluations]
        wanted = self._wanted(entry, inputs)
        encoded = {index: self._texts(index, protocol, entry) for index in wanted}
        texts = {index: features for index, features in encoded.items() if features is not None}
        if not texts:
            return
        models = {index: self.evaluations[index].model for index in texts}
        kept, failed = image_pass(session, protocol, models, texts)
        for index, message in failed.items():
            self._fail(self.evaluations[index], entry, message)
        for index, found in kept.items():
            self._score(self.evaluations[index], entry, protocol, (found, texts[index], inputs[index]))
        seconds = time.perf_counter() - started
        speed = {"seconds": seconds, "images": len(data.images), "images_per_second": len(data.images) / seconds}
        for index in kept:
            self.evaluations[index].timings[entry.task.key] = {**speed, "checkpoints": len(models)}

    def _digests(self, data: TaskData) -> dict[str, str]:
        """SHA-256 of every file of a task by its name within the folder; the processes share the hashing."""
        world, merged = self.session.world, {}
        mine = data.files[world.rank :: world.size]
        for part in world.gather_objects(self.session.together(lambda: results.file_digests(mine, data.folder))):
            merged.update(part)
        return dict(sorted(merged.items()))

    def _inputs(self, model: EvaluationModel, data: TaskData, files: Mapping[str, str]) -> dict[str, Any]:
        config = self.session.config
        settings = {
            "blank_class": config.blank_class,
            "micro_batch": config.micro_batch,
            "precision": "fp32",
            "device": self.session.compute.name(),
        }
        return results.inputs_of(model, data, files=files, settings=settings)

    def _wanted(self, entry: Entry, inputs: Sequence[Mapping[str, Any]]) -> list[int]:
        """Which checkpoints need this task: the first process looks, so that all agree."""

        def look() -> list[TaskResult | None]:
            if self.session.config.recompute:
                return [None] * len(inputs)
            return [results.read_result(evaluation.path(entry)) for evaluation in self.evaluations]

        wanted = []
        for index, (result, wished) in enumerate(zip(self.session.on_main(look), inputs, strict=True)):
            if result is not None and result.inputs == wished:
                self.evaluations[index].results[entry.task.key] = result
                self.evaluations[index].reused.add(entry.task.key)
            else:
                wanted.append(index)
        return wanted

    def _texts(self, index: int, protocol: Any, entry: Entry) -> Tensor | None:
        evaluation = self.evaluations[index]
        try:
            if entry.task.protocol != "classification":  # captions and cues belong to one task alone
                return text_features(self.session, evaluation.model, protocol.texts)
            return self._classifiers.get(evaluation.model, protocol.texts, folder=evaluation.folder / CLASSIFIERS)
        except TaskError as error:
            self._fail(evaluation, entry, str(error))
            return None

    def _score(
        self, evaluation: Evaluation, entry: Entry, protocol: Any, parts: tuple[Kept, Tensor, Mapping[str, Any]]
    ) -> None:
        kept, texts, inputs = parts
        task = entry.task

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
                samples=protocol.data.samples,
                official=is_official(entry, protocol.data),
                inputs=inputs,
            )
            if task.protocol == "retrieval" and self.session.config.examples:
                features = (torch.from_numpy(kept["features"]), texts[protocol.texts.rows])
                folder = evaluation.folder / f"{task.stem}.examples"
                write_examples(folder, protocol.data, features=features, count=self.session.config.examples)
            results.write_result(evaluation.path(entry), result, outcomes)
            return result

        try:
            evaluation.results[task.key] = self.session.on_main(score)
        except TaskError as error:
            self._fail(evaluation, entry, str(error))

    def _fail(self, evaluation: Evaluation, entry: Entry, message: str) -> None:
        """Record a failure; an older result that could not be confirmed steps aside, but is not lost."""
        evaluation.failures[entry.task.key] = message
        path = evaluation.path(entry)
        if self.session.world.rank == 0 and path.exists():
            path.replace(path.with_suffix(".json.stale"))
