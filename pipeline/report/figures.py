"""Line charts as inline SVG whose colours are CSS variables, so that they work in light and dark mode.

One unit of the SVG is about one pixel on a phone, so that text of 12 units can be read there.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.report.page import UNITS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# Placeholder colours for matplotlib; each is replaced by a CSS variable of the page.
COLOURS = {
    "ink": "#010203",
    "muted": "#010204",
    "grid": "#010205",
    "surface": "#010206",
    **{f"series-{number}": f"#01021{number}" for number in range(1, 7)},
}
SERIES = [name for name in COLOURS if name.startswith("series-")]
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
SIZE, SMALL = (326, 190), (216, 118)
"""Width and height of a chart and of a small multiple, in units of the SVG."""


@dataclass(frozen=True)
class Line:
    """A curve over samples seen; with `smooth`, the raw points are drawn faintly behind a moving average."""

    x: np.ndarray
    y: np.ndarray
    label: str = ""
    colour: str = "series-1"
    smooth: bool = False
    marked: bool = False


def line_chart(
    lines: Sequence[Line], *, percent: bool = False, level: float | None = None, size: tuple[int, int] = SIZE
) -> str:
    """Curves over samples seen, as SVG; both axes begin at 0.

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
            _draw_line(axes, line)
        if level is not None:
            axes.axhline(level, color=COLOURS["muted"], linewidth=1, linestyle=(0, (4, 3)))
        last = max((float(line.x.max()) for line in lines if len(line.x)), default=1.0)
        _style(axes.xaxis, axes.set_xlim, 0.0, last, ticks=2 if small else 4, end=last)
        low, high = map(float, axes.dataLim.intervaly if axes.has_data() else (0.0, 1.0))
        _style(axes.yaxis, axes.set_ylim, low, high, ticks=3 if small else 5, percent=percent)
        axes.grid(axis="y", color=COLOURS["grid"], linewidth=1)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        if labels := [line.label for line in lines if line.label]:
            fit = max(1, int(size[0] / (7.2 * max(map(len, labels)) + 34)))
            rows = -(-len(labels) // fit)  # even ones
            figure.legend(loc="outside upper left", ncols=-(-len(labels) // rows), columnspacing=1.2)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_page(buffer.getvalue())


def _style(
    axis: Axis, limit: Any, low: float, high: float, *, ticks: int, percent: bool = False, end: float | None = None
) -> None:
    """Limits and ticks of an axis: from 0 to the first round value that encloses the data, or to `end`."""
    from matplotlib.ticker import MaxNLocator

    low, high = min(low, 0.0), max(high, 0.0)
    steps = MaxNLocator(ticks, steps=[1, 2, 5, 10]).tick_values(low, high if high > low else 1.0)
    shown = [float(step) for step in steps if end is None or step <= end] or [0.0]
    axis.set_ticks(shown, labels=tick_labels(shown, percent=percent))
    limit(shown[0], shown[-1] if end is None else end or 1.0)


def _draw_line(axes: Axes, line: Line) -> None:
    colour = COLOURS[line.colour]
    x, y = pooled(line.x, line.y)
    if line.smooth and len(x) > 20:
        axes.plot(x, y, color=colour, linewidth=1, alpha=0.3, clip_on=False)
        y = smoothed(y)
    # For matplotlib, $ starts math mode, and a leading underscore hides a label from the legend.
    label = ("\u200b" if line.label.startswith("_") else "") + line.label.replace("$", r"\$")
    marker = "o" if line.marked or len(x) == 1 else None
    axes.plot(x, y, color=colour, label=label or None, linewidth=2, marker=marker, markersize=4.5, clip_on=False)


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


def tick_labels(values: Sequence[float], *, percent: bool = False) -> list[str]:
    """Labels of ticks at equal distances, with one unit and equal digits: 1.015, 1.02 -> "1.015", "1.020"."""
    largest = max(map(abs, values))
    scale, suffix = (0.01, "%") if percent else next(((s, u) for s, u in UNITS if largest >= s), (1.0, ""))
    step = (values[1] - values[0]) / scale if len(values) > 1 else 1.0
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if digits > 4 and not percent:
        return [f"{value:.1e}".replace("e-0", "e-") if value else "0" for value in values]
    return [f"{value / scale:.{digits}f}{suffix}" if value else "0" for value in values]


def _for_page(svg: str) -> str:
    """The bare <svg> element: it scales with its container and uses the page's font and CSS variables for colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()  # type: ignore[union-attr]
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" aria-hidden="true">'
    svg = re.sub(r"<svg[^>]*>", opening, svg, count=1)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)
    svg = svg.replace('xlink:href="', 'href="')
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # group ids would not be unique across charts
    for name, stand_in in COLOURS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return svg
