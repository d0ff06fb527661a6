"""What a task's score is, for whoever computes one and whoever shows one. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskScore:
    """One task's score: `score` is `metrics[main_metric]`, `chance` that of guessing, None where it has no simple form.

    samples: of the task's data: images, pairs or instances.
    """

    task: str
    name: str
    protocol: str
    main_metric: str
    score: float
    metrics: Mapping[str, float]
    chance: float | None
    samples: int
