"""Reads RUN/evaluation/<checkpoint>/: one score per task, per-sample outcomes, and retrieval examples."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.evaluation.datasets.datacomp import TASKS
from pipeline.evaluation.run.results import (
    ANOTHER_SUITE,
    TaskScore,
    is_intact,
    is_named_after,
    part_of,
    read_outcomes,
)
from pipeline.files import path_below, read_tree

SUMMARY, TIMINGS, LOCK = "summary.json", "timings.json", "suite.lock.json"
AVERAGE = "ema"
"""The folder of the average of the weights in a checkpoint."""
NEEDED = ("task", "protocol", "main_metric", "score", "metrics", "samples")


@dataclass(frozen=True)
class Score(TaskScore):
    """One task's result, read from `path`; `inputs` are the settings and data it was computed with."""

    inputs: Mapping[str, Any]
    path: Path
    official: bool = False
    """Whether the sample counts are those of the official data."""
    outcomes_digest: str | None = None
    """SHA-256 of the per-sample outcomes; version 0.1 recorded none."""

    @property
    def label(self) -> str:
        """The short name; if the task has no name, its key without the suite's prefix."""
        return self.task.rpartition("/")[2] if self.name == self.task else self.name

    @property
    def times_chance(self) -> float | None:
        return self.score / self.chance if self.chance else None

    def outcomes(self) -> dict[str, np.ndarray] | None:
        """Per-sample outcomes, from which every metric can be recomputed; None if missing or changed."""
        return read_outcomes(self.path, self.outcomes_digest)


@dataclass(frozen=True)
class Retrieved:
    """An image retrieved for a caption; `right` if it is the caption's own image."""

    file: Path
    score: float | None
    right: bool


@dataclass(frozen=True)
class Example:
    """A caption, the rank of its own image (0 is first), the best images, and its own image."""

    caption: str
    rank: int
    images: tuple[Retrieved, ...]
    own: Path

    @property
    def found(self) -> bool:
        """Whether its own image is among the best."""
        return any(image.right for image in self.images)


@dataclass(frozen=True)
class Described:
    """An image, the rank of its best own caption (0 is first), the best captions, and its own."""

    image: Path
    rank: int
    captions: tuple[tuple[str, bool], ...]
    """The best captions, and whether each is the image's own."""
    own: str

    @property
    def found(self) -> bool:
        """Whether one of its own captions is among the best."""
        return any(right for _, right in self.captions)


@dataclass(frozen=True)
class Classes:
    """The confusions of a classification task."""

    task: str
    names: tuple[str, ...]
    accuracy: tuple[float | None, ...]
    matrix: tuple[tuple[int, ...], ...] | None
    """Rows are true classes, columns predictions; None if there are many classes."""
    confusions: tuple[tuple[str, str, int], ...]
    """(true class, predicted class, count), the most frequent first."""


