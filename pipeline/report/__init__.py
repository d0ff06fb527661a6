"""Reports: one run as an HTML page and markdown, or a comparison of several runs with tables.

    from pipeline.report import write_report
    page = write_report(["runs/demo"])                # runs/demo/report.html, report.md
    page = write_report(["runs/a", "runs/b"])         # comparison/comparison.html, .md, .csv, .tex

Importing this package is cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write_report(runs: Sequence[str | Path], *, output: str | Path | None = None, mixed: bool = False) -> Path:
    """Write the report of one run, or a comparison of several runs with the first as the baseline.

    Args:
        runs: Folders of runs.
        output: Folder to write into; by default the run's own, or `comparison` for several.
        mixed: Allow runs that were evaluated with different settings or on different data.

    Returns:
        The path of the HTML page; the other files are in the same folder.

    Raises:
        UserError: A folder is not a run, or the runs were evaluated differently.
    """
    from pipeline.report.run_data import read_run

    found = [read_run(folder) for folder in runs]
    if len(found) == 1:
        from pipeline.report.run_page import write_page

        return write_page(found[0], Path(output or found[0].folder))
    from pipeline.report.comparison_page import write_comparison

    return write_comparison(found, Path(output or "comparison"), mixed=mixed)
