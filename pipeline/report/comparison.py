"""Comparison of several runs: shared tasks, aggregates, differences with intervals, means over seeds.

The intervals are of a paired bootstrap over a task's samples: the uncertainty due to the finite test set. They do not
include the variation between training seeds; repeat runs with other seeds to measure that.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config import flatten
from pipeline.errors import UserError
from pipeline.evaluation.datasets.datacomp import AGGREGATES
from pipeline.report.run_data import Run
from pipeline.report.stored_scores import Score, StoredEvaluation

SETTINGS = ("blank_class", "micro_batch", "precision", "task_data")
"""Evaluation inputs that must be equal for scores to be comparable."""
NOT_OFFICIAL = "not the official data"
SEED_KEYS = ("seed", "output", "name")  # settings that may differ between repetitions of a run
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


@dataclass(frozen=True)
class Row:
    """One task or aggregate: a score per run (None: missing) and its difference from the first run."""

    name: str
    scores: tuple[float | None, ...]
    differences: tuple[Difference | None, ...]
    chance: float | None = None


@dataclass(frozen=True)
class Method:
    """Runs that differ only in their seed: mean of each aggregate and, for two or more runs, standard deviation."""

    name: str
    runs: int
    values: tuple[tuple[float, float | None] | None, ...]


@dataclass(frozen=True)
class Comparison:
    """The comparison of several runs, the first of which is the baseline."""

    runs: tuple[Run, ...]
    labels: tuple[str, ...]
    """One short, distinct name per run."""
    aggregates: tuple[Row, ...]
    tasks: tuple[Row, ...]
    methods: tuple[Method, ...]
    notes: tuple[str, ...]
    """Remarks about missing or differing data."""


def compare(runs: Sequence[Run], *, mixed: bool = False) -> Comparison:
    """Compare the latest evaluation of every run with that of the first.

    With `mixed`, scores may be from different settings or data; the notes list the differences.

    Raises:
        UserError: A task was evaluated with different settings or on different data, and `mixed` is not given.
    """
    latest = [run.latest for run in runs]
    different = _different_settings(runs, latest)
    if different and not mixed:
        raise UserError(
            f"{different[0]} Evaluate the runs with equal settings on equal data, or compare them with --mixed."
        )
    by_task = {score.task: score for e in latest if e is not None for score in e.scores}
    drawn: dict[str, np.ndarray | None] = {}
    tasks = []
    for key, sample in by_task.items():
        scores = [evaluation.score(key) if evaluation else None for evaluation in latest]
        drawn[key] = _per_run(scores)
        tasks.append(_row(sample.label, [s.score if s else None for s in scores], drawn[key], chance=sample.chance))
    aggregates = [_aggregate(name, keys, latest, drawn) for name, keys in groups_of(latest).items()]
    return Comparison(
        runs=tuple(runs),
        labels=tuple(labels(runs)),
        aggregates=tuple(aggregates),
        tasks=tuple(tasks),
        methods=tuple(_methods(runs, aggregates)),
        notes=(*different, *_notes(runs, latest)),
    )


def labels(runs: Sequence[Run]) -> list[str]:
    """Folder names, with as many parent folders as needed to make them distinct."""
    paths = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({number})" for number, run in enumerate(runs, 1)]


def groups_of(evaluations: Sequence[StoredEvaluation | None]) -> dict[str, tuple[str, ...]]:
    """The aggregates to show: official ones for which some run has all tasks, else means over the shared tasks."""
    have = [{score.task for score in e.scores} if e else set() for e in evaluations]
    official = {name: keys for name, keys in AGGREGATES.items() if any(set(keys) <= tasks for tasks in have)}
    if official:
        return {_noted(name, keys, evaluations): keys for name, keys in official.items()}
    shared = set.intersection(*have) if have else set()
    groups: dict[str, tuple[str, ...]] = {}
    for protocol, name in (("classification", "Zero-shot"), ("retrieval", "Retrieval")):
        keys = tuple(s.task for e in evaluations[:1] if e for s in e.of(protocol) if s.task in shared)
        if keys:
            groups[f"{name} (mean of {len(keys)} shared tasks)" if len(keys) > 1 else name] = keys
    return groups


def _noted(name: str, keys: Sequence[str], evaluations: Sequence[StoredEvaluation | None]) -> str:
    """An official aggregate's name, with a note if some of the data is not the official data."""
    scores = [e.score(key) for e in evaluations if e for key in keys]
    return name if all(score.official for score in scores if score is not None) else f"{name} ({NOT_OFFICIAL})"


