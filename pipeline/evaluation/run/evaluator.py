"""Evaluate checkpoints on a suite, task by task: one pass over a task's images serves all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.evaluation.datasets.suite import Entry, Suite, is_official, open_task
from pipeline.evaluation.datasets.task_data import TaskData, TaskError, check_digests, file_digests, plain
from pipeline.evaluation.identity import definition, identity_of
from pipeline.evaluation.protocol import PROTOCOLS, Outcomes
from pipeline.evaluation.run.features import OpenedTask, image_pass, text_features
from pipeline.evaluation.run.results import Evaluation, TaskResult, read_outcomes, read_result, write_result
from pipeline.evaluation.run.session import Session


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
        session, config = self.session, self.session.config
        data = session.together(
            lambda: open_task(entry, blank_class=config.blank_class, allow_outside=config.allow_outside)
        )
        files = self._digests(data)
        key, expected = entry.task.key, entry.expected.get("sha256", {})
        check_digests(key, files, expected, folder=entry.folder, written="was recorded with the data")
        protocol = session.together(lambda: PROTOCOLS[entry.task.protocol](entry.task, data))
        return OpenedTask(entry, data, files, protocol)

    def _digests(self, data: TaskData) -> dict[str, str]:
        """SHA-256 of every file of a task by its name within the folder; the processes share the hashing."""
        world, merged = self.session.world, {}
        mine = data.files[world.rank :: world.size]

        def digests() -> dict[str, str]:
            hashed: dict[str, str] = {}
            for file in mine:
                hashed |= file_digests([file], data.folder)
                world.progress()
            return hashed

        for part in world.gather_objects(self.session.together(digests)):
            merged.update(part)
        return dict(sorted(merged.items()))

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
