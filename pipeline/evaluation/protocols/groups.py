"""Metrics over groups of samples: macro F1 and worst groups (WILDS, Dollar Street, GeoDE).

Groups without samples are skipped, as in the benchmark. FMoW's region "Other" counts, as in the official
code, whose intended exclusion never takes effect.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipeline.evaluation.datasets.datacomp import Task


def metrics(task: Task, found: Mapping[str, np.ndarray]) -> dict[str, float]:
    """What a task adds to accuracy by its metadata or its main metric; names as in the official results."""
    target, prediction, rank = found["target"], found["prediction"], found["rank"]
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
        means, counts = by_group(right, found[f"field:{name}"])
        values[_worst_name(task, name, prefix)] = min(means.values())
        for group, mean in means.items():
            values[f"{prefix}_{name}:{group}"] = mean
            values[f"count_{name}:{group}"] = float(counts[group])
    return values


def _worst_name(task: Task, group: str, prefix: str) -> str:
    """The official name of a worst group's metric: FMoW has two kinds of groups and names them, the others have one."""
    if group == task.group:
        return task.main_metric
    return f"{prefix}_worst_{group}" if task.group else f"{prefix}_wg"


def by_group(right: np.ndarray, group: np.ndarray) -> tuple[dict[int, float], dict[int, int]]:
    """Share of `right` and number of samples in every group that has samples."""
    present, index = np.unique(group, return_inverse=True)
    counts = np.bincount(index)
    means = np.bincount(index, weights=right) / counts
    return (
        {int(g): float(mean) for g, mean in zip(present, means, strict=True)},
        {int(g): int(count) for g, count in zip(present, counts, strict=True)},
    )


def _counts(target: np.ndarray, prediction: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """True positives, targets and predictions of every label that occurs in the targets."""
    present = np.unique(target)
    size = int(max(target.max(), prediction.max())) + 1
    hits = np.bincount(target[prediction == target], minlength=size)[present]
    return hits, np.bincount(target, minlength=size)[present], np.bincount(prediction, minlength=size)[present]


def macro_f1(target: np.ndarray, prediction: np.ndarray) -> float:
    """Mean F1 over the labels present in the targets: 2 TP / (targets + predictions)."""
    hits, targets, predictions = _counts(target, prediction)
    return float(np.mean(2 * hits / (targets + predictions)))


def macro_recall(target: np.ndarray, prediction: np.ndarray) -> float:
    """Mean recall over the labels present in the targets."""
    hits, targets, _ = _counts(target, prediction)
    return float(np.mean(hits / targets))
