"""What was evaluated first: `suite.lock.json` beside the results holds counts and digests that later evaluations check.

    {"suites": {"mini": ["cifar10", ...]},
     "tasks": {"cifar10": {"counts": {"samples": 22, ...}, "data": "<digest>", "files": {"test/0.tar": "<sha256>"}}}}

One lock serves all checkpoints of a run, so that every point of a curve is a score over the same data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.evaluation.datasets.suite import Suite
from pipeline.evaluation.datasets.suite_facts import check_digests
from pipeline.evaluation.datasets.task_data import TaskData, TaskError, plain
from pipeline.evaluation.identity import data_digest
from pipeline.files import write_text

LOCK_NAME = "suite.lock.json"
ACCEPT = "If the change is wanted, evaluate with relock=true, or into another --output."


@dataclass
class SuiteLock:
    """The lock in one file, as it was read when the evaluation started."""

    path: Path
    suites: dict[str, list[str]] = field(default_factory=dict)
    """The tasks of every suite that was evaluated, by the suite's name."""
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> SuiteLock:
        """Read the lock from a file; it is empty if there is no file.

        Raises:
            UserError: The file is damaged.
        """
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, *_checked(tree))
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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
        if locked is None:
            return
        for what, wanted in locked["counts"].items():
            count = data.counts.get(what, 0)
            if count != wanted:
                raise TaskError(
                    f"{key}: {data.folder} has {count:,} {what}, but {wanted:,} when it was first evaluated "
                    f"({self.path}). Is data missing? {ACCEPT}"
                )
        try:
            check_digests(
                key, files, locked["files"], folder=None, written=f"when they were first evaluated, {self.path}"
            )
        except TaskError as error:
            raise TaskError(f"{error} {ACCEPT}") from error
        if locked["data"] != data_digest(files, data.columns):
            if locked["files"] == files:
                what = f"the columns {' and '.join(data.columns)} are read, others"
            else:
                what = f"{data.folder} has {len(files):,} files, {len(locked['files']):,}"
            raise TaskError(f"{key}: {what} when it was first evaluated ({self.path}). {ACCEPT}")

    def add(self, key: str, data: TaskData, files: Mapping[str, str]) -> bool:
        """Lock a task's data.

        Returns:
            Whether that changed the lock.
        """
        entry = {"counts": data.counts, "data": data_digest(files, data.columns), "files": dict(files)}
        changed = self.tasks.get(key) != entry
        self.tasks[key] = entry
        return changed

    def data_of(self, key: str) -> str | None:
        """The digest of the data that a task was locked with."""
        return self.tasks.get(key, {}).get("data")

    def write(self, suite: Suite, *, replacing: bool) -> None:
        """Write the lock, merged with what other processes have locked in the meantime.

        Args:
            suite: The suite.
            replacing: Our entries take precedence over those in the file.
        """
        now = SuiteLock.read(self.path)
        tasks = {**now.tasks, **self.tasks} if replacing else {**self.tasks, **now.tasks}
        keys = suite.keys if replacing else tuple(dict.fromkeys([*now.suites.get(suite.name, ()), *suite.keys]))
        suites = {**now.suites, suite.name: [key for key in keys if key in tasks]}
        tree = {"suites": suites, "tasks": dict(sorted(tasks.items()))}
        write_text(self.path, json.dumps(tree, indent=1) + "\n", durable=True)


def _checked(tree: Any) -> tuple[dict[str, list[str]], dict[str, dict[str, Any]]]:
    """The suites and tasks of a lock's file; raises what a damaged one raises."""
    suites = {str(name): [str(key) for key in keys] for name, keys in tree["suites"].items()}
    tasks: dict[str, dict[str, Any]] = {}
    for key, task in tree["tasks"].items():
        counts = {str(what): int(count) for what, count in task["counts"].items()}
        files = {str(name): str(digest) for name, digest in task["files"].items()}
        tasks[str(key)] = {"counts": counts, "data": str(task["data"]), "files": files}
    return suites, tasks
