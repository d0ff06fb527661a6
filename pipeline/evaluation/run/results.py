"""One JSON per task and checkpoint: the score, what determines it, and nothing that changes between runs.

A result's `outcomes` is the digest of the file beside it. A result that is damaged or copied to another name is none.

`suite.lock.json` beside the results holds digests of the data that was evaluated first. Later evaluations check them;
one lock serves all checkpoints of a run, so that every point of a curve is a score over the same data:

    {"suites": {"mini": ["cifar10", ...]},
     "tasks": {"cifar10": {"data": "<digest>", "files": {"test/0.tar": "<sha256>", ...}}}}

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import UserError
from pipeline.evaluation.datasets.datacomp import Task
from pipeline.evaluation.datasets.suite import Suite
from pipeline.evaluation.datasets.task_data import ACCEPT, TaskData, TaskError, check_digests, plain
from pipeline.evaluation.identity import data_digest
from pipeline.files import read_tree, replacing, sha256_of, write_json, write_text

OUTCOMES_SUFFIX = ".outcomes.npz"
LOCK_NAME = "suite.lock.json"
ANOTHER_SUITE = "it is a task of another suite"


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
    part = tree.get(name)
    return part if isinstance(part, dict) else {}


def read_result(path: Path) -> TaskResult | None:
    """The result in a file; None when there is none, it is damaged or not one, or is another task's."""
    try:
        result = TaskResult(**read_tree(path))
    except TypeError:
        return None
    return result if is_named_after(path, str(result.task)) else None


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
    """Write the per-sample outcomes, then the result, so that an existing result is always complete.

    The result is returned with the outcomes' digest.
    """
    with replacing(path.with_name(path.stem + OUTCOMES_SUFFIX)) as temporary:
        with temporary.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **outcomes)
        result = replace(result, outcomes=sha256_of(temporary))
    write_text(path, json.dumps(asdict(result), indent=1, allow_nan=False) + "\n", durable=True)
    return result


@dataclass
class SuiteLock:
    """The lock in one file, as it was read when the evaluation started."""

    path: Path
    suites: dict[str, list[str]] = field(default_factory=dict)
    """The tasks of every suite that was evaluated, by the suite's name."""
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Digests of every task's files, and one of its data, by key."""

    @classmethod
    def read(cls, path: Path) -> SuiteLock:
        """Read the lock from a file; it is empty if there is no file.

        Raises:
            UserError: The file is damaged.
        """
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, tree["suites"], tree["tasks"])
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is damaged ({plain(repr(error), longest=200)}), so data cannot be compared "
                "with what was evaluated first. Restore it, or remove it to write it anew."
            ) from error

    def lost(self, suite: Suite) -> list[str]:
        """Tasks that the suite had when it was locked and that are now missing.

        A suite that shares no task with the locked one of the same name is treated as another suite.
        """
        before = self.suites.get(suite.name, [])
        return [key for key in before if key not in suite.keys] if set(before) & set(suite.keys) else []

    def check(self, key: str, data: TaskData, files: Mapping[str, str]) -> None:
        """Compare a task's data with what was evaluated first.

        Raises:
            TaskError: They differ.
        """
        locked = self.tasks.get(key)
        if locked is None or locked["data"] == data_digest(files, data.columns):
            return
        try:
            check_digests(
                key, files, locked["files"], folder=None, written=f"when they were first evaluated, {self.path}"
            )
        except TaskError as error:
            raise TaskError(f"{error} {ACCEPT}") from error
        if locked["files"] == files:
            what = f"the columns {' and '.join(data.columns)} are read, others"
        else:
            what = f"{data.folder} has {len(files):,} files, {len(locked['files']):,}"
        raise TaskError(f"{key}: {what} when it was first evaluated ({self.path}). {ACCEPT}")

    def add(self, key: str, data: TaskData, files: Mapping[str, str]) -> bool:
        """Lock a task's data. Returns whether that changed the lock."""
        changed = self.tasks.get(key) != _facts(data, files)
        self.tasks[key] = _facts(data, files)
        return changed

    def write(self, suite: Suite, *, replacing: bool) -> None:
        """Write the lock, merged with what other processes have locked in the meantime.

        With `replacing`, our entries take precedence over those in the file.
        """
        now = SuiteLock.read(self.path)
        tasks = {**now.tasks, **self.tasks} if replacing else {**self.tasks, **now.tasks}
        keys = suite.keys if replacing else tuple(dict.fromkeys([*now.suites.get(suite.name, ()), *suite.keys]))
        suites = {**now.suites, suite.name: [key for key in keys if key in tasks]}
        tree = {"suites": suites, "tasks": dict(sorted(tasks.items()))}
        write_json(self.path, tree, durable=True)


def _facts(data: TaskData, files: Mapping[str, str]) -> dict[str, Any]:
    return {"data": data_digest(files, data.columns), "files": dict(files)}
