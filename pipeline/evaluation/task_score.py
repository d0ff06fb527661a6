"""A task's score, as the evaluation computes it and reports show it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskScore:
    """One task's score."""

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
