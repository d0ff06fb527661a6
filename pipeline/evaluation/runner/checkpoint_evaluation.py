"""The outcome of an evaluation for one checkpoint, and the summary of all its evaluations."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.evaluation.datasets.suite import Entry
from pipeline.evaluation.runner.aggregate import Aggregate
from pipeline.evaluation.runner.results import TaskResult
from pipeline.evaluation.runner.suite_lock import SuiteLock
from pipeline.model.evaluation_model import EvaluationModel


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
