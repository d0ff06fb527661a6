"""Preparation before the first task: output folders, the lock of earlier evaluations, and tasks that are gone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import UserError
from pipeline.evaluation.datasets.suite import Suite
from pipeline.evaluation.datasets.task_data import TaskError
from pipeline.evaluation.runner.checkpoint_evaluation import Evaluation
from pipeline.evaluation.runner.checkpoint_model import notes_on
from pipeline.evaluation.runner.output import check_output, lock_path, output_folders
from pipeline.evaluation.runner.session import Session
from pipeline.evaluation.runner.suite_lock import SuiteLock
from pipeline.model.evaluation_model import EvaluationModel


def prepare(
    models: Sequence[EvaluationModel], suite: Suite, *, output: str | Path | None, session: Session
) -> tuple[list[Evaluation], Suite]:
    """The evaluations to run, and the suite with tasks that it had when first evaluated here and that are gone now.

    The first process reads the locks, so that all processes decide alike.

    Raises:
        UserError: Results cannot be written, or a lock is damaged.
    """
    folders = output_folders([model.source for model in models], output)
    paths = [lock_path(folder, several=output is not None and len(models) > 1) for folder in folders]

    def read() -> dict[Path, SuiteLock]:
        for folder in folders:
            check_output(folder)
        return {path: SuiteLock.read(path) for path in paths}

    try:
        locks = session.on_main(read)
    except TaskError as error:
        raise UserError(str(error)) from error
    whole = len(suite.entries) == len(suite.keys)
    if whole and not session.config.relock:
        suite = suite.with_lost(list(dict.fromkeys(key for lock in locks.values() for key in lock.lost(suite))))
    evaluations = [
        Evaluation(model, folder, locks[path], notes=tuple(notes_on(model)))
        for model, folder, path in zip(models, folders, paths, strict=True)
    ]
    return evaluations, suite
