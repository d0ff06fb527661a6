"""Comparison of several runs: shared tasks, aggregates and differences with intervals, as a page, markdown and CSV.

Intervals are of a paired bootstrap over a task's samples: the uncertainty of a difference due to the finite test set,
without the variation between training seeds; repeat runs with other seeds to measure that.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.errors import UserError
from pipeline.evaluation.datasets.datacomp import AGGREGATES, TASKS
from pipeline.files import write_text
from pipeline.report.charts import GAP, SERIES, Line, chart, quantity_chart
from pipeline.report.page import render
from pipeline.report.run_data import Run, flat
from pipeline.report.stored_scores import Score, StoredEvaluation

SETTINGS = ("blank_class", "micro_batch", "precision", "task_data")
"""Evaluation inputs that must be equal for scores to be comparable."""
COMPARED = ("loss", "tau", GAP, "samples_per_second")
"""Logged quantities whose curves are shown."""
LEVEL = 0.95
Outcomes = Mapping[str, np.ndarray]
Statistic = Callable[[np.ndarray], float]


class Difference(NamedTuple):
    """A difference of scores and its confidence interval, which is None if per-sample outcomes were not stored."""

    value: float
    interval: tuple[float, float] | None = None

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)

    def __str__(self) -> str:
        """`+1.23 [+0.10, +2.31]` in points; the brackets are the 95% confidence interval."""
        ends = ", ".join(f"{100 * end:+.2f}" for end in self.interval or ())
        return f"{100 * self.value:+.2f}" + (f" [{ends}]" if ends else "")


class Row(NamedTuple):
    """One task or aggregate: a score per run (None: missing) and its difference from the first run."""

    name: str
    scores: list[float | None]
    differences: list[Difference | None]
    chance: float | None = None


class Comparison(NamedTuple):
    """Several runs, each with a short, distinct label; the first is the baseline. `notes` are about missing data."""

    labels: list[str]
    aggregates: list[Row]
    tasks: list[Row]
    notes: list[str]


def write_comparison(runs: Sequence[Run], output: Path) -> Path:
    """Write `comparison.html`, `.md` and `.csv` to `output`. Returns the path of the page.

    Raises:
        UserError: The runs were evaluated with different settings or on different data.
    """
    comparison = compare(runs)
    named = list(zip(comparison.labels, runs, itertools.cycle(SERIES), strict=False))
    curves = []
    for name, keys in groups_of([run.latest for run in runs]).items():
        lines = []
        for label, run, colour in named:
            scores = [(e.samples, _mean_score(e, keys)) for e in run.evaluations if e.samples is not None]
            points = np.array([p for p in scores if p[1] is not None], dtype=np.float64).reshape(-1, 2)
            lines.append(Line(points[:, 0], points[:, 1], label=label, colour=colour, marked=True))
        curves.append(chart(name, lines, percent=True))
    trees = [dict(flat(run.config)) for run in runs]
    settings = {key: [tree.get(key, "–") for tree in trees] for tree in trees for key in tree}
    context = {
        "c": comparison,
        "title": " · ".join(comparison.labels),
        "settings": [(key, values) for key, values in settings.items() if len(set(values)) > 1 and key != "output"],
        "curves": list(filter(None, curves)),
        "training": list(filter(None, (quantity_chart(key, named) for key in COMPARED))),
    }
    write_text(output / "comparison.csv", _to_csv(comparison))
    write_text(output / "comparison.md", render("comparison.md", context))
    return write_text(output / "comparison.html", render("comparison.html", context))


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare the latest evaluation of every run with that of the first.

    Raises:
        UserError: A task was evaluated with different settings or on different data.
    """
    latest, names = [run.latest for run in runs], labels(runs)
    by_task = {score.task: score for e in latest if e is not None for score in e.scores}
    scores = {key: [evaluation.score(key) if evaluation else None for evaluation in latest] for key in by_task}
    for key, setting in itertools.product(by_task, SETTINGS):
        pairs = [(name, one.inputs) for name, one in zip(names, scores[key], strict=True) if one is not None]
        values = {name: str(inputs[setting])[:12] for name, inputs in pairs if setting in inputs}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{name}: {value}" for name, value in values.items())
            what = "on different data" if setting == "task_data" else f"with different {setting}"
            raise UserError(
                f"{key} was evaluated {what} ({shown}): such scores do not compare. Evaluate the runs with equal "
                "settings on equal data (`neuclip evaluate`)."
            )
    resampled = {key: resample(of) for key, of in scores.items()}
    tasks = [
        _row(sample.label, [s.score if s else None for s in scores[key]], resampled[key], chance=sample.chance)
        for key, sample in by_task.items()
    ]
    aggregates = []
    for name, keys in groups_of(latest).items():
        parts = [part for key in keys if (part := resampled.get(key)) is not None]
        mean = np.mean(parts, axis=0) if len(parts) == len(keys) else None
        aggregates.append(_row(name, [_mean_score(e, keys) for e in latest], mean))
    notes = [f"{name}: {note}" for name, run in zip(names, runs, strict=True) for note in run.notes]
    evaluated = {name: run.latest for name, run in zip(names, runs, strict=True) if run.latest is not None}
    for name, evaluation in evaluated.items():
        notes += [f"{name}: {task} could not be scored: {why}" for task, why in evaluation.failures.items()]
    if len({evaluation.samples for evaluation in evaluated.values()}) > 1:
        shown = ", ".join(f"{name} {e.samples:,}" if e.samples else f"{name} ?" for name, e in evaluated.items())
        notes.append(f"The latest evaluations are not at the same number of samples seen: {shown}.")
    return Comparison(names, aggregates, tasks, notes)


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
            groups[name if official else f"{name} (not the official data)"] = keys
    if groups or not done:
        return groups
    shared = [score for score in done[0].values() if all(score.task in scores for scores in done)]
    for protocol, name in (("classification", "Zero-shot"), ("retrieval", "Retrieval")):
        if keys := tuple(score.task for score in shared if score.protocol == protocol):
            groups[f"{name} (mean of {len(keys)} shared tasks)" if len(keys) > 1 else name] = keys
    return groups