def _different_settings(runs: Sequence[Run], latest: Sequence[StoredEvaluation | None]) -> list[str]:
    """One sentence per difference in how the runs evaluated a task."""
    differences = []
    for key in dict.fromkeys(score.task for e in latest if e for score in e.scores):
        scores = {name: e.score(key) for name, e in zip(labels(runs), latest, strict=True) if e is not None}
        inputs = {name: score.inputs for name, score in scores.items() if score is not None}
        for setting in SETTINGS:
            values = {name: str(own[setting])[:12] for name, own in inputs.items() if setting in own}
            if len(set(values.values())) > 1:
                shown = ", ".join(f"{name}: {value}" for name, value in values.items())
                what = "on different data" if setting == "task_data" else f"with different {setting}"
                differences.append(f"{key} was evaluated {what} ({shown}).")
    return differences


def mean_score(evaluation: StoredEvaluation | None, keys: Sequence[str]) -> float | None:
    """The mean over `keys`; None if any of them is missing."""
    scores = [evaluation.score(key) for key in keys] if evaluation else []
    values = [score.score for score in scores if score is not None]
    return math.fsum(values) / len(keys) if values and len(values) == len(keys) else None


def _per_run(scores: Sequence[Score | None]) -> np.ndarray | None:
    """What `resample` returns for the runs that have a score, with NaN for the others."""
    there = [score for score in scores if score is not None]
    if len(there) < 2 or (values := resample(there)) is None:
        return None
    full = np.full((len(scores), values.shape[1]), np.nan)
    full[[score is not None for score in scores]] = values
    return full


def _aggregate(
    name: str, keys: Sequence[str], latest: Sequence[StoredEvaluation | None], drawn: Mapping[str, np.ndarray | None]
) -> Row:
    parts = [drawn.get(key) for key in keys]
    known = [part for part in parts if part is not None]
    values = np.mean(known, axis=0) if len(known) == len(parts) else None
    return _row(name, [mean_score(e, keys) for e in latest], values)


def _row(name: str, scores: list[float | None], values: np.ndarray | None, *, chance: float | None = None) -> Row:
    differences: list[Difference | None] = [None]
    for k in range(1, len(scores)):
        mine, first = scores[k], scores[0]
        if mine is None or first is None:
            differences.append(None)
        else:
            pair = (values[0], values[k]) if values is not None else (None, None)
            differences.append(difference(mine - first, *pair))
    return Row(name, tuple(scores), tuple(differences), chance=chance)


def _methods(runs: Sequence[Run], aggregates: Sequence[Row]) -> list[Method]:
    members: dict[str, list[int]] = {}
    for k, run in enumerate(runs):
        identity = {key: value for key, value in run.config.items() if key not in SEED_KEYS}
        members.setdefault(json.dumps(flatten(identity) or k, sort_keys=True, default=str), []).append(k)
    methods = []
    for group in members.values():
        values: list[tuple[float, float | None] | None] = []
        for row in aggregates:
            scores = [row.scores[k] for k in group]
            full = [score for score in scores if score is not None]
            spread = statistics.stdev(full) if len(full) > 1 else None
            values.append((statistics.fmean(full), spread) if len(full) == len(group) else None)
        methods.append(Method(method_name(runs, group), len(group), tuple(values)))
    return methods