@dataclass(frozen=True)
class StoredEvaluation:
    """All results of one checkpoint; `failures` are error messages by task."""

    checkpoint: str
    step: int | None
    samples: int | None
    scores: tuple[Score, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    aggregates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    timings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    average: bool = False
    """Whether the weights are the average (EMA) of a checkpoint's, as while training with `ema.evaluate`."""
    examples: tuple[Example, ...] = ()
    described: tuple[Described, ...] = ()
    classes: tuple[Classes, ...] = ()

    def score(self, task: str) -> Score | None:
        return next((score for score in self.scores if score.task == task), None)

    def of(self, protocol: str) -> list[Score]:
        return [score for score in self.scores if score.protocol == protocol]


def read_evaluations(
    folder: Path, samples_at: Callable[[int | None], int | None], notes: list[str]
) -> tuple[StoredEvaluation, ...]:
    """Every evaluated checkpoint, in the order of samples seen; the last number in its name is its step."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not path.is_dir():
            continue
        numbers = re.findall(r"\d+", path.name)
        step = int(numbers[-1]) if numbers else None
        evaluation = _read_checkpoint(path, step, samples_at(step), notes)
        if evaluation.scores or evaluation.failures:
            found.append(evaluation)
    averages = [evaluation.checkpoint for evaluation in found if evaluation.average]
    if 0 < len(averages) < len(found):
        notes.append(
            f"The scores of {', '.join(averages)} are of the average of the weights (EMA), the others of the trained "
            "weights: their curves mix both."
        )
    return tuple(sorted(found, key=lambda e: (e.samples is None, e.samples or 0, e.step or 0, e.checkpoint)))


def _read_checkpoint(folder: Path, step: int | None, samples: int | None, notes: list[str]) -> StoredEvaluation:
    scores, summary, timings = [], read_tree(folder / SUMMARY), read_tree(folder / TIMINGS)
    weights, left_out = summary.get("checkpoint"), part_of(summary, "left_out")
    for path in sorted(folder.glob("*.json")):
        if path.name in (SUMMARY, TIMINGS, LOCK):
            continue
        tree = read_tree(path)
        reason = left_out.get(str(tree.get("task")), ANOTHER_SUITE)
        if reason != ANOTHER_SUITE:
            notes.append(f"{folder.name}/{path.name} is skipped: {reason}.")
            continue
        if weights and part_of(tree, "inputs").get("checkpoint", weights) != weights:
            notes.append(f"{folder.name}/{path.name} scores other weights than its summary's and is skipped.")
        elif not is_intact(tree) or not is_named_after(path, str(tree.get("task"))):
            notes.append(f"{folder.name}/{path.name} was edited or copied since it was written, and is skipped.")
        elif (score := _score(tree, path)) is not None:
            scores.append(score)
        else:
            notes.append(f"{folder.name}/{path.name} is not a task's result and is skipped.")
    if scores and not summary:
        notes.append(f"{folder.name}: the evaluation is not finished, tasks are missing.")
    table = {key: position for position, key in enumerate(TASKS)}
    scores.sort(key=lambda score: table.get(score.task, len(table)))
    return StoredEvaluation(
        checkpoint=folder.name,
        step=step,
        samples=samples,
        scores=tuple(scores),
        failures=part_of(summary, "failures"),
        aggregates=part_of(summary, "aggregates"),
        timings=part_of(timings, "tasks"),
        average=Path(str(timings.get("source", ""))).name == AVERAGE,
        examples=tuple(example for path in sorted(folder.glob("*.examples")) for example in _examples(path, notes)),
        described=tuple(one for path in sorted(folder.glob("*.examples")) for one in _described(path, notes)),
        classes=tuple(found for score in scores if (found := _classes(folder, score, notes)) is not None),
    )


def _score(tree: Mapping[str, Any], path: Path) -> Score | None:
    """The score in a result's file; None for a damaged one, or a file of another kind."""
    numbers = isinstance(tree.get("score"), int | float) and isinstance(tree.get("samples"), int)
    parts = all(isinstance(tree.get(name, {}), dict) for name in ("metrics", "inputs"))
    if not (numbers and parts and all(key in tree for key in NEEDED)):
        return None
    return Score(
        task=tree["task"],
        name=tree.get("name", tree["task"]),
        protocol=tree["protocol"],
        main_metric=tree["main_metric"],
        score=float(tree["score"]),
        metrics=tree["metrics"],
        chance=tree.get("chance"),
        samples=int(tree["samples"]),
        inputs=tree.get("inputs", {}),
        path=path,
        official=bool(tree.get("official")),
        outcomes_digest=tree.get("outcomes"),
    )


def _examples(folder: Path, notes: list[str]) -> list[Example]:
    try:
        entries = json.loads((folder / "examples.json").read_text(encoding="utf-8"))
        return [
            Example(
                caption=entry["caption"],
                rank=int(entry["rank"]),
                images=tuple(
                    Retrieved(_image(folder, image["file"]), image.get("score"), bool(image["right"]))
                    for image in entry["images"]
                ),
                own=_image(folder, f"{entry['right']}.jpg"),
            )
            for entry in entries
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        notes.append(f"The retrieval examples in {folder.name} cannot be read ({error!r}).")
        return []


def _image(folder: Path, name: object) -> Path:
    """An image beside the examples. The report contains it, and results may come from others."""
    return path_below(folder, name, what="An example's image")


def _described(folder: Path, notes: list[str]) -> list[Described]:
    path = folder / "images.json"
    if not path.is_file():  # written by an older version
        return []
    try:
        return [
            Described(
                image=_image(folder, entry["file"]),
                rank=int(entry["rank"]),
                captions=tuple((one["caption"], bool(one["right"])) for one in entry["captions"]),
                own=" / ".join(entry["own"]),
            )
            for entry in json.loads(path.read_text(encoding="utf-8"))
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        notes.append(f"The captions retrieved for images in {folder.name} cannot be read ({error!r}).")
        return []


def _classes(folder: Path, score: Score, notes: list[str]) -> Classes | None:
    path = folder / "classes" / score.path.name
    if not path.is_file():
        return None
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        names = tuple(one["name"] or "(blank)" for one in tree["classes"])
        return Classes(
            task=score.label,
            names=names,
            accuracy=tuple(one["accuracy"] for one in tree["classes"]),
            matrix=tuple(map(tuple, tree["matrix"])) if tree["matrix"] else None,
            confusions=tuple((names[c["true"]], names[c["predicted"]], int(c["count"])) for c in tree["confusions"]),
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        notes.append(f"The classes of {score.task} cannot be read ({error!r}).")
        return None
