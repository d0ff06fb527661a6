"""The charts of a run's page: curves over samples seen, and small multiples of its tasks.

Charts are inline SVG whose colours are CSS variables, so that they work in light and dark mode. One unit of the SVG is
about one pixel on a phone, so that text of 12 units can be read there. Unknown logged quantities are shown under their
own names.
"""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from pipeline.registries import load_entry_points
from pipeline.report.page import UNITS, rounded
from pipeline.report.run_data import RECALLS, Run

if TYPE_CHECKING:
    from matplotlib.axis import Axis

log = logging.getLogger(__name__)
SERIES = [f"series-{number}" for number in range(1, 7)]
COLOURS = {name: f"#0102{number:02}" for number, name in enumerate(("ink", "muted", "grid", *SERIES), 10)}
"""Placeholders for matplotlib; each is replaced by a CSS variable of the page."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "neuclip",
    "font.family": "sans-serif",
    "font.size": 12,
    "axes.edgecolor": COLOURS["grid"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.linewidth": 1.0,
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "xtick.major.size": 3,
    "legend.frameon": False,
    "legend.handlelength": 1.1,
    "legend.borderaxespad": 0.2,
    "legend.labelcolor": COLOURS["ink"],
    "text.color": COLOURS["ink"],
}
"""Of matplotlib."""
MAX_POINTS = 300
MAIN = ("samples_per_second", "data_wait", "lr", "gradient_norm")
GAP, COLD = "normalizer_gap", "normalizer_gap_cold"
FIRST = ("loss", "tau", GAP, COLD, *MAIN)
SIZE, SMALL = (326, 190), (216, 118)
"""Width and height of a chart and of a small multiple, in units of the SVG."""


class Line(NamedTuple):
    """A curve over samples seen; with `smooth`, the raw points are drawn faintly behind a moving average."""

    x: np.ndarray
    y: np.ndarray
    label: str = ""
    colour: str = "series-1"
    smooth: bool = False
    marked: bool = False


class Chart(NamedTuple):
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


def line_chart(
    lines: Sequence[Line], *, percent: bool = False, level: float | None = None, size: tuple[int, int] = SIZE
) -> str:
    """Curves over samples seen, as SVG that scales with its container and has the page's font; both axes begin at 0.

    Args:
        lines: What to draw; labels make a legend.
        percent: The values are fractions, shown in percent.
        level: A dashed horizontal line, for example chance.
        size: Width and height in units of the SVG.
    """
    import matplotlib
    from matplotlib.figure import Figure

    buffer, small = io.StringIO(), size[0] < SIZE[0]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
        axes = figure.add_subplot()
        for line in lines:
            x, y = pooled(line.x, line.y)
            how: dict[str, Any] = {"color": COLOURS[line.colour], "clip_on": False}
            if line.smooth and len(x) > 20:
                axes.plot(x, y, linewidth=1, alpha=0.3, **how)
                y = smoothed(y)
            # For matplotlib, $ starts math mode, and a leading underscore hides a label from the legend.
            label = ("\u200b" if line.label.startswith("_") else "") + line.label.replace("$", r"\$")
            marker = "o" if line.marked or len(x) == 1 else None
            axes.plot(x, y, label=label or None, linewidth=2, marker=marker, markersize=4.5, **how)
        if level is not None:
            axes.axhline(level, color=COLOURS["muted"], linewidth=1, linestyle=(0, (4, 3)))
        last = max(float(line.x.max()) for line in lines)
        _style(axes.xaxis, axes.set_xlim, 0.0, last, ticks=2 if small else 4, end=last)
        low, high = map(float, axes.dataLim.intervaly)
        _style(axes.yaxis, axes.set_ylim, low, high, ticks=3 if small else 5, percent=percent)
        axes.grid(axis="y", color=COLOURS["grid"], linewidth=1)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        if labels := [line.label for line in lines if line.label]:
            fit = max(1, int(size[0] / (7.2 * max(map(len, labels)) + 34)))
            rows = -(-len(labels) // fit)  # even ones
            figure.legend(loc="outside upper left", ncols=-(-len(labels) // rows), columnspacing=1.2)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    opening = r'<svg xmlns="http://www.w3.org/2000/svg" viewBox="\1" aria-hidden="true">'
    for pattern, replacement in {
        r'\A.*?<svg[^>]* viewBox="([^"]*)"[^>]*>': opening,  # once: a search from each character takes a minute
        r"font: ([\d.]+)px [^;\"]*": r"font-size: \1px",
        r"font-family: [^;\"]*;?": "",
        'xlink:href="': 'href="',
        r'<g id="[^"]*"': "<g",  # group ids would not be unique across charts
    }.items():
        svg = re.sub(pattern, replacement, svg, flags=re.DOTALL)
    for name, stand_in in COLOURS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return svg


def _style(
    axis: Axis, limit: Any, low: float, high: float, *, ticks: int, percent: bool = False, end: float | None = None
) -> None:
    """Limits and ticks of an axis: from 0 to the first round value that encloses the data, or to `end`."""
    from matplotlib.ticker import MaxNLocator

    low, high = min(low, 0.0), max(high, 0.0)
    steps = MaxNLocator(ticks, steps=[1, 2, 5, 10]).tick_values(low, high if high > low else 1.0)
    shown = [float(step) for step in steps if end is None or step <= end] or [0.0]
    # Labels have one unit and equal digits: 1.015, 1.02 -> "1.015", "1.020".
    largest, step = max(map(abs, shown)), shown[1] - shown[0] if len(shown) > 1 else 1.0
    scale, suffix = (0.01, "%") if percent else next(((s, u) for s, u in UNITS if largest >= s), (1.0, ""))
    digits = max(0, -math.floor(math.log10(step / scale) + 1e-9))
    if digits > 4 and not percent:
        labels = [f"{value:.1e}".replace("e-0", "e-") if value else "0" for value in shown]
    else:
        labels = [f"{value / scale:.{digits}f}{suffix}" if value else "0" for value in shown]
    axis.set_ticks(shown, labels=labels)
    limit(shown[0], shown[-1] if end is None else end or 1.0)


def pooled(x: np.ndarray, y: np.ndarray, limit: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Average over intervals of equal length, to limit the size of the page for long runs."""
    if len(x) <= limit:
        return x, y
    edges = np.linspace(0, len(x), limit + 1).astype(int)
    counts = np.diff(edges)
    return np.add.reduceat(x, edges[:-1]) / counts, np.add.reduceat(y, edges[:-1]) / counts


