"""Adds the scores of a run's checkpoints as TensorBoard scalars to those written by training."""

from __future__ import annotations

import errno
import shutil
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from pipeline.report.stored_scores import StoredEvaluation, read_evaluations

FOLDER = Path("tensorboard") / "evaluation"


def update_scores(run: str | Path) -> None:
    """Write the scores in a run's folder as TensorBoard scalars, if the run logs to TensorBoard and has any.

    Evaluations, watchers and reports call it. If the disk refuses it, that is printed: the scores themselves are safe.
    """
    folder = Path(run)
    if not (folder / FOLDER.parent).is_dir():
        return
    evaluations = read_evaluations(folder / "evaluation", lambda step: None, [])
    if evaluations:
        try:
            write_scores(folder, evaluations)
        except OSError as error:
            print(f"{folder / FOLDER} cannot be written ({error}): scores are missing in TensorBoard.", file=sys.stderr)


def write_scores(run: Path, evaluations: Sequence[StoredEvaluation]) -> Path:
    """Write every score and complete aggregate at the checkpoint's step, replacing earlier ones.

    Several watchers may do so at a time: every file is complete when it appears.

    Returns:
        The folder, a sub-run of RUN/tensorboard.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder = run / FOLDER
    new = run / f".{FOLDER.name}-{uuid.uuid4().hex}"
    try:
        with SummaryWriter(str(new)) as writer:
            for evaluation in evaluations:
                if evaluation.step is None:
                    continue
                for score in evaluation.scores:
                    writer.add_scalar(f"evaluation/{score.task}", score.score, evaluation.step)
                for name, value in evaluation.aggregates.items():
                    if value.get("complete"):
                        writer.add_scalar(f"aggregate/{name}", value["score"], evaluation.step)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # else another watcher was faster
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return folder
