"""Scores in the formats that other tools read: the benchmark's `eval_results.jsonl`, and a CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path

from pipeline.evaluation.runner.results import TaskResult
from pipeline.files import write_text

JSONL_NAME, CSV_NAME = "eval_results.jsonl", "scores.csv"
COLUMNS = ("task", "name", "metric", "score", "chance", "samples", "official")


def write_official(folder: Path, results: Iterable[TaskResult]) -> None:
    """Write both files, one line per task, in the order given.

    A line of the JSONL has the keys of the benchmark's own: `key`, `dataset` (the task's name) and `metrics`, in which
    `main_metric` is the score.
    """
    lines, table = [], io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in results:
        metrics = {**result.metrics, "main_metric": result.score}
        lines.append(json.dumps({"key": result.task, "dataset": result.name, "metrics": metrics}) + "\n")
        chance = "" if result.chance is None else repr(result.chance)
        row = (result.task, result.name, result.main_metric, repr(result.score), chance, result.samples)
        writer.writerow([*row, str(result.official).lower()])
    write_text(folder / JSONL_NAME, "".join(lines))
    write_text(folder / CSV_NAME, table.getvalue())
