"""One JSON per task and checkpoint: the score, what determines it, and nothing that changes between runs.

A result's `digest` is that of all its other fields, and `outcomes` that of the file beside it. A result that was
edited, damaged or copied to another name is none. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.evaluation.datasets.task import Task
from pipeline.files import replacing, sha256_of, write_text

OUTCOMES_SUFFIX = ".outcomes.npz"
ANOTHER_SUITE = "it is a task of another suite"


@dataclass(frozen=True)
class TaskScore:
    """A task's score, as the evaluation computes it and reports show it."""

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


@dataclass(frozen=True)
class TaskResult(TaskScore):
    """A task's score and everything that it depends on."""

    official: bool
    """Whether the data has the official counts."""
    inputs: Mapping[str, Any]
    """The identity: equal inputs give an equal result."""
    outcomes: str = ""
    """SHA-256 of the per-sample outcomes beside it."""


def read_tree(path: Path) -> dict[str, Any]:
    """The mapping in a stored file; empty when it is missing, damaged or something else."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def part_of(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A mapping within a stored file; empty when it is missing or something else."""
    found = tree.get(name)
    return found if isinstance(found, dict) else {}


def is_intact(tree: Mapping[str, Any]) -> bool:
    """Whether a stored result is as it was written. Those of version 0.1 have no digest."""
    return "digest" not in tree or tree["digest"] == _digest(tree)


def read_result(path: Path, *, undigested: bool = False) -> TaskResult | None:
    """The result in a file; None when there is none, it is not as it was written, or is another task's.

    Args:
        path: The file, named after the task.
        undigested: Accept a result of version 0.1, which had no digest.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if not ("digest" in tree or undigested) or not is_intact(tree):
            return None
        result = TaskResult(**{name: value for name, value in tree.items() if name != "digest"})
        stated = result.metrics[result.main_metric]
        whole = (
            isinstance(result.inputs, dict) and isinstance(result.samples, int) and is_named_after(path, result.task)
        )
        return result if whole and math.isfinite(result.score) and result.score == stated else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def is_named_after(path: Path, key: str) -> bool:
    """Whether a file is that of the task's result, and no copy of it."""
    return path.stem in (Task(key, key).stem, Task(key, key, samples=0).stem)


def read_outcomes(path: Path, digest: str | None) -> dict[str, np.ndarray] | None:
    """The per-sample outcomes beside a result's file; None when they are missing, damaged, or have another digest.

    Version 0.1 recorded no digest (None).
    """
    file = path.with_name(path.stem + OUTCOMES_SUFFIX)
    try:
        if digest is not None and sha256_of(file) != digest:
            return None
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception:  # a damaged archive raises a dozen types
        return None


def write_result(path: Path, result: TaskResult, outcomes: Mapping[str, np.ndarray]) -> TaskResult:
    """Write the per-sample outcomes, then the result, so that an existing result is always complete.

    Returns:
        The result with the outcomes' digest.
    """
    with replacing(path.with_name(path.stem + OUTCOMES_SUFFIX)) as temporary:
        with temporary.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **outcomes)
        result = replace(result, outcomes=sha256_of(temporary))
    tree = asdict(result)
    write_text(path, json.dumps({**tree, "digest": _digest(tree)}, indent=1, allow_nan=False) + "\n", durable=True)
    return result


def _digest(tree: Mapping[str, Any]) -> str:
    own = {name: value for name, value in tree.items() if name != "digest"}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
