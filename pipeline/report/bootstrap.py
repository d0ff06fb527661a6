"""Paired bootstrap over a task's samples: the uncertainty of a difference of scores due to the finite test set.

It does not include the variation between training seeds; repeat runs with other seeds to measure that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.evaluation.datasets.datacomp import TASKS
from pipeline.report.stored_scores import Score

RESAMPLES = 1_000
LEVEL = 0.95
Outcomes = Mapping[str, np.ndarray]
Statistic = Callable[[np.ndarray], float]


@dataclass(frozen=True)
class Difference:
    """A difference of scores and its confidence interval, which is None if per-sample outcomes were not stored."""

    value: float
    interval: tuple[float, float] | None = None

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


def difference(value: float, resampled: np.ndarray | None, k: int) -> Difference:
    """The difference `value` of run `k` from the first, with the percentile interval of `[runs, resamples]`."""
    if resampled is None:
        return Difference(value)
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(resampled[k] - resampled[0], [tail, 100 - tail])
    return Difference(value, (float(low), float(high)))


def resample(scores: Sequence[Score], *, resamples: int = RESAMPLES) -> np.ndarray | None:
    """The main metric of one task on bootstrap samples, `[runs, resamples]`; every run uses the same samples.

    Returns None if outcomes are missing, the runs were evaluated on different data, or the metric is not supported.
    """
    if len({str(score.inputs.get("task_data")) for score in scores}) != 1:
        return None
    stored = [score.read_outcomes() for score in scores]
    statistics = [statistic(s, outcomes) for s, outcomes in zip(scores, stored, strict=True) if outcomes is not None]
    usable = [pair for pair in statistics if pair is not None]
    if len(usable) != len(scores) or len({units for units, _ in usable}) != 1:
        return None
    units = usable[0][0]
    seed = int.from_bytes(hashlib.sha256(scores[0].task.encode()).digest()[:8], "big")
    rng = np.random.default_rng(seed)
    values = np.empty((len(scores), resamples))
    for k in range(resamples):
        drawn = rng.integers(units, size=units)
        values[:, k] = [compute(drawn) for _, compute in usable]
    return values


def statistic(score: Score, outcomes: Outcomes) -> tuple[int, Statistic] | None:
    """The number of samples of a task, and its main metric as a function of the samples drawn."""
    metric = score.main_metric
    if score.protocol == "retrieval" and metric == "mean_recall@1":
        return _recall(outcomes)
    if score.protocol == "association":
        counted = (outcomes["candidates"] >= (10 if metric.endswith("10-12") else 1)).astype(np.float64)
        values = outcomes["jaccard"] * counted
        return len(values), lambda drawn: float(values[drawn].sum() / max(1.0, counted[drawn].sum()))
    if score.protocol != "classification":
        return None
    if metric in ("acc1", "acc5"):
        right = outcomes["rank"] < (1 if metric == "acc1" else 5)
        return len(right), lambda drawn: float(right[drawn].mean())
    # Metrics over classes and groups are computed by the evaluation's own functions.
    from pipeline.evaluation.protocol import group_metrics, macro_recall

    rows, task = len(outcomes["target"]), TASKS.get(score.task)
    if metric == "mean_per_class_recall":
        return rows, lambda drawn: macro_recall(outcomes["target"][drawn], outcomes["prediction"][drawn])
    if task is None or not task.fields:
        return None
    return rows, lambda drawn: group_metrics(task, {k: v[drawn] for k, v in outcomes.items()})[task.main_metric]


def _recall(outcomes: Outcomes) -> tuple[int, Statistic]:
    """Mean R@1 of both directions; an image is resampled together with all its captions."""
    owner = outcomes["caption_owner"]
    image = (outcomes["image_rank"] < 1).astype(np.float64)
    captions = np.bincount(owner, minlength=len(image)).astype(np.float64)
    hits = np.bincount(owner, weights=outcomes["caption_rank"] < 1, minlength=len(image))

    def compute(drawn: np.ndarray) -> float:
        return float(0.5 * (image[drawn].mean() + hits[drawn].sum() / captions[drawn].sum()))

    return len(image), compute
