"""Evaluate checkpoints on a suite, task by task: one pass over a task's images serves all of them.

Shape legend: M micro-batch, d feature dimension.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.evaluation.compute import TextSide
from pipeline.evaluation.datasets.datacomp import TASKS, Task
from pipeline.evaluation.datasets.suite import Entry, Suite, open_task
from pipeline.evaluation.datasets.task_data import ACCEPT, TaskData, TaskError, check_digests, file_digests, plain
from pipeline.evaluation.identity import LOCK_NAME, SuiteLock, conditions, definition, identity_of
from pipeline.evaluation.protocol import PROTOCOLS, Outcomes, Protocol
from pipeline.evaluation.run.images import image_pass
from pipeline.evaluation.run.results import (
    Evaluation,
    TaskResult,
    make_folders,
    output_folders,
    read_outcomes,
    read_result,
    write_result,
)
from pipeline.evaluation.run.session import Session
from pipeline.model.evaluation_model import EvaluationModel, load_for_evaluation
from pipeline.run_files import PREFIX


def load_checkpoint(spec: str, *, device: torch.device) -> EvaluationModel:
    """What `load_for_evaluation` loads.

    Raises:
        UserError: Nothing can be loaded, the weights do not fit the architecture, or a file is damaged.
    """
    try:
        return load_for_evaluation(spec, device=device)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{plain(spec, longest=200)} cannot be read: {error.strerror or plain(error)}.") from error
    except Exception as error:  # open_clip can fail in many ways on a file of another model
        raise UserError(
            f"{spec} cannot be loaded ({type(error).__name__}: {plain(error, longest=200)}): "
            "the weights are damaged, or those of another architecture."
        ) from error


def prepare(
    models: Sequence[EvaluationModel], suite: Suite, *, output: str | Path | None, session: Session
) -> tuple[list[Evaluation], Suite]:
    """The evaluations to run, and the suite with tasks that it had when first evaluated here and that are gone now.

    The first process reads the locks and states the conditions, so that all processes decide alike.

    Raises:
        UserError: Results cannot be written, or a lock is damaged.
    """
    folders = output_folders([model.source for model in models], output)
    several = output is not None and len(models) > 1

    def lock_path(folder: Path) -> Path:
        """One lock for all checkpoints of a run or of a call, else beside the results."""
        shared = several or (folder.name.startswith(PREFIX) and folder.parent.name == "evaluation")
        return (folder.parent if shared else folder) / LOCK_NAME

    paths = list(map(lock_path, folders))
    session.on_main(lambda: make_folders(folders))
    locks = session.on_main(lambda: {path: SuiteLock.read(path) for path in paths})
    if len(suite.entries) == len(suite.keys) and not session.config.relock:
        problem = f"was a task of this suite when first evaluated here, and its data is no longer there. {ACCEPT}"
        keys = dict.fromkeys(key for lock in locks.values() for key in lock.lost(suite))
        lost = tuple(Entry(Task(key, key), None, problem=f"{key} {problem}") for key in keys)
        suite = replace(suite, entries=(*suite.entries, *lost), whole=(*suite.whole, *lost))
    conditions_of = session.on_main(lambda: [conditions(model, session) for model in models])
    evaluations = [
        Evaluation(model, folder, locks[path], conditions=same)
        for model, folder, path, same in zip(models, folders, paths, conditions_of, strict=True)
    ]
    return evaluations, suite


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
                with self._failing(entry, *self.evaluations):
                    self._task(entry, suite)
                if progress is not None:
                    progress(entry.task.key, self.evaluations)

    @contextmanager
    def _failing(self, entry: Entry, *evaluations: Evaluation) -> Iterator[None]:
        """Record an error as a failure of the task for these checkpoints."""
        try:
            yield
        except TaskError as error:
            for evaluation in evaluations:
                self._fail(evaluation, entry, str(error))

    def _task(self, entry: Entry, suite: Suite) -> None:
        session, key = self.session, entry.task.key
        session.world.progress()
        started = time.perf_counter()
        data, files, protocol = self._open(entry)
        inputs = [identity_of(e.conditions, entry, data, files=files) for e in self.evaluations]
        # The first process decides what is reused, so that all agree.
        stored = session.on_main(lambda: [self._stored(evaluation.path(entry)) for evaluation in self.evaluations])
        texts: dict[int, Tensor] = {}
        for index, evaluation in enumerate(self.evaluations):
            with self._failing(entry, evaluation):
                if not session.config.relock:
                    evaluation.lock.check(key, data, files)
                result = stored[index]
                if result is not None and result.task == key and result.inputs == inputs[index]:
                    evaluation.results[key] = result
                    evaluation.reused.add(key)
                else:
                    texts[index] = self._texts(index, protocol.texts, reused=bool(data.classnames))
        if texts:
            models = {index: self.evaluations[index].model for index in texts}
            kept, failed = image_pass(session, data=data, protocol=protocol, models=models, texts=texts)
            for index, message in failed.items():
                self._fail(self.evaluations[index], entry, message)
            for index, parts in kept.items():
                session.world.progress()
                evaluation = self.evaluations[index]
                score = partial(_score, entry.task, data, protocol, path=evaluation.path(entry), kept=parts)
                score = partial(score, texts=texts[index], inputs=inputs[index])
                with self._failing(entry, evaluation):
                    evaluation.results[key] = session.on_main(score)
            seconds, images = time.perf_counter() - started, len(data.images)
            speed = {"seconds": seconds, "images": images, "images_per_second": images / seconds}
            for index in kept:
                self.evaluations[index].timings[key] = {**speed, "checkpoints": len(models)}
        # Record the data of a task that was scored.
        relock, locks = session.config.relock, [e.lock for e in self.evaluations if key in e.results]
        changed = [lock for lock in locks if lock.add(key, data, files) or relock]
        session.on_main(lambda: [lock.write(suite, replacing=relock) for lock in changed])

    def _stored(self, path: Path) -> TaskResult | None:
        """A result whose outcomes are whole, unless everything is computed again."""
        result = None if self.session.config.recompute else read_result(path)
        return result if result is not None and read_outcomes(path, result.outcomes) is not None else None

    def _open(self, entry: Entry) -> tuple[TaskData, dict[str, str], Protocol]:
        """A task's data, checked, and the digests of its files by name; the processes share the hashing."""
        session, config, key = self.session, self.session.config, entry.task.key
        data = session.together(
            lambda: open_task(entry, blank_class=config.blank_class, allow_outside=config.allow_outside)
        )
        digests = session.share(lambda number: file_digests([data.files[number]], data.folder), len(data.files))
        files = dict(sorted(item for digest in digests for item in digest.items()))
        expected = entry.expected.get("sha256", {})
        check_digests(key, files, expected, folder=entry.folder)
        return data, files, session.together(lambda: PROTOCOLS[entry.task.protocol](entry.task, data))

    def _texts(self, index: int, side: TextSide, *, reused: bool) -> Tensor:
        """Text features of a task, [distinct texts, d]; the processes share the work."""
        session, model = self.session, self.evaluations[index].model
        if (index, side.digest) in self._texts_of:
            return self._texts_of[index, side.digest]
        encode = partial(side.encode, model, compute=session.compute, micro_batch=session.config.micro_batch)
        features = torch.cat(session.share(encode, len(side.units)))
        if reused:
            self._texts_of[index, side.digest] = features
        return features

    def _fail(self, evaluation: Evaluation, entry: Entry, message: str) -> None:
        """Record a failure. An older result that could not be confirmed is renamed, not deleted.

        A result of the same task in another suite, which only has the same key, stays as it is.
        """
        evaluation.failures[entry.task.key] = plain(message, longest=1200)
        path = evaluation.path(entry)
        if self.session.world.rank != 0:
            return
        stored = read_result(path)
        if stored is not None and entry.folder is not None and stored.inputs.get("task") != definition(entry):
            return
        with suppress(OSError):  # then the summary cannot be written either, which ends all processes alike
            path.replace(path.with_suffix(".json.stale"))


def _score(
    task: Task,
    data: TaskData,
    protocol: Protocol,
    *,
    path: Path,
    kept: Outcomes,
    texts: Tensor,
    inputs: Mapping[str, Any],
) -> TaskResult:
    """Compute a result from what was kept of the images, and write it."""
    outcomes = protocol.finish(kept, texts)
    metrics, official = protocol.metrics(outcomes), TASKS.get(task.key)
    counts = (data.samples, data.counts.get("classes") if official and official.classes else None)
    result = TaskResult(
        task=task.key,
        name=task.name,
        protocol=task.protocol,
        main_metric=task.main_metric,
        score=metrics[task.main_metric],
        metrics=metrics,
        chance=protocol.chance(),
        samples=data.samples,
        official=official is not None and (official.samples, official.classes) == counts,
        inputs=inputs,
    )
    protocol.write_details(path.with_suffix(""), outcomes=outcomes, kept=kept, texts=texts)
    return write_result(path, result, outcomes)
