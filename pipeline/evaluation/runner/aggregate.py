"""Means over groups of tasks. An aggregate over only some of its tasks is never reported under its name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.evaluation.datasets.datacomp import AGGREGATES
from pipeline.evaluation.runner.results import TaskResult

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
    found = {}
    for name, keys in AGGREGATES.items():
        there = [key for key in keys if key in results]
        if not there:
            continue
        mean = math.fsum(results[key].score for key in there) / len(there)
        complete = len(there) == len(keys)
        found[name] = Aggregate(
            name=name,
            score=mean if complete else None,
            complete=complete,
            official=all(results[key].official for key in there),
            tasks=len(there),
            expected=len(keys),
            missing=tuple(key for key in keys if key not in results),
            partial_mean=None if complete else mean,
        )
    return found


def describe(value: Aggregate) -> str:
    """One line for the terminal: an incomplete aggregate is marked before its number."""
    note = "" if value.official else " (not the official data)"
    if value.complete:
        return f"{value.name}: {value.score:.4f}{note}"
    mean = f"their mean is {value.partial_mean:.4f}{note}"
    more = f" and {len(value.missing) - SHOWN_MISSING} more" if len(value.missing) > SHOWN_MISSING else ""
    without = f"without {', '.join(value.missing[:SHOWN_MISSING])}{more}"
    return f"INCOMPLETE {value.name}: {value.tasks} of {value.expected} tasks, {without}; {mean}"
