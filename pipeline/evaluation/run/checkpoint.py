"""A checkpoint as an evaluation sees it: its model, and where its results go.

Results have one folder per checkpoint; the lock of a suite is one for all checkpoints of a run.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from pipeline.errors import UserError
from pipeline.evaluation.datasets.suite import Suite
from pipeline.evaluation.datasets.task_data import TaskError, plain
from pipeline.evaluation.identity import LOCK_NAME, SuiteLock, conditions
from pipeline.evaluation.run.results import Evaluation
from pipeline.evaluation.run.session import Session
from pipeline.model.evaluation_model import EvaluationModel, load_for_evaluation
from pipeline.run_files import EMA_NAME, FOLDER_NAME, PREFIX

LONGEST_NAME = 80


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
    folders = _output_folders([model.source for model in models], output)
    paths = [lock_path(folder, several=output is not None and len(models) > 1) for folder in folders]

    def read() -> dict[Path, SuiteLock]:
        for folder in folders:
            _make_output(folder)
        return {path: SuiteLock.read(path) for path in paths}

    try:
        locks = session.on_main(read)
    except TaskError as error:
        raise UserError(str(error)) from error
    whole = len(suite.entries) == len(suite.keys)
    if whole and not session.config.relock:
        suite = suite.with_lost(list(dict.fromkeys(key for lock in locks.values() for key in lock.lost(suite))))
    conditions_of = session.on_main(lambda: [conditions(model, session) for model in models])
    evaluations = [
        Evaluation(model, folder, locks[path], conditions=same)
        for model, folder, path, same in zip(models, folders, paths, conditions_of, strict=True)
    ]
    return evaluations, suite


def _output_folders(sources: Sequence[str], output: str | Path | None) -> list[Path]:
    """One folder per checkpoint."""
    if output is None:
        folders = [default_folder(source) for source in sources]
    elif len(sources) == 1:
        folders = [Path(output)]
    else:
        names = [checkpoint_name(source) for source in sources]
        folders = [
            Path(output) / (name if names.count(name) == 1 else f"{name}-{_short_digest(source)}")
            for name, source in zip(names, sources, strict=True)
        ]
    twice = {folder for folder in folders if folders.count(folder) > 1}
    if twice:
        raise UserError(
            f"Several checkpoints would write to {min(twice)}: give each once, or evaluate them in calls of "
            "their own, each with an --output of its own."
        )
    return folders


def _make_output(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"--output {plain(output, longest=200)} cannot be a folder: {reason}. Give another.") from error
    if not os.access(output, os.W_OK | os.X_OK):
        raise UserError(f"Results cannot be written to {output}: it is read-only. Give another --output.")


def checkpoint_name(source: str) -> str:
    """A short folder name: `step-00000500` for a folder, `ViT-B-32-openai` for ARCH:PRETRAINED."""
    arch, colon, pretrained = source.partition(":")
    if Path(source).is_dir() or not colon:
        name = Path(source).resolve().name
    else:
        weights = Path(pretrained)
        name = f"{Path(arch).name.removesuffix('.json')}-{weights.stem if weights.is_file() else weights.name}"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 9]}-{_short_digest(source)}"


def default_folder(source: str) -> Path:
    """RUN/evaluation/<checkpoint> for RUN/checkpoints/<checkpoint>, else evaluation/<name> below the current folder.

    For the average of the weights in a checkpoint: RUN/evaluation-ema/<checkpoint>.
    """
    path = Path(source).resolve()
    if path.is_dir() and path.name == EMA_NAME and path.parent.parent.name == FOLDER_NAME:
        return path.parents[2] / "evaluation-ema" / path.parent.name
    if path.is_dir() and path.parent.name == FOLDER_NAME:
        return path.parent.parent / "evaluation" / path.name
    return Path("evaluation") / checkpoint_name(source)


def lock_path(folder: Path, *, several: bool) -> Path:
    """Where the lock of a suite is: one for all checkpoints of a run or of a call, else beside the results."""
    shared = several or (folder.name.startswith(PREFIX) and folder.parent.name == "evaluation")
    return (folder.parent if shared else folder) / LOCK_NAME


def _short_digest(source: str) -> str:
    return hashlib.sha256(str(Path(source).resolve()).encode()).hexdigest()[:8]
