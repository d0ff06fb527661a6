"""Reads RUN/evaluation/<checkpoint>/: one score per task, per-sample outcomes, and retrieval examples."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pipeline.errors import UserError
from pipeline.evaluation.datasets.datacomp import TASKS
from pipeline.evaluation.identity import LOCK_NAME
from pipeline.evaluation.run.results import (
    ANOTHER_SUITE,
    TaskResult,
    part_of,
    read_outcomes,
    read_result,
)
from pipeline.files import MOST_TEXT, path_below, read_bounded, read_tree
from pipeline.run_files import EMA_NAME

T = TypeVar("T")
SUMMARY, TIMINGS = "summary.json", "timings.json"


@dataclass(frozen=True)
class Score(TaskResult):
    """One task's result, and the file that it was read from."""

    path: Path = field(kw_only=True)

    @property
    def label(self) -> str:
        """The short name; if the task has no name, its key without the suite's prefix."""
        return self.task.rpartition("/")[2] if self.name == self.task else self.name

    def read_outcomes(self) -> dict[str, np.ndarray] | None:
        """Per-sample outcomes, from which every metric can be recomputed; None if missing or changed."""
        return read_outcomes(self.path, self.outcomes)


@dataclass(frozen=True)
class StoredEvaluation:
    """All results of one checkpoint; `failures` are error messages by task."""

    checkpoint: str
    step: int | None
    samples: int | None
    scores: tuple[Score, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    aggregates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    average: bool = False
    """Whether the weights are the average (EMA) of a checkpoint's, as while training with `ema.decay`."""
    examples: tuple[Mapping[str, Any], ...] = ()
    """Captions, each with the `rank` of its `own` image (0 is first) and the best `images`, one of them `right` if its
    own is `found`."""
    described: tuple[Mapping[str, Any], ...] = ()
    """Images, each with the `rank` of its best own caption (0 is first), its `own` captions as one text, and the best
    `captions`, one of them `right` if an own one is `found`."""

    def score(self, task: str) -> Score | None:
        return next((score for score in self.scores if score.task == task), None)

    def of(self, protocol: str) -> list[Score]:
        return [score for score in self.scores if score.protocol == protocol]


def read_evaluations(
    folder: Path, samples_at: Callable[[int | None], int | None], notes: list[str]
) -> tuple[StoredEvaluation, ...]:
    """Every evaluated checkpoint, in the order of samples seen; the last number in its name is its step."""
    evaluations = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not path.is_dir():
            continue
        numbers = re.findall(r"\d+", path.name)
        step = int(numbers[-1]) if numbers else None
        evaluation = _read_checkpoint(path, step, samples_at(step), notes)
        if evaluation.scores or evaluation.failures:
            evaluations.append(evaluation)
    averages = [evaluation.checkpoint for evaluation in evaluations if evaluation.average]
    if 0 < len(averages) < len(evaluations):
        notes.append(
            f"The scores of {', '.join(averages)} are of the average of the weights (EMA), the others of the trained "
            "weights: their curves mix both."
        )
    return tuple(sorted(evaluations, key=lambda e: (e.samples is None, e.samples or 0, e.step or 0, e.checkpoint)))


def _read_checkpoint(folder: Path, step: int | None, samples: int | None, notes: list[str]) -> StoredEvaluation:
    scores, summary = [], read_tree(folder / SUMMARY)
    weights, left_out = summary.get("checkpoint"), part_of(summary, "left_out")
    for path in sorted(folder.glob("*.json")):
        if path.name in (SUMMARY, TIMINGS, LOCK_NAME):
            continue
        tree = read_tree(path)
        reason = left_out.get(str(tree.get("task")), ANOTHER_SUITE)
        if reason != ANOTHER_SUITE:
            notes.append(f"{folder.name}/{path.name} is skipped: {reason}.")
            continue
        if weights and part_of(tree, "inputs").get("checkpoint", weights) != weights:
            notes.append(f"{folder.name}/{path.name} scores other weights than its summary's and is skipped.")
        elif (result := read_result(path)) is not None:
            scores.append(Score(**vars(result), path=path))
        else:
            notes.append(f"{folder.name}/{path.name} is not a task's result and is skipped.")
    if scores and not summary:
        notes.append(f"{folder.name}: the evaluation is not finished, tasks are missing.")
    table = {key: position for position, key in enumerate(TASKS)}
    scores.sort(key=lambda score: table.get(score.task, len(table)))

    def retrieved(name: str, parse: Callable[[Path, Any], dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for path in sorted(folder.glob("*.examples")):

            def entries(text: bytes, path: Path = path) -> list[dict[str, Any]]:
                return [parse(path, entry) for entry in json.loads(text)]

            what = f"The retrieved pairs in {path.name} cannot be shown"
            yield from stored(path / name, entries, what=what, notes=notes) or ()

    return StoredEvaluation(
        checkpoint=folder.name,
        step=step,
        samples=samples,
        scores=tuple(scores),
        failures=part_of(summary, "failures"),
        aggregates=part_of(summary, "aggregates"),
        average=Path(str(read_tree(folder / TIMINGS).get("source", ""))).name == EMA_NAME,
        examples=tuple(retrieved("examples.json", _example)),
        described=tuple(retrieved("images.json", _described)),
    )


def stored(path: Path, parse: Callable[[bytes], T], *, what: str, notes: list[str], most: int = MOST_TEXT) -> T | None:
    """What `parse` makes of a file of at most `most` bytes; None, with a note, if it is missing or damaged."""
    try:
        return parse(read_bounded(path, most=most))
    except FileNotFoundError:
        notes.append(f"{what}: {path.name} is not there.")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        notes.append(re.sub(r"\s+", " ", f"{what}: {path.name} cannot be read ({error})."))
    return None


def _image(folder: Path, name: object) -> Path:
    """An image beside the examples. The report contains it, and results may come from others: no link may lead away."""
    path = path_below(folder, name, what="An example's image")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{path} is a link to a file outside of the folder")
    return path


def _example(folder: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
    images = [
        {"file": _image(folder, image["file"]), "score": image.get("score"), "right": bool(image["right"])}
        for image in entry["images"]
    ]
    own, is_found = _image(folder, f"{entry['right']}.jpg"), any(image["right"] for image in images)
    return {"caption": entry["caption"], "rank": int(entry["rank"]), "images": images, "own": own, "found": is_found}


def _described(folder: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
    captions = [(one["caption"], bool(one["right"])) for one in entry["captions"]]
    return {
        "image": _image(folder, entry["file"]),
        "rank": int(entry["rank"]),
        "captions": captions,
        "own": " / ".join(entry["own"]),
        "found": any(right for _, right in captions),
    }
