"""Reports: one run as an HTML page and markdown, or a comparison of several runs with tables.

    from pipeline.report import write_report
    page = write_report(["runs/demo"])                # runs/demo/report.html, report.md
    page = write_report(["runs/a", "runs/b"])         # comparison/comparison.html, .md, .csv

Importing this package is cheap.
"""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.files import new_folder


def write_report(runs: Sequence[str | Path], *, output: str | Path | None = None) -> Path:
    """Write the report of one run, or a comparison of several runs with the first as the baseline.

    Args:
        runs: Folders of runs.
        output: Folder to write into; by default the run's own, or `comparison` for several.

    Returns:
        The path of the HTML page; the other files are in the same folder.

    Raises:
        UserError: A folder is not a run, or the runs were evaluated differently.
    """
    from pipeline.report.run_data import read_run

    read = [read_run(folder) for folder in runs]
    if len(read) == 1:
        from pipeline.report.run_page import write_page

        return write_page(read[0], Path(output or read[0].folder))
    from pipeline.report.comparison import write_comparison

    return write_comparison(read, Path(output or "comparison"))


def update_scores(run: str | Path) -> None:
    """Write every score and complete aggregate of a run as TensorBoard scalars, in place of earlier ones.

    Evaluations and watchers call it, several at a time: every file is complete when it appears. A run that
    does not log to TensorBoard is left alone. If the disk refuses it, that is printed: the scores themselves are safe.
    """
    from pipeline.report.stored_scores import read_evaluations

    folder = Path(run) / "tensorboard" / "evaluation"
    evaluations = read_evaluations(Path(run) / "evaluation", lambda step: None, []) if folder.parent.is_dir() else ()
    if not evaluations:
        return
    from torch.utils.tensorboard import SummaryWriter

    try:
        with new_folder(folder) as new:
            with SummaryWriter(str(new)) as writer:
                for one in (evaluation for evaluation in evaluations if evaluation.step is not None):
                    means = {name: mean["score"] for name, mean in one.aggregates.items() if mean.get("complete")}
                    scalars = {f"evaluation/{score.task}": score.score for score in one.scores}
                    for tag, value in (scalars | {f"aggregate/{name}": mean for name, mean in means.items()}).items():
                        writer.add_scalar(tag, value, one.step)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # else another watcher was faster
            print(f"{folder} cannot be written ({error}): scores are missing in TensorBoard.", file=sys.stderr)
