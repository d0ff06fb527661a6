"""Per-class accuracy and the confusion matrix of a classification task, for reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.files import write_text

FOLDER = "classes"
FULL_MATRIX = 64
"""Up to this many classes the file holds the whole matrix; beyond, the most frequent confusions."""
CONFUSIONS = 100


def class_details(outcomes: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, Any]:
    """Samples and accuracy of every class, and which classes are confused.

    Args:
        outcomes: `target` and `prediction` per image.
        names: Class names by label. A label beyond them belongs to a class whose blank name was dropped.

    Returns:
        `classes`: a list of name, samples and accuracy (None without samples), by label. `matrix`: rows are true
        labels, columns predictions; None with more than 64 classes. `confusions`: the most frequent wrong
        predictions as true label, predicted label and count.
    """
    target, prediction = outcomes["target"], outcomes["prediction"]
    classes = max(len(names), int(target.max()) + 1)
    matrix = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(matrix, (target, prediction), 1)
    totals, right = matrix.sum(1), matrix.diagonal()
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:CONFUSIONS]
    pairs = [(int(k) // classes, int(k) % classes) for k in order]
    return {
        "classes": [
            {
                "name": names[k] if k < len(names) else "",
                "samples": int(totals[k]),
                "accuracy": float(right[k] / totals[k]) if totals[k] else None,
            }
            for k in range(classes)
        ],
        "matrix": matrix.tolist() if classes <= FULL_MATRIX else None,
        "confusions": [
            {"true": row, "predicted": column, "count": int(wrong[row, column])}
            for row, column in pairs
            if wrong[row, column]
        ],
    }


def write_class_details(folder: Path, stem: str, details: Mapping[str, Any]) -> None:
    """Write `classes/<task>.json` below an evaluation's folder."""
    write_text(folder / FOLDER / f"{stem}.json", json.dumps(details, ensure_ascii=False) + "\n")
