"""Which charts a run's page has: from what was read to SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.report.figures import SERIES, Bar, Line, bar_chart, line_chart
from pipeline.report.run_data import Run
from pipeline.report.stored_scores import Score

MAIN = ("loss", "normalizer_gap", "normalizer_gap_cold", "tau", "lr", "samples_per_second", "data_wait")
WIDE = (5.2, 2.8)  # inches, for a chart in the wide grid


@dataclass(frozen=True)
class Chart:
    """A picture with its title and one line that says how to read it."""

    title: str
    svg: str
    note: str = ""


def training_charts(run: Run) -> list[Chart]:
    """Loss, normalizer gap, temperature, learning rate, throughput, waiting for data, and any other scalar."""
    made = [
        _curves(run, "Loss", {"loss": ""}, note="The training objective; methods' losses are not comparable."),
        _curves(
            run,
            "Normalizer gap",
            {"normalizer_gap": "in use", "normalizer_gap_cold": "cold"},
            note="Mean |log-normalizer − target| after the inner updates on the batch (in use) and before them (cold).",
        ),
        _curves(run, "Temperature τ", {"tau": ""}, smooth=False),
        _curves(run, "Learning rate", {"lr": ""}, smooth=False),
        _curves(run, "Throughput, samples/s", {"samples_per_second": ""}, zero=True),
        _curves(run, "Waiting for data", {"data_wait": ""}, percent=True, zero=True, note="Share of the step's time."),
    ]
    others = [_curves(run, readable(key), {key: ""}) for key in _varying(run) if key not in MAIN]
    return [chart for chart in (*made, *others) if chart is not None]


def constants(run: Run) -> list[tuple[str, float]]:
    """Scalars that never changed: one line says what a chart would."""
    varying = _varying(run)
    others = [key for key in run.scalars() if key not in varying and key not in MAIN]
    return [(readable(key), float(run.curve(key)[1][0])) for key in others]


def readable(key: str) -> str:
    return key.replace("_", " ")


def _varying(run: Run) -> list[str]:
    return [key for key in run.scalars() if np.ptp(run.curve(key)[1]) > 0]


def _curves(
    run: Run,
    title: str,
    keys: dict[str, str],
    *,
    note: str = "",
    smooth: bool = True,
    percent: bool = False,
    zero: bool = False,
) -> Chart | None:
    lines = []
    for colour, (key, label) in zip(SERIES, keys.items(), strict=False):
        x, y = run.curve(key)
        if len(x):
            lines.append(Line(x, y, label=label, colour=colour, smooth=smooth))
    return Chart(title, line_chart(lines, percent=percent, zero=zero), note) if lines else None


def score_chart(scores: Sequence[Score]) -> Chart:
    """Scores of tasks on one scale, each with a tick where guessing would be."""
    best = sorted(scores, key=lambda s: (-(s.times_chance or 0), s.task))
    bars = [Bar(s.label, s.score, f"{100 * s.score:.1f} %", remark=_times(s.times_chance), mark=s.chance) for s in best]
    return Chart("Zero-shot accuracy", bar_chart(bars, limit=1.0), "The tick marks chance: what guessing would score.")


def _times(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}× chance" if value < 9.95 else f"{value:,.0f}× chance"


def progress_chart(run: Run) -> Chart | None:
    """Scores over samples seen, when more than one checkpoint was evaluated."""
    evaluated = [e for e in run.evaluations if e.samples is not None]
    if len(evaluated) < 2:
        return None
    tasks = [s.task for s in sorted(evaluated[-1].scores, key=lambda s: -s.score)]
    names = [n for n in evaluated[-1].aggregates if all(e.aggregates.get(n, {}).get("complete") for e in evaluated)]
    lines = []
    if names:
        for colour, name in zip(SERIES, names, strict=False):
            points = [(e.samples, e.aggregates[name]["score"]) for e in evaluated]
            lines.append(_marked(points, name, colour))
    else:
        for colour, task in zip(SERIES, tasks, strict=False):
            found = [(e.samples, e.score(task)) for e in evaluated]
            points = [(samples, s.score) for samples, s in found if s is not None]
            label = evaluated[-1].score(task)
            lines.append(_marked(points, label.label if label else task, colour))
    left_out = len(tasks) - len(SERIES) if not names else 0
    note = f"The {len(SERIES)} highest scores of {len(tasks)}." if left_out > 0 else ""
    return Chart("Scores over samples seen", line_chart(lines, percent=True, zero=True, size=WIDE), note)


def _marked(points: list, label: str, colour: str) -> Line:
    x, y = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return Line(x, y, label=label, colour=colour, marked=True)


def retrieval_chart(score: Score, *, named: bool = False) -> Chart:
    """Recall at 1, 5 and 10 in both directions. named: with the task's name, where there are several."""
    bars = []
    for direction, prefix, colour in (("image → text", "text", "series-1"), ("text → image", "image", "series-2")):
        for k in (1, 5, 10):
            value = score.metrics.get(f"{prefix}_retrieval_recall@{k}")
            if value is not None:
                times = _times(value * score.samples / k)
                bars.append(Bar(f"{direction}, R@{k}", value, f"{100 * value:.1f} %", remark=times, colour=colour))
    title = f"{score.label}: retrieval" if named else "Retrieval"
    return Chart(
        f"{title} among {score.samples:,} pairs", bar_chart(bars, limit=1.0), "Chance is k / number of images."
    )


def failure_chart(run: Run) -> Chart | None:
    """Why URLs gave no sample."""
    failures = sorted(run.failures.items(), key=lambda item: (-item[1], item[0]))
    if not failures:
        return None
    tried = sum(manifest.attempted for manifest in run.manifests)
    bars = [
        Bar(reason, count, f"{count:,}", remark=f"{100 * count / tried:.2g} %", colour="bad")
        for reason, count in failures
    ]
    return Chart("Why URLs gave no sample", bar_chart(bars), "Count, and share of all URLs that were tried.")


def stage_chart(run: Run) -> Chart | None:
    """How long every stage took."""
    if not run.stages:
        return None
    total = sum(run.stages.values()) or 1.0
    bars = [
        Bar(name, seconds, duration(seconds), remark=f"{100 * seconds / total:.0f} %", colour="series-1")
        for name, seconds in run.stages.items()
    ]
    return Chart("Time by stage", bar_chart(bars), f"Together {duration(total)}.")


def duration(seconds: float) -> str:
    """75.3 -> 1 min 15 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
