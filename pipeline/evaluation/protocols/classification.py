"""Zero-shot classification: the class whose prompts are nearest to the image.

Shape legend: n images, C classes, M micro-batch, d feature dimension.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.evaluation.compute import TextSide, ranks
from pipeline.evaluation.datasets.datacomp import Task
from pipeline.evaluation.datasets.task_data import TaskData, TaskError
from pipeline.evaluation.protocol import Outcomes, Protocol, group_metrics, macro_recall, register
from pipeline.files import write_text

LOGIT_SCALE = 100.0
"""The benchmark's scale. A checkpoint's own is never used; predictions and ranks do not depend on it."""
FOLDER = "classes"
FULL_MATRIX = 64
"""Up to this many classes the file holds the whole matrix; beyond, the most frequent confusions."""
CONFUSIONS = 100


def keep(logits: Tensor, *, labels: Tensor) -> Outcomes:
    """[M, C] logits, [M] labels -> the prediction and the rank of the label, per image.

    Ties go to the lower class index: class names may repeat, and their logits are then equal. A label >= C
    belongs to a class without a name and has rank C.
    """
    named, classes = labels < logits.shape[1], logits.shape[1]
    rank = torch.where(named, ranks(logits, labels.clamp(max=classes - 1)), classes)
    return {"prediction": logits.argmax(1).cpu().numpy(), "rank": rank.cpu().numpy()}


def metrics(task: Task, outcomes: Mapping[str, np.ndarray], *, classes: int) -> dict[str, float]:
    """The benchmark's metrics from per-image outcomes; a bootstrap resamples the rows of `found`."""
    target, prediction, rank = outcomes["target"], outcomes["prediction"], outcomes["rank"]
    values = {"acc1": float(np.mean(rank == 0))}
    if classes >= 5:
        values["acc5"] = float(np.mean(rank < 5))
    values["mean_per_class_recall"] = macro_recall(target, prediction)
    return values | group_metrics(task, outcomes)


def class_details(outcomes: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, Any]:
    """Samples and accuracy of every class, by label, and which classes are confused.

    A label beyond the `names` is of a class whose blank name was dropped. Rows of the `matrix`, which there is for up
    to 64 classes, are true labels, columns predictions; `confusions` are the most frequent wrong predictions.
    """
    target, prediction = outcomes["target"], outcomes["prediction"]
    classes = max(len(names), int(target.max()) + 1)
    # Only what occurs: the whole matrix of a million classes would be 8 terabytes.
    cells = target.astype(np.int64) * classes + prediction
    is_right = target == prediction
    totals, right = (np.bincount(rows, minlength=classes) for rows in (target, target[is_right]))
    wrong, counts = np.unique(cells[~is_right], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:CONFUSIONS]
    small = classes <= FULL_MATRIX
    return {
        "classes": [
            {
                "name": names[k] if k < len(names) else "",
                "samples": int(totals[k]),
                "accuracy": float(right[k] / totals[k]) if totals[k] else None,
            }
            for k in range(classes)
        ],
        "matrix": np.bincount(cells, minlength=classes**2).reshape(classes, -1).tolist() if small else None,
        "confusions": [
            {"true": int(wrong[k]) // classes, "predicted": int(wrong[k]) % classes, "count": int(counts[k])}
            for k in order
        ],
    }


@register("classification")
class ZeroShot(Protocol):
    """The protocol on one task's data."""

    rows = "labels"
    scores = ("acc1", "acc5", "mean_per_class_recall", "F1-macro_all")

    def __init__(self, task: Task, data: TaskData) -> None:
        if data.labels is None:
            raise TaskError(f"{data.folder} holds no labels: {task.key} is a classification task.")
        classes = len(data.classnames)
        if not data.templates or any("{c}" not in template for template in data.templates):
            raise TaskError(
                f"{data.folder}: every template (zeroshot_classification_templates.txt) needs the place of {{c}}."
            )
        if classes < 2:
            raise TaskError(f"{data.folder}: {task.key} has {classes} class names; a choice needs at least two.")
        low, high = int(data.labels.min()), int(data.labels.max())
        if low < 0 or high >= classes + data.blank_classes:  # a class whose blank name was dropped is never predicted
            raise TaskError(
                f"{data.folder}: labels run from {low} to {high}, but there are {classes} class names "
                "(classnames.txt). One of them is of another version."
            )
        if ("top5" in task.main_metric or task.main_metric == "acc5") and classes < 5:
            raise TaskError(f"{data.folder}: {task.key} is scored by top-5 accuracy, but has only {classes} classes.")
        self.task, self.data = task, data
        self.texts = TextSide(data.classnames, templates=data.templates, prompts=data.prompts)
        self._labels = torch.from_numpy(data.labels)

    def keep(self, features: Tensor, texts: Tensor, *, start: int) -> Outcomes:
        labels = self._labels[start : start + len(features)].to(features.device)
        return keep(LOGIT_SCALE * self.texts.similarities(features, texts), labels=labels)

    def finish(self, kept: Outcomes, texts: Tensor) -> Outcomes:
        columns = {}
        if self.data.metadata is not None:
            columns = {f"field:{name}": self.data.metadata[:, k] for k, name in enumerate(self.task.fields)}
        return {"target": self._labels.numpy(), **kept, **columns}

    def metrics(self, outcomes: Mapping[str, np.ndarray]) -> dict[str, float]:
        return metrics(self.task, outcomes, classes=len(self.data.classnames))

    def chance(self) -> float | None:
        metric = self.task.main_metric
        top = 5 if "top5" in metric or metric == "acc5" else 1  # of as many classes, at least
        return None if metric.startswith("F1") else top / len(self.data.classnames)

    def write_details(self, place: Path, *, outcomes: Outcomes, kept: Outcomes, texts: Tensor) -> None:
        details = class_details(outcomes, self.data.classnames)
        path = place.parent / FOLDER / f"{place.name}.json"
        write_text(path, json.dumps(details, ensure_ascii=False) + "\n")
