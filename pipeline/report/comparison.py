"""Comparison of several runs: shared tasks, aggregates and differences with intervals, as a page, markdown and CSV."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.errors import UserError
from pipeline.evaluation.datasets.datacomp import AGGREGATES
from pipeline.files import write_text
from pipeline.report.bootstrap import Difference, difference, resample
from pipeline.report.charts import GAP, Chart, chart, quantity_chart
from pipeline.report.figures import SERIES, Line
from pipeline.report.page import render
from pipeline.report.run_data import Run, flat
from pipeline.report.stored_scores import Score, StoredEvaluation

SETTINGS = ("blank_class", "micro_batch", "precision", "task_data")
"""Evaluation inputs that must be equal for scores to be comparable."""
COMPARED = ("loss", "tau", GAP, "samples_per_second")
"""Logged quantities whose curves are shown."""
NOT_OFFICIAL = "not the official data"
Named = Sequence[tuple[str, Run, str]]
"""Runs, each with its label before it and its colour behind it."""


@dataclass(frozen=True)
class Row:
    """One task or aggregate: a score per run (None: missing) and its difference from the first run."""

    name: str
    scores: tuple[float | None, ...]
    differences: tuple[Difference | None, ...]
    chance: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The comparison of several runs, the first of which is the baseline."""

    labels: tuple[str, ...]
    """One short, distinct name per run."""
    aggregates: tuple[Row, ...]
    tasks: tuple[Row, ...]
    notes: tuple[str, ...]
    """Remarks about missing data."""


def write_comparison(runs: Sequence[Run], output: Path) -> Path:
    """Write `comparison.html`, `.md` and `.csv` to `output`. Returns the path of the page.

    Raises:
        UserError: The runs were evaluated with different settings or on different data.
    """
    comparison = compare(runs)
    named = list(zip(comparison.labels, runs, itertools.cycle(SERIES), strict=False))
    context = {
        "c": comparison,
        "title": " · ".join(comparison.labels),
        "settings": _different_settings(runs),
        "curves": list(filter(None, _performance_curves(named))),
        "training": list(filter(None, (quantity_chart(key, named) for key in COMPARED))),
        "percent": percent,
        "change": change,
    }
    write_text(output / "comparison.csv", to_csv(comparison))
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
    for key in by_task:
        _check_inputs(key, names, scores[key])
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
    return Comparison(tuple(names), tuple(aggregates), tuple(tasks), tuple(_notes(names, runs)))


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


def _check_inputs(task: str, names: Sequence[str], scores: Sequence[Score | None]) -> None:
    """Refuse runs that evaluated a task differently."""
    for setting in SETTINGS:
        values = {
            name: str(score.inputs[setting])[:12]
            for name, score in zip(names, scores, strict=True)
            if score is not None and setting in score.inputs
        }
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{name}: {value}" for name, value in values.items())
            what = "on different data" if setting == "task_data" else f"with different {setting}"
            raise UserError(
                f"{task} was evaluated {what} ({shown}): such scores do not compare. Evaluate the runs with equal "
                "settings on equal data (`neuclip evaluate`)."
            )


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


def _row(
    name: str, scores: Sequence[float | None], resampled: np.ndarray | None, *, chance: float | None = None
) -> Row:
    first = scores[0]
    differences: list[Difference | None] = [None]
    for k, score in enumerate(scores[1:], 1):
        both = score is not None and first is not None
        differences.append(difference(score - first, resampled, k) if both else None)  # type: ignore[operator]
    return Row(name, tuple(scores), tuple(differences), chance=chance)


def _notes(names: Sequence[str], runs: Sequence[Run]) -> Iterator[str]:
    for name, run in zip(names, runs, strict=True):
        yield from (f"{name}: {note}" for note in run.notes)
        failures = run.latest.failures if run.latest else {}
        yield from (f"{name}: {task} could not be scored: {reason}" for task, reason in failures.items())
    latest = {name: run.latest for name, run in zip(names, runs, strict=True) if run.latest is not None}
    if len({evaluation.samples for evaluation in latest.values()}) > 1:
        shown = ", ".join(f"{name} {e.samples:,}" if e.samples else f"{name} ?" for name, e in latest.items())
        yield f"The latest evaluations are not at the same number of samples seen: {shown}."


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


def change(value: Difference | None) -> str:
    """`+1.23 [+0.10, +2.31]` in points; the brackets are the 95% confidence interval."""
    if value is None:
        return ""
    text = f"{100 * value.value:+.2f}"
    if value.interval is None:
        return text
    return f"{text} [{100 * value.interval[0]:+.2f}, {100 * value.interval[1]:+.2f}]"


def to_csv(comparison: Comparison) -> str:
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


def _performance_curves(named: Named) -> Iterator[Chart | None]:
    """Every aggregate over samples seen, one curve per run."""
    for name, keys in groups_of([run.latest for _, run, _ in named]).items():
        lines = []
        for label, run, colour in named:
            scores = [(e.samples, mean_score(e, keys)) for e in run.evaluations if e.samples is not None]
            points = np.array([p for p in scores if p[1] is not None], dtype=np.float64).reshape(-1, 2)
            lines.append(Line(points[:, 0], points[:, 1], label=label, colour=colour, marked=True))
        yield chart(name, lines, percent=True)


def _different_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The settings in which the runs differ, with the value of each run; a dash if a run does not have the key."""
    trees = [dict(flat(run.config)) for run in runs]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    rows = [(key, [tree.get(key, "–") for tree in trees]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1 and key != "output"]
