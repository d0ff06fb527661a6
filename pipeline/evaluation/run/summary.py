"""What an evaluation found: its results with earlier ones of the same suite, as other tools and people read them."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.evaluation.datasets.datacomp import AGGREGATES
from pipeline.evaluation.datasets.suite import Entry, Suite
from pipeline.evaluation.identity import SETTINGS, misfit
from pipeline.evaluation.run.results import ANOTHER_SUITE, SuiteLock, TaskResult, part_of, read_result
from pipeline.files import read_tree, write_json, write_text
from pipeline.model.evaluation_model import EvaluationModel

SUMMARY_NAME, TIMINGS_NAME = "summary.json", "timings.json"
JSONL_NAME, CSV_NAME = "eval_results.jsonl", "scores.csv"
COLUMNS = ("task", "name", "metric", "score", "chance", "samples", "official")
SHOWN_MISSING = 6


@dataclass(frozen=True)
class Aggregate:
    """The mean of some tasks' main metrics."""

    name: str
    score: float | None
    """None while tasks are missing."""
    complete: bool
    official: bool
    """Whether all data has the official counts."""
    tasks: int
    expected: int
    missing: tuple[str, ...]
    partial_mean: float | None
    """The mean over the available tasks; comparable only with a mean over the same tasks."""


def aggregate(results: Mapping[str, TaskResult]) -> dict[str, Aggregate]:
    """Every aggregate that at least one result belongs to, by name."""
    means = {}
    for name, keys in AGGREGATES.items():
        there = [key for key in keys if key in results]
        if not there:
            continue
        mean = math.fsum(results[key].score for key in there) / len(there)
        complete = len(there) == len(keys)
        means[name] = Aggregate(
            name=name,
            score=mean if complete else None,
            complete=complete,
            official=all(results[key].official for key in there),
            tasks=len(there),
            expected=len(keys),
            missing=tuple(key for key in keys if key not in results),
            partial_mean=None if complete else mean,
        )
    return means


def describe(value: Aggregate) -> str:
    """One line for the terminal: an incomplete aggregate is marked before its number."""
    note = "" if value.official else " (not the official data)"
    if value.complete:
        return f"{value.name}: {value.score:.4f}{note}"
    mean = f"their mean is {value.partial_mean:.4f}{note}"
    more = f" and {len(value.missing) - SHOWN_MISSING} more" if len(value.missing) > SHOWN_MISSING else ""
    without = f"without {', '.join(value.missing[:SHOWN_MISSING])}{more}"
    return f"INCOMPLETE {value.name}: {value.tasks} of {value.expected} tasks, {without}; {mean}"


@dataclass(frozen=True)
class Summary:
    """All results of one checkpoint on one suite with the same settings, including earlier evaluations."""

    results: Mapping[str, TaskResult]
    failures: Mapping[str, str]
    left_out: Mapping[str, str]
    """Results in the same folder that do not belong to the summary, and why: another suite, data or settings."""
    aggregates: Mapping[str, Aggregate]

    @property
    def identity(self) -> str:
        """Digest of the tasks and their data: equal for scores over the same suite, whatever its folder is called."""
        lines = [f"{key} {result.inputs.get('task_data')}" for key, result in sorted(self.results.items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass
class Evaluation:
    """The outcome for one checkpoint."""

    model: EvaluationModel
    folder: Path
    lock: SuiteLock
    """What this checkpoint's run, or folder, was first evaluated on."""
    conditions: Mapping[str, Any]
    """What all of its results have in common (`identity.conditions`)."""
    results: dict[str, TaskResult] = field(default_factory=dict)
    """By task key."""
    failures: dict[str, str] = field(default_factory=dict)
    """What went wrong, by task key."""
    timings: dict[str, dict[str, float]] = field(default_factory=dict)
    reused: set[str] = field(default_factory=set)
    """Keys of results that already existed with the same inputs."""
    notes: tuple[str, ...] = ()
    """What a user should know about the checkpoint."""
    summary: Summary | None = None
    """These results, combined with earlier ones of the same suite and settings; on the first process only."""

    @property
    def run(self) -> Path | None:
        """The run that the results are stored in (RUN/evaluation/<checkpoint>); None elsewhere."""
        folder = self.folder.absolute()
        return folder.parent.parent if folder.parent.name == "evaluation" else None

    def path(self, entry: Entry) -> Path:
        """The file of a task's result."""
        return self.folder / f"{entry.task.stem}.json"


def summarize(evaluation: Evaluation, suite: Suite) -> Summary:
    """This evaluation's results, with those of the suite's other tasks from earlier evaluations that fit them."""
    now = {entry.task.key for entry in suite.entries}
    results, left_out = dict(evaluation.results), _strays(evaluation, suite)
    locked = {key: task["data"] for key, task in evaluation.lock.tasks.items()}
    for entry in suite.whole:
        key, path = entry.task.key, evaluation.path(entry)
        if key in now or not path.is_file():
            continue
        result = read_result(path)
        if result is None:
            left_out[key] = "its file is damaged"
        elif reason := misfit(result.inputs, entry, conditions=evaluation.conditions, data=locked.get(key)):
            left_out[key] = reason
        else:
            results[key] = result
    earlier = read_tree(evaluation.folder / SUMMARY_NAME)
    checkpoint = evaluation.conditions["checkpoint"]
    same = earlier.get("checkpoint") == checkpoint and part_of(earlier, "suite").get("name") == suite.name
    failures = {key: str(text) for key, text in part_of(earlier, "failures").items()} if same else {}
    failures = {k: text for k, text in failures.items() if k in suite.keys and k not in now and k not in results}
    order = {key: position for position, key in enumerate(suite.keys)}
    results = dict(sorted(results.items(), key=lambda item: order[item[0]]))
    return Summary(results, failures | evaluation.failures, dict(sorted(left_out.items())), aggregate(results))


def _strays(evaluation: Evaluation, suite: Suite) -> dict[str, str]:
    """Results in the folder that are not of this suite, by task."""
    own = {evaluation.path(entry) for entry in suite.whole}
    results = (read_result(path) for path in sorted(evaluation.folder.glob("*.json")) if path not in own)
    return {result.task: ANOTHER_SUITE for result in results if result is not None}


def write_summary(evaluation: Evaluation, suite: Suite) -> Summary:
    """Write `summary.json`, the tables that other tools read, and `timings.json` beside a checkpoint's results."""
    summary = summarize(evaluation, suite)
    tree = {
        "checkpoint": evaluation.conditions["checkpoint"],
        "suite": {"name": suite.name, "identity": summary.identity, "tasks": len(suite.keys)},
        "settings": {name: evaluation.conditions[name] for name in (*SETTINGS, "code")},
        "scores": {
            key: {"name": r.name, "score": r.score, "chance": r.chance, "samples": r.samples}
            for key, r in sorted(summary.results.items())
        },
        "failures": dict(sorted(summary.failures.items())),
        "left_out": summary.left_out,
        "aggregates": {name: asdict(value) for name, value in summary.aggregates.items()},
        "notes": list(evaluation.notes),
    }
    write_json(evaluation.folder / SUMMARY_NAME, tree, durable=True)
    write_official(evaluation.folder, summary.results.values())
    if evaluation.timings:
        earlier = part_of(read_tree(evaluation.folder / TIMINGS_NAME), "tasks")
        timings = {"source": evaluation.model.source, "tasks": earlier | evaluation.timings}
        write_json(evaluation.folder / TIMINGS_NAME, timings, durable=True)
    return summary


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
