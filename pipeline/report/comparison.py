"""Comparison of several runs: shared tasks, aggregates, differences with intervals, means over seeds.

The intervals are of a paired bootstrap over a task's samples: the uncertainty due to the finite test set. They do not
include the variation between training seeds; repeat runs with other seeds to measure that.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.config import flatten
from pipeline.errors import UserError
from pipeline.evaluation.datasets.datacomp import AGGREGATES, TASKS
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
    by_task = {score.task: score for e in latest if e is not None for score in e.scores}
    scores = {key: [evaluation.score(key) if evaluation else None for evaluation in latest] for key in by_task}
    different = [text for key in by_task for text in _different_inputs(key, labels(runs), scores[key])]
    if different and not mixed:
        raise UserError(
            f"{different[0]} Evaluate the runs with equal settings on equal data, or compare them with --mixed."
        )
    drawn = {key: _per_run(of) for key, of in scores.items()}
    tasks = [
        _row(sample.label, [s.score if s else None for s in scores[key]], drawn[key], chance=sample.chance)
        for key, sample in by_task.items()
    ]
    aggregates = []
    for name, keys in groups_of(latest).items():
        known = [part for key in keys if (part := drawn.get(key)) is not None]
        values = np.mean(known, axis=0) if len(known) == len(keys) else None
        aggregates.append(_row(name, [mean_score(e, keys) for e in latest], values))
    return Comparison(
        runs=tuple(runs),
        labels=tuple(labels(runs)),
        aggregates=tuple(aggregates),
        tasks=tuple(tasks),
        methods=tuple(_methods(runs, aggregates)),
        notes=(*different, *_notes(runs)),
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
    """The aggregates to show: official ones for which some run has all tasks, else means over the shared tasks.

    The name of an official one says if some of the data is not the official data.
    """
    done = [{score.task: score for score in e.scores} if e else {} for e in evaluations]
    groups: dict[str, tuple[str, ...]] = {}
    for name, keys in AGGREGATES.items():
        if any(set(keys) <= set(scores) for scores in done):
            official = all(scores[key].official for scores in done for key in keys if key in scores)
            groups[name if official else f"{name} ({NOT_OFFICIAL})"] = keys
    if groups or not done:
        return groups
    shared = [score for score in done[0].values() if all(score.task in scores for scores in done)]
    for protocol, name in (("classification", "Zero-shot"), ("retrieval", "Retrieval")):
        if keys := tuple(score.task for score in shared if score.protocol == protocol):
            groups[f"{name} (mean of {len(keys)} shared tasks)" if len(keys) > 1 else name] = keys
    return groups


def _different_inputs(task: str, names: Sequence[str], scores: Sequence[Score | None]) -> Iterator[str]:
    """One sentence per difference in how the runs evaluated a task."""
    for setting in SETTINGS:
        values = {
            name: str(score.inputs[setting])[:12]
            for name, score in zip(names, scores, strict=True)
            if score is not None and setting in score.inputs
        }
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{name}: {value}" for name, value in values.items())
            what = "on different data" if setting == "task_data" else f"with different {setting}"
            yield f"{task} was evaluated {what} ({shown})."


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


def _row(name: str, scores: Sequence[float | None], values: np.ndarray | None, *, chance: float | None = None) -> Row:
    differences: list[Difference | None] = [None]
    for k, score in enumerate(scores[1:], 1):
        both = (values[0], values[k]) if values is not None else (None, None)
        known = score is not None and scores[0] is not None
        differences.append(difference(score - scores[0], *both) if known else None)  # type: ignore[operator]
    return Row(name, tuple(scores), tuple(differences), chance=chance)


def _methods(runs: Sequence[Run], aggregates: Sequence[Row]) -> list[Method]:
    members: dict[str, list[int]] = {}
    for k, run in enumerate(runs):
        identity = {key: value for key, value in run.config.items() if key not in SEED_KEYS}
        members.setdefault(json.dumps(flatten(identity) or k, sort_keys=True, default=str), []).append(k)
    objectives = [str(run.setting("objective.name", "")) for run in runs]
    methods = []
    for group in members.values():
        values: list[tuple[float, float | None] | None] = []
        for row in aggregates:
            full = [score for k in group if (score := row.scores[k]) is not None]
            spread = statistics.stdev(full) if len(full) > 1 else None
            values.append((statistics.fmean(full), spread) if len(full) == len(group) else None)
        mine, others = objectives[group[0]], [name for k, name in enumerate(objectives) if k not in group]
        name = mine if mine and mine not in others else ", ".join(labels(runs)[k] for k in group)
        methods.append(Method(name, len(group), tuple(values)))
    return methods


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = [f"{name}: {note}" for name, run in zip(labels(runs), runs, strict=True) for note in run.notes]
    latest = {name: run.latest for name, run in zip(labels(runs), runs, strict=True) if run.latest is not None}
    for name, evaluation in latest.items():
        notes += [f"{name}: {task} could not be scored: {reason}" for task, reason in evaluation.failures.items()]
    if len({evaluation.samples for evaluation in latest.values()}) > 1:
        shown = ", ".join(f"{name} {e.samples:,}" if e.samples else f"{name} ?" for name, e in latest.items())
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