def smoothed(y: np.ndarray) -> np.ndarray:
    """Centred moving average over about a twentieth of the curve; windows are truncated at the ends."""
    half = max(1, round(0.05 * len(y) / 2))
    total = np.concatenate([[0.0], np.cumsum(y)])
    low, high = np.maximum(np.arange(len(y)) - half, 0), np.minimum(np.arange(len(y)) + half + 1, len(y))
    return (total[high] - total[low]) / (high - low)


class Quantity(NamedTuple):
    """How a logged value is displayed: its title with the unit, and one sentence on how to read it."""

    title: str
    note: str = ""
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


def quantity_chart(key: str, runs: Iterable[tuple[str, Run, str]]) -> Chart | None:
    """A logged quantity of runs, each with its label before it and its colour behind it."""
    shown = quantity(key)
    lines = [Line(*run.curve(key), label=label, colour=colour, smooth=shown.smooth) for label, run, colour in runs]
    return chart(shown.title, lines, note=shown.note, percent=shown.share)


Points = tuple[np.ndarray, np.ndarray]
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

    def two(curve: Callable[[str], Points], keys: Sequence[str], labels: Sequence[str], **how: Any) -> list[Line]:
        both = zip(keys, labels, SERIES, strict=False)
        return [Line(*curve(key), label=label, colour=colour, **how) for key, label, colour in both]

    gap, labels = quantity(GAP), ("in use", "cold") if len(run.curve(COLD)[0]) else ("", "")
    losses = [Line(*run.validation("loss"), marked=True)]
    recalls = two(run.validation, RECALLS, ("image → text", "text → image"), marked=True)
    about_loss = "The contrastive loss of held-out pairs against each other, at a fixed temperature."
    about_recall = "The share of held-out pairs whose other half ranks first."
    charts = [
        of("loss"),
        chart("Validation loss", losses, note=about_loss),
        chart("Validation R@1", recalls, note=about_recall, percent=True),
        of("tau"),
        chart(gap.title, two(run.curve, (GAP, COLD), labels, smooth=True), note=gap.note),
        *map(of, (*MAIN, *(key for key in _varying(run) if key not in FIRST))),
    ]
    for make in CHARTS:
        try:
            charts.append(make(run))
        except Exception as error:  # a chart of a user's own may raise anything
            log.warning("The chart %s.%s is left out: %r.", make.__module__, make.__qualname__, error)
    return [drawn for drawn in charts if drawn is not None]


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
