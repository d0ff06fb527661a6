"""The comparison of several runs as a page, markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.files import write_text
from pipeline.report.charts import COLD, GAP, Chart, curves, quantity, quantity_chart
from pipeline.report.comparison import Comparison, Difference, compare, groups_of, mean_score
from pipeline.report.figures import SERIES, Line
from pipeline.report.page import render, short
from pipeline.report.run_data import Run, flat

Named = Sequence[tuple[str, Run, str]]
"""Runs, each with its label before it and its colour behind it."""


def write_comparison(runs: Sequence[Run], output: Path, *, mixed: bool = False) -> Path:
    """Write `comparison.html`, `.md`, `.csv` and `.tex` to `output`. Returns the path of the page."""
    comparison = compare(runs, mixed=mixed)
    named = list(zip(comparison.labels, comparison.runs, itertools.cycle(SERIES), strict=False))
    context = {
        "c": comparison,
        "title": " · ".join(comparison.labels),
        "summary": _summary(named),
        "settings": different_settings(comparison),
        "curves": _performance_curves(named),
        "differences": _difference_charts(comparison),
        "training": [
            *(drawn for key in ("loss", "tau", GAP) for drawn in quantity_chart(key, named)),
            *quantity_chart(COLD, named, title=f"{quantity(GAP).title}, cold"),
            *quantity_chart("samples_per_second", named),
        ],
        "percent": percent,
        "change": change,
        "colours": SERIES,
    }
    write_text(output / "comparison.csv", to_csv(comparison))
    write_text(output / "comparison.tex", to_latex(comparison))
    write_text(output / "comparison.md", render("comparison.md", context))
    return write_text(output / "comparison.html", render("comparison.html", context))


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


def to_latex(comparison: Comparison) -> str:
    """The papers' table: methods by aggregates, in percent, mean and standard deviation over seeds; best in bold."""
    columns = [row.name for row in comparison.aggregates]
    best = []
    for k in range(len(columns)):
        means = [method.values[k][0] for method in comparison.methods if method.values[k] is not None]  # type: ignore[index]
        best.append(max(means, default=None))
    lines = [
        "% Needs the package booktabs.",
        rf"\begin{{tabular}}{{l{'c' * len(columns)}}}",
        r"\toprule",
        " & ".join(["Method", *map(_escape, columns)]) + r" \\",
        r"\midrule",
    ]
    for method in comparison.methods:
        cells = [_latex_cell(value, best[k]) for k, value in enumerate(method.values)]
        lines.append(" & ".join([_escape(method.name), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex_cell(value: tuple[float, float | None] | None, best: float | None) -> str:
    if value is None:
        return "--"
    mean, spread = value
    text = f"{100 * mean:.2f}"
    text = rf"\textbf{{{text}}}" if mean == best else text
    return text if spread is None else rf"{text} $\pm$ {100 * spread:.2f}"


def _escape(text: str) -> str:
    for character in "&%_#":
        text = text.replace(character, f"\\{character}")
    return text


def _summary(named: Named) -> list[dict[str, Any]]:
    rows = []
    for label, run, colour in named:
        _, speed = run.curve("samples_per_second")
        rows.append(
            {
                "label": label,
                "colour": colour,
                "method": run.setting("objective.name", "–"),
                "arch": run.architecture or "–",
                "batch": run.setting("batch_size", "–"),
                "seed": run.setting("seed", "–"),
                "samples": short(run.rows[-1]["samples"]) if run.rows else "–",
                "speed": short(float(np.median(speed))) if len(speed) else "–",
            }
        )
    return rows


def _performance_curves(named: Named) -> list[Chart]:
    """Every aggregate over samples seen, one curve per run."""
    made = []
    for name, keys in groups_of([run.latest for _, run, _ in named]).items():
        lines = []
        for label, run, colour in named:
            scores = [(e.samples, mean_score(e, keys)) for e in run.evaluations if e.samples is not None]
            points = np.array([p for p in scores if p[1] is not None], dtype=np.float64).reshape(-1, 2)
            lines.append(Line(points[:, 0], points[:, 1], label=label, colour=colour, marked=True))
        made += curves(name, lines, percent=True)
    return made


def _difference_charts(comparison: Comparison) -> list[dict[str, Any]]:
    """Per run, the difference of every task from the first run, the largest first, in points; coloured if the interval
    excludes zero. Positions are on a common axis, in percent of its width."""
    made = []
    for k, label in enumerate(comparison.labels[1:], 1):
        deltas = [(row.name, delta) for row in comparison.tasks if (delta := row.differences[k]) is not None]
        ends = [0.0, *(end for _, delta in deltas for end in (delta.value, *(delta.interval or ())))]
        least, span = min(ends), (max(ends) - min(ends)) or 1.0

        def place(value: float, *, least: float = least, span: float = span) -> float:
            return 3 + 94 * (value - least) / span

        rows = []
        for name, delta in sorted(deltas, key=lambda pair: -pair[1].value):
            low, high = delta.interval or (delta.value, delta.value)
            colour = ("good" if delta.value > 0 else "bad") if delta.is_clear else "muted"
            places = {"at": place(delta.value), "low": place(low), "high": place(high)}
            rows.append({"label": name, "text": change(delta), **places, "colour": colour})
        if rows:
            title = f"{label} against {comparison.labels[0]}, points"
            made.append({"title": title, "rows": rows, "zero": place(0.0)})
    return made


def different_settings(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """The settings in which the runs differ, with the value of each run; a dash if a run does not have the key."""
    trees = [dict(flat(run.config)) for run in comparison.runs]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    rows = [(key, [tree.get(key, "–") for tree in trees]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1 and key != "output"]
