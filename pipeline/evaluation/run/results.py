"""What an evaluation stores and where: one JSON per task and checkpoint, and summaries for people and other tools.

A result holds the score, what determines it, and nothing that changes between runs; its `outcomes` is the digest of the
file beside it. A result that is damaged or copied to another name is none. Imports no torch.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import UserError
from pipeline.evaluation.datasets.datacomp import AGGREGATES, Task
from pipeline.evaluation.datasets.suite import Entry, Suite
from pipeline.evaluation.datasets.task_data import plain
from pipeline.evaluation.identity import SETTINGS, SuiteLock, misfit
from pipeline.files import read_tree, replacing, sha256_of, write_json, write_text
from pipeline.run_files import EMA_NAME, FOLDER_NAME, read_as

if TYPE_CHECKING:
    from pipeline.model.evaluation_model import EvaluationModel

OUTCOMES_SUFFIX = ".outcomes.npz"
SUMMARY_NAME, TIMINGS_NAME = "summary.json", "timings.json"
JSONL_NAME, CSV_NAME = "eval_results.jsonl", "scores.csv"
ANOTHER_SUITE = "it is a task of another suite"
SHOWN_MISSING = 6
LONGEST_NAME = 80


@dataclass(frozen=True)
class TaskResult:
    """A task's score and everything that it depends on."""

    task: str
    name: str
    protocol: str
    main_metric: str
    score: float
    """`metrics[main_metric]`."""
    metrics: Mapping[str, float]
    chance: float | None
    """The expected score of guessing; None where it has no simple form."""
    samples: int
    """Images, pairs or instances in the task's data."""
    official: bool
    """Whether the data has the official counts."""
    inputs: Mapping[str, Any]
    """The identity: equal inputs give an equal result."""
    outcomes: str = ""
    """SHA-256 of the per-sample outcomes beside it."""


def part_of(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A mapping within a stored file; empty when it is missing or something else."""
    return part if isinstance(part := tree.get(name), dict) else {}


def read_result(path: Path) -> TaskResult | None:
    """The result in a file; None when there is none, it is damaged or not one, or is another task's."""
    result = read_as(TaskResult, path)
    return result if result and is_named_after(path, result.task) else None


def is_named_after(path: Path, key: str) -> bool:
    """Whether a file is that of the task's result, and no copy of it."""
    return path.stem in (Task(key, key).stem, Task(key, key, samples=0).stem)


def read_outcomes(path: Path, digest: str) -> dict[str, np.ndarray] | None:
    """The per-sample outcomes beside a result's file; None when they are missing, damaged, or have another digest."""
    file = path.with_name(path.stem + OUTCOMES_SUFFIX)
    try:
        if sha256_of(file) != digest:
            return None
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception:  # a damaged archive raises a dozen types
        return None


def write_result(path: Path, result: TaskResult, outcomes: Mapping[str, np.ndarray]) -> TaskResult:
    """Write the per-sample outcomes, then the result with their digest: an existing result is always complete."""
    with replacing(path.with_name(path.stem + OUTCOMES_SUFFIX)) as temporary:
        with temporary.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **outcomes)
        result = replace(result, outcomes=sha256_of(temporary))
    write_text(path, json.dumps(asdict(result), indent=1, allow_nan=False) + "\n", durable=True)
    return result


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
        there = [results[key] for key in keys if key in results]
        if there:
            mean, missing = math.fsum(r.score for r in there) / len(there), tuple(k for k in keys if k not in results)
            official, complete = all(result.official for result in there), not missing
            score, partial_mean = (None, mean) if missing else (mean, None)
            means[name] = Aggregate(name, score, complete, official, len(there), len(keys), missing, partial_mean)
    return means


def describe(value: Aggregate) -> str:
    """One line for the terminal: an incomplete aggregate is marked before its number."""
    note = "" if value.official else " (not the official data)"
    if value.complete:
        return f"{value.name}: {value.score:.4f}{note}"
    more = f" and {len(value.missing) - SHOWN_MISSING} more" if len(value.missing) > SHOWN_MISSING else ""
    without = f"without {', '.join(value.missing[:SHOWN_MISSING])}{more}"
    counts = f"{value.tasks} of {value.expected} tasks"
    return f"INCOMPLETE {value.name}: {counts}, {without}; their mean is {value.partial_mean:.4f}{note}"


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
    results, own = dict(evaluation.results), {evaluation.path(entry) for entry in suite.whole}
    others = (read_result(path) for path in sorted(evaluation.folder.glob("*.json")) if path not in own)
    left_out = {result.task: ANOTHER_SUITE for result in others if result is not None}
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
    failures = part_of(earlier, "failures") if same else {}
    failures = {k: str(text) for k, text in failures.items() if k in suite.keys and k not in now and k not in results}
    results = {key: results[key] for key in suite.keys if key in results}
    return Summary(results, failures | evaluation.failures, dict(sorted(left_out.items())), aggregate(results))


def write_summary(evaluation: Evaluation, suite: Suite) -> Summary:
    """Write `summary.json`, `timings.json` and what other tools read, one line per task.

    A line of `eval_results.jsonl` has the keys of the benchmark's own: `key`, `dataset` (the task's name) and
    `metrics`, in which `main_metric` is the score.
    """
    summary, folder = summarize(evaluation, suite), evaluation.folder
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
    }
    write_json(folder / SUMMARY_NAME, tree, durable=True)
    lines, table = [], io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("task", "name", "metric", "score", "chance", "samples", "official"))
    for r in summary.results.values():
        metrics = {**r.metrics, "main_metric": r.score}
        lines.append(json.dumps({"key": r.task, "dataset": r.name, "metrics": metrics}) + "\n")
        chance = "" if r.chance is None else repr(r.chance)
        writer.writerow([r.task, r.name, r.main_metric, repr(r.score), chance, r.samples, str(r.official).lower()])
    write_text(folder / JSONL_NAME, "".join(lines))
    write_text(folder / CSV_NAME, table.getvalue())
    if evaluation.timings:
        earlier = part_of(read_tree(folder / TIMINGS_NAME), "tasks")
        timings = {"source": evaluation.model.source, "tasks": earlier | evaluation.timings}
        write_json(folder / TIMINGS_NAME, timings, durable=True)
    return summary


def output_folders(sources: Sequence[str], output: str | Path | None) -> list[Path]:
    """One folder per checkpoint, none of which is made; two must not have the same."""
    if output is None:
        folders = [default_folder(source) for source in sources]
    elif len(sources) == 1:
        folders = [Path(output)]
    else:
        named = [(checkpoint_name(source), source) for source in sources]
        names = [name for name, _ in named]
        folders = [
            Path(output, name if names.count(name) == 1 else f"{name}-{_short_digest(source)}")
            for name, source in named
        ]
    if twice := {folder for folder in folders if folders.count(folder) > 1}:
        raise UserError(
            f"Several checkpoints would write to {min(twice)}: give each once, or evaluate them in calls of "
            "their own, each with an --output of its own."
        )
    return folders


def make_folders(folders: Sequence[Path]) -> None:
    """Make folders for results, or refuse those that cannot be made or written to."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "it is read-only")
        except OSError as error:
            where = f"Results cannot be written to {plain(folder, longest=200)}"
            raise UserError(f"{where}: {error.strerror}. Give another --output.") from error


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


def _short_digest(source: str) -> str:
    return hashlib.sha256(str(Path(source).resolve()).encode()).hexdigest()[:8]
