"""The charts of a run's page: curves over samples seen, and small multiples of its tasks.

Unknown logged quantities are shown under their own names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from pipeline.registries import load_entry_points
from pipeline.report.figures import SERIES, SMALL, Line, line_chart
from pipeline.report.page import rounded
from pipeline.report.run_data import RECALLS, Run

MAIN = ("samples_per_second", "data_wait", "lr", "gradient_norm")
GAP, COLD = "normalizer_gap", "normalizer_gap_cold"
FIRST = ("loss", "tau", GAP, COLD, *MAIN)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Quantity:
    """How a logged value is displayed."""

    title: str
    """Title, with the unit if there is one."""
    note: str = ""
    """One sentence on how to read it."""
    share: bool = False
    """It is shown in percent."""
    smooth: bool = True
    """A moving average is drawn over the values."""


def _share(what: str, *, part_of: str = "") -> Quantity:
    return Quantity(f"Time in {what}, share of a step", f"A part of {part_of}." if part_of else "", share=True)


KNOWN: dict[str, Quantity] = {
    "loss": Quantity(
        "Loss", "The objective's own loss. It can be negative, and losses of different methods are not comparable."
    ),
    "normalizer_gap": Quantity(
        "Normalizer gap",
        "By how much the method's estimates of the log-normalizers miss those of the batch: at 0.1 the weights of "
        "negatives are about 10% off. In use: after the updates on the batch; cold: before them.",
    ),
    "tau": Quantity("Temperature τ", "", smooth=False),
    "lr": Quantity("Learning rate of the encoders", smooth=False),
    "tau_lr": Quantity("Learning rate of the temperature", smooth=False),
    "npn_lr": Quantity("Learning rate of the normalizer network", smooth=False),
    "bias": Quantity("Bias of the logits", smooth=False),
    "gamma": Quantity("Weight γ of new values in the moving average", smooth=False),
    "samples_per_second": Quantity("Throughput, samples per second"),
    "cpu_ms": Quantity("CPU time of a step, ms", "All threads of rank 0, without its loading workers."),
    "data_wait": Quantity("Waiting for data, share of a step", "Near zero: loading is not the limit.", share=True),
    "ratio_max": Quantity(
        "Largest ratio of normalizers", "Batch's normalizer over the predicted one, after the cap; near 1 is good."
    ),
    "prototype_norm": Quantity("Mean length of a prototype", "Prototypes start at length 1."),
    "gradient_norm": Quantity("Gradient norm", "Of the encoders, before clipping."),
    "time_forward": _share("the towers, forward"),
    "time_backward": _share("the towers, backward"),
    "time_objective": _share("the objective"),
    "time_optimizer": _share("the optimizer"),
    "time_npn": _share("the normalizer network", part_of="the objective's time"),
    "time_communication": _share("the objective's collectives", part_of="the objective's time"),
    "host_memory_gib": Quantity("Host memory, GiB", "Peak of rank 0's process.", smooth=False),
    "memory_gib": Quantity("GPU memory, GiB", "Peak allocated by rank 0.", smooth=False),
    "mfu": Quantity("Model FLOPs utilization", "Share of the device's peak.", share=True),
    "skipped_steps": Quantity("Steps skipped", smooth=False),
    "rollbacks": Quantity("Roll-backs to a checkpoint", smooth=False),
    "corrupt_samples": Quantity("Corrupt samples in this epoch", smooth=False),
    "drift_events": Quantity("Replicated states that differed between ranks", smooth=False),
}


def quantity(key: str) -> Quantity:
    """How `key` is displayed; an unknown key has its own name as the title."""
    return KNOWN.get(key) or Quantity(key.replace("_", " ")[:1].upper() + key.replace("_", " ")[1:])


@dataclass(frozen=True)
class Chart:
    """Curves with a title, a note on how to read them, and their last values in words."""

    title: str
    svg: str
    note: str
    end: str


def chart(title: str, lines: Iterable[Line], *, note: str = "", percent: bool = False, **options: Any) -> Chart | None:
    """The curves that have points, as a chart; None if none has.

    Args:
        title: The title.
        lines: The curves.
        note: How to read them.
        percent: The values are fractions, shown in percent.
        options: Passed to `line_chart`.
    """
    drawn = [line for line in lines if len(line.x)]
    if not drawn:
        return None
    last = [f"{100 * line.y[-1]:.1f}%" if percent else rounded(float(line.y[-1])) for line in drawn]
    ends = ", ".join(f"{line.label} {end}".strip() for line, end in zip(drawn, last, strict=True))
    return Chart(title, line_chart(drawn, percent=percent, **options), note, f"At the end {ends}.")


def quantity_chart(key: str, runs: Iterable[tuple[str, Run, str]]) -> Chart | None:
    """A logged quantity of runs, each with its label before it and its colour behind it."""
    shown = quantity(key)
    lines = [Line(*run.curve(key), label=label, colour=colour, smooth=shown.smooth) for label, run, colour in runs]
    return chart(shown.title, lines, note=shown.note, percent=shown.share)


CHARTS: list[Callable[[Run], Chart | None]] = []
C = TypeVar("C", bound=Callable[[Run], Chart | None])


def register_chart(make: C) -> C:
    """Decorator of a further chart of a run's page; None is not drawn.

    A package of a user's own has an entry point of the group `neuclip.charts`.
    """
    CHARTS.append(make)
    return make


def training_charts(run: Run) -> list[Chart]:
    """Curves of all logged values that change, the most useful ones first, and registered charts."""
    load_entry_points("neuclip.charts", what="chart")

    def of(key: str) -> Chart | None:
        return quantity_chart(key, [("", run, SERIES[0])])

    gap = quantity(GAP)
    both = ("in use", "cold") if len(run.curve(COLD)[0]) else ("", "")
    lines = [
        Line(*run.curve(key), label=label, colour=colour, smooth=True)
        for key, label, colour in zip((GAP, COLD), both, SERIES, strict=False)
    ]
    others = [key for key in _varying(run) if key not in FIRST]
    charts = [of("loss"), *_validation(run), of("tau"), chart(gap.title, lines, note=gap.note)]
    charts += map(of, (*MAIN, *others))
    for make in CHARTS:
        try:
            charts.append(make(run))
        except Exception as error:  # a chart of a user's own may raise anything
            log.warning("The chart %s.%s is left out: %r.", make.__module__, make.__qualname__, error)
    return [drawn for drawn in charts if drawn is not None]


def _validation(run: Run) -> Iterator[Chart | None]:
    note = "The contrastive loss of held-out pairs against each other, at a fixed temperature."
    yield chart("Validation loss", [Line(*run.validation("loss"), marked=True)], note=note)
    recalls = [
        Line(*run.validation(key), label=label, colour=colour, marked=True)
        for key, label, colour in zip(RECALLS, ("image → text", "text → image"), SERIES, strict=False)
    ]
    note = "The share of held-out pairs whose other half ranks first."
    yield chart("Validation R@1", recalls, note=note, percent=True)


def constants(run: Run) -> list[tuple[str, str]]:
    """(title, value) of logged values that never changed; they are listed instead of plotted."""
    drawn = {*_varying(run), *FIRST}
    others = [key for key in run.scalars() if key not in drawn]
    return [(quantity(key).title, rounded(float(run.curve(key)[1][0]))) for key in others]


def _varying(run: Run) -> list[str]:
    return [key for key in run.scalars() if np.ptp(run.curve(key)[1]) > 0]


def progress_charts(run: Run) -> list[Chart]:
    """Small multiples: every task over samples seen, aggregates first; empty for fewer than two checkpoints."""
    evaluated = [e for e in run.evaluations if e.samples is not None]
    if len(evaluated) < 2:
        return []
    names = [n for n in evaluated[-1].aggregates if all(e.aggregates.get(n, {}).get("complete") for e in evaluated)]
    series: list[tuple[str, list[Any], float | None]] = [
        (name, [(e.samples, e.aggregates[name]["score"]) for e in evaluated], None) for name in names
    ]
    for last in evaluated[-1].scores:
        points = [(e.samples, score.score) for e in evaluated if (score := e.score(last.task)) is not None]
        series.append((last.label, points, last.chance))
    made = []
    for title, points, chance in series:
        x, y = np.array(points, dtype=np.float64).T
        made.append(chart(title, [Line(x, y, marked=True)], percent=True, level=chance, size=SMALL))
    return list(filter(None, made))
