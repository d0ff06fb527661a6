"""Adds the scores of a run's checkpoints as TensorBoard scalars to those written by training."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.report.run_data import Run, read_run

FOLDER = Path("tensorboard") / "evaluation"


def update_scores(folder: str | Path) -> None:
    """Write the scores of the run in `folder`, if it logs to TensorBoard and has any."""
    if not (Path(folder) / FOLDER.parent).is_dir():
        return
    run = read_run(folder)
    if run.evaluations:
        write_scores(run)


def write_scores(run: Run) -> Path:
    """Write every score and complete aggregate at the checkpoint's step, replacing earlier ones.

    Returns:
        The folder, a sub-run of RUN/tensorboard.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder = run.folder / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    with SummaryWriter(str(folder)) as writer:
        for evaluation in run.evaluations:
            if evaluation.step is None:
                continue
            for score in evaluation.scores:
                writer.add_scalar(f"evaluation/{score.task}", score.score, evaluation.step)
            for name, value in evaluation.aggregates.items():
                if value.get("complete"):
                    writer.add_scalar(f"aggregate/{name}", value["score"], evaluation.step)
    return folder