def method_name(runs: Sequence[Run], group: Sequence[int]) -> str:
    """The objective's name if no other group uses it, else the labels of the runs."""
    names = [str(run.setting("objective.name", "")) for run in runs]
    mine = names[group[0]]
    others = [name for k, name in enumerate(names) if k not in group]
    return mine if mine and mine not in others else ", ".join(labels(runs)[k] for k in group)


def _notes(runs: Sequence[Run], latest: Sequence[StoredEvaluation | None]) -> list[str]:
    names = labels(runs)
    notes = [f"{name}: {note}" for name, run in zip(names, runs, strict=True) for note in run.notes]
    for name, evaluation in zip(names, latest, strict=True):
        for task, reason in (evaluation.failures if evaluation else {}).items():
            notes.append(f"{name}: {task} could not be scored: {reason}")
    seen: dict[str, Any] = {name: e.samples for name, e in zip(names, latest, strict=True) if e is not None}
    if len(set(seen.values())) > 1:
        shown = ", ".join(f"{name} {samples:,}" if samples else f"{name} ?" for name, samples in seen.items())
        notes.append(f"The latest evaluations are not at the same number of samples seen: {shown}.")
    return notes


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


def difference(value: float, baseline: np.ndarray | None, other: np.ndarray | None) -> Difference:
    """The difference `value` with the percentile interval of `other - baseline`, `[resamples]` each."""
    if baseline is None or other is None:
        return Difference(value)
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(other - baseline, [tail, 100 - tail])
    return Difference(value, (float(low), float(high)))


def statistic(score: Score, outcomes: Outcomes) -> tuple[int, Statistic] | None:
    """The number of samples of a task, and its main metric as a function of the samples drawn."""
    if score.protocol == "retrieval" and score.main_metric == "mean_recall@1":
        return _recall(outcomes)
    if score.protocol == "association":
        counted = outcomes["candidates"] >= 10 if score.main_metric.endswith("10-12") else outcomes["candidates"] > 0
        return _ratio(outcomes["jaccard"] * counted, counted.astype(np.float64))
    if score.protocol != "classification":
        return None
    if score.main_metric in ("acc1", "acc5"):
        right = outcomes["rank"] < (1 if score.main_metric == "acc1" else 5)
        return len(right), lambda drawn: float(right[drawn].mean())
    return _other_classification(score, outcomes)


def _recall(outcomes: Outcomes) -> tuple[int, Statistic]:
    """Mean R@1 of both directions; an image is resampled together with all its captions."""
    owner = outcomes["caption_owner"]
    image = (outcomes["image_rank"] < 1).astype(np.float64)
    captions = np.bincount(owner, minlength=len(image)).astype(np.float64)
    hits = np.bincount(owner, weights=outcomes["caption_rank"] < 1, minlength=len(image))

    def compute(drawn: np.ndarray) -> float:
        return float(0.5 * (image[drawn].mean() + hits[drawn].sum() / captions[drawn].sum()))

    return len(image), compute


def _ratio(values: np.ndarray, weights: np.ndarray) -> tuple[int, Statistic]:
    return len(values), lambda drawn: float(values[drawn].sum() / max(1.0, weights[drawn].sum()))


def _other_classification(score: Score, outcomes: Outcomes) -> tuple[int, Statistic] | None:
    """Metrics over classes and groups, computed by the evaluation's own functions."""
    from pipeline.evaluation.datasets.datacomp import TASKS
    from pipeline.evaluation.protocol import group_metrics, macro_recall

    rows = len(outcomes["target"])
    if score.main_metric == "mean_per_class_recall":
        return rows, lambda drawn: macro_recall(outcomes["target"][drawn], outcomes["prediction"][drawn])
    task = TASKS.get(score.task)
    if task is None or not task.fields:
        return None
    return rows, lambda drawn: group_metrics(task, {k: v[drawn] for k, v in outcomes.items()})[task.main_metric]
