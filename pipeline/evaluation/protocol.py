"""The ways to score a task: classes with `@register` in `protocols/`, or in a package of one's own, which names its
module as an entry point (docs/evaluation.md). Beside them, metrics over groups of samples.

Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from pipeline.evaluation.datasets.datacomp import Task
from pipeline.registries import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.evaluation.compute import TextSide
    from pipeline.evaluation.datasets.task_data import TaskData

Outcomes = dict[str, np.ndarray]


class Protocol(ABC):
    """How one task's data is scored; one object serves all checkpoints.

    Shape legend: n images, M micro-batch, d feature dimension.
    """

    rows: ClassVar[Literal["labels", "captions", "instances"]]
    """The field of `TaskData` that it scores; a task of a `tasks.yaml` has `labels` or `captions`."""
    scores: ClassVar[tuple[str, ...]]
    """The metrics that a `tasks.yaml` may choose as the score; the first is the default."""
    texts: TextSide
    """What is encoded by the text tower."""

    @abstractmethod
    def __init__(self, task: Task, data: TaskData) -> None:
        """Check the data.

        Raises:
            TaskError: The task cannot be scored with this data.
        """

    def keep(self, features: Tensor, texts: Tensor, *, start: int) -> Outcomes:
        """What to keep of a micro-batch whose first image is number `start`, one row per image; here the features.

        Unit-norm features of images, [rows, d], and of distinct texts, [texts, d], are on the device.
        """
        return {"features": features.cpu().numpy()}

    @abstractmethod
    def finish(self, kept: Outcomes, texts: Tensor) -> Outcomes:
        """The outcomes per sample that the metrics are a function of, from what was kept of all n images."""

    @abstractmethod
    def metrics(self, outcomes: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The metrics, from `finish`'s outcomes, which are stored beside the result."""

    def chance(self) -> float | None:
        """The expected score of guessing; None where it has no simple form."""
        return None

    def write_details(  # noqa: B027  (most protocols write none)
        self, place: Path, *, outcomes: Outcomes, kept: Outcomes, texts: Tensor
    ) -> None:
        """Write what reports show beside the score; `place` is the result's path without `.json`."""


PROTOCOLS: Registry[type[Protocol]] = Registry(
    "evaluation protocol", setting="protocol", package="pipeline.evaluation.protocols", group="neuclip.protocols"
)
register = PROTOCOLS.register


def group_metrics(task: Task, outcomes: Mapping[str, np.ndarray]) -> dict[str, float]:
    """What a task adds to accuracy by its metadata (WILDS, Dollar Street, GeoDE) or its main metric.

    Names are as in the official results. Groups without samples are skipped, as in the benchmark. FMoW's region "Other"
    counts, as in the official code, whose intended exclusion never takes effect.
    """
    target, prediction, rank = outcomes["target"], outcomes["prediction"], outcomes["rank"]
    values: dict[str, float] = {}
    if task.main_metric == "F1-macro_all":
        values["F1-macro_all"] = macro_f1(target, prediction)
        values["recall-macro_all"] = macro_recall(target, prediction)
    if not task.fields:
        return values
    prefix, right = ("acc_top5", rank < 5) if "top5" in task.main_metric else ("acc", rank == 0)
    values[f"{prefix}_avg"] = float(np.mean(right))
    for name in (task.group, *task.secondary_groups):
        if not name:
            continue
        groups, index = np.unique(outcomes[f"field:{name}"], return_inverse=True)
        counts = np.bincount(index)
        means = np.bincount(index, weights=right) / counts
        # FMoW has two kinds of groups and names them, the others have one.
        worst = f"{prefix}_worst_{name}" if task.group else f"{prefix}_wg"
        values[task.main_metric if name == task.group else worst] = float(means.min())
        for group, mean, count in zip(groups, means, counts, strict=True):
            values[f"{prefix}_{name}:{group}"] = float(mean)
            values[f"count_{name}:{group}"] = float(count)
    return values


def _counts(target: np.ndarray, prediction: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """True positives, targets and predictions of every label that occurs in the targets."""
    present, size = np.unique(target), int(max(target.max(), prediction.max())) + 1
    counted = (target[prediction == target], target, prediction)
    hits, targets, predictions = (np.bincount(labels, minlength=size)[present] for labels in counted)
    return hits, targets, predictions


def macro_f1(target: np.ndarray, prediction: np.ndarray) -> float:
    """Mean F1 over the labels present in the targets: 2 TP / (targets + predictions)."""
    hits, targets, predictions = _counts(target, prediction)
    return float(np.mean(2 * hits / (targets + predictions)))


def macro_recall(target: np.ndarray, prediction: np.ndarray) -> float:
    """Mean recall over the labels present in the targets."""
    hits, targets, _ = _counts(target, prediction)
    return float(np.mean(hits / targets))