def _mean_score(evaluation: StoredEvaluation | None, keys: Sequence[str]) -> float | None:
    """The mean over `keys`; None if any of them is missing."""
    scores = [evaluation.score(key) for key in keys] if evaluation else []
    values = [score.score for score in scores if score is not None]
    return math.fsum(values) / len(keys) if values and len(values) == len(keys) else None


def _row(name: str, scores: list[float | None], resampled: np.ndarray | None, *, chance: float | None = None) -> Row:
    """A row with percentile intervals from `resampled`, `[runs, resamples]`."""
    first, differences = scores[0], list[Difference | None]()
    for k, score in enumerate(scores):
        if k == 0 or score is None or first is None:
            differences.append(None)
        elif resampled is None:
            differences.append(Difference(score - first))
        else:
            tail = 100 * (1 - LEVEL) / 2
            low, high = np.percentile(resampled[k] - resampled[0], [tail, 100 - tail])
            differences.append(Difference(score - first, (float(low), float(high))))
    return Row(name, scores, differences, chance=chance)


def resample(scores: Sequence[Score | None], *, resamples: int = 1_000) -> np.ndarray | None:
    """The main metric of one task on bootstrap samples, `[runs, resamples]`; every run uses the same samples.

    NaN for a run without a score. None if fewer than two have one, outcomes are missing, the runs were evaluated on
    different data, or the metric is not supported.
    """
    there = {k: score for k, score in enumerate(scores) if score is not None}
    stored = {k: outcomes for k, score in there.items() if (outcomes := score.read_outcomes()) is not None}
    statistics = {k: found for k, outcomes in stored.items() if (found := statistic(there[k], outcomes)) is not None}
    alike = {(str(there[k].inputs.get("task_data")), units) for k, (units, _) in statistics.items()}
    if len(there) < 2 or len(statistics) < len(there) or len(alike) != 1:
        return None
    ((_, units),) = alike
    task = next(iter(there.values())).task
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(task.encode()).digest()[:8], "big"))
    values = np.full((len(scores), resamples), np.nan)
    for column in range(resamples):
        drawn = rng.integers(units, size=units)
        for k, (_, compute) in statistics.items():
            values[k, column] = compute(drawn)
    return values


def statistic(score: Score, outcomes: Outcomes) -> tuple[int, Statistic] | None:
    """The number of samples of a task, and its main metric as a function of the samples drawn."""
    metric = score.main_metric
    if score.protocol == "retrieval" and metric == "mean_recall@1":
        # Of both directions; an image is resampled together with all its captions.
        owner = outcomes["caption_owner"]
        image = (outcomes["image_rank"] < 1).astype(np.float64)
        captions = np.bincount(owner, minlength=len(image)).astype(np.float64)
        hits = np.bincount(owner, weights=outcomes["caption_rank"] < 1, minlength=len(image))
        return len(image), lambda drawn: float(0.5 * (image[drawn].mean() + hits[drawn].sum() / captions[drawn].sum()))
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


def _to_csv(comparison: Comparison) -> str:
    """One line per task and run; values are fractions, not percent; empty if missing."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["kind", "task", "run", "score", "difference", "ci_low", "ci_high", "chance"])
    for kind, rows in (("aggregate", comparison.aggregates), ("task", comparison.tasks)):
        for row in rows:
            for label, score, delta in zip(comparison.labels, row.scores, row.differences, strict=True):
                low, high = delta.interval if delta and delta.interval else (None, None)
                values = [score, delta.value if delta else None, low, high, row.chance]
                writer.writerow([kind, row.name, label, *("" if v is None else repr(v) for v in values)])
    return buffer.getvalue()
