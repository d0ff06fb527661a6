"""Charts as inline SVG whose colours are CSS variables, so that one picture serves light and dark pages."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# matplotlib draws in these stand-ins; each becomes a CSS variable of the page.
COLOURS = {
    "ink": "#010203",
    "muted": "#010204",
    "grid": "#010205",
    "surface": "#010206",
    "series-1": "#010211",
    "series-2": "#010212",
    "series-3": "#010213",
    "series-4": "#010214",
    "series-5": "#010215",
    "series-6": "#010216",
    "good": "#010221",
    "bad": "#010222",
    "faint": "#010223",
}
SERIES = [name for name in COLOURS if name.startswith("series-")]
MAX_POINTS = 400


@dataclass(frozen=True)
class Line:
    """A curve; with `smooth`, the raw points are drawn faintly behind a moving average."""

    x: np.ndarray
    y: np.ndarray
    label: str = ""
    colour: str = "series-1"
    smooth: bool = False
    marked: bool = False


@dataclass(frozen=True)
class Bar:
    """One horizontal bar with its text and a fainter remark; `mark` is a tick on the same scale, for example the score
    of guessing."""

    label: str
    value: float
    text: str
    remark: str = ""
    mark: float | None = None
    colour: str = "series-1"


def line_chart(
    lines: Sequence[Line],
    *,
    percent: bool = False,
    log: bool = False,
    zero: bool = False,
    size: tuple[float, float] = (4.3, 2.35),
) -> str:
    """Curves over samples seen.

    Args: percent: the values are shares. log: logarithmic values. zero: the value axis starts at 0. size: inches.
    """
    with _axes(size) as (axes, finish):
        for line in lines:
            _draw_line(axes, line)
        _samples_axis(axes)
        if log:
            axes.set_yscale("log")
        if zero:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %" if percent else f"{value:g}")
        axes.grid(axis="y", color=COLOURS["grid"], linewidth=0.8)
        labels = [line.label for line in lines if line.label]
        if labels:
            _legend_above(axes, labels, width=size[0])
        return finish()


@dataclass(frozen=True)
class Interval:
    """A value with its confidence interval, None where there is none."""

    label: str
    value: float
    interval: tuple[float, float] | None = None


def interval_chart(rows: Sequence[Interval], *, width: float = 4.9) -> str:
    """Differences in points around zero, the first at the top; coloured where the interval leaves out zero."""
    with _axes((width, 0.6 + 0.25 * len(rows))) as (axes, finish):
        axes.axvline(0, color=COLOURS["muted"], linewidth=1)
        for at, row in enumerate(rows):
            low, high = row.interval or (row.value, row.value)
            colour = (
                COLOURS["good" if low > 0 else "bad" if high < 0 else "muted"] if row.interval else COLOURS["muted"]
            )
            axes.plot([100 * low, 100 * high], [at, at], color=colour, linewidth=2, solid_capstyle="round", alpha=0.55)
            axes.plot([100 * row.value], [at], color=colour, marker="o", markersize=5)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0, colors=COLOURS["ink"])
        axes.grid(axis="x", color=COLOURS["grid"], linewidth=0.8)
        return finish()


def bar_chart(bars: Sequence[Bar], *, limit: float | None = None, width: float = 4.9) -> str:
    """Horizontal bars, the first at the top, each with its text at its end."""
    top = limit or max((bar.value for bar in bars), default=1.0) or 1.0
    with _axes((width, 0.36 + 0.27 * len(bars))) as (axes, finish):
        rows = range(len(bars))
        text_width = 8 + 5.2 * max((len(bar.text) for bar in bars), default=0)  # points, at 9-point digits
        axes.barh(rows, [top] * len(bars), height=0.62, color=COLOURS["grid"], alpha=0.55)
        axes.barh(rows, [bar.value for bar in bars], height=0.62, color=[COLOURS[bar.colour] for bar in bars])
        for row, bar in zip(rows, bars, strict=True):
            if bar.mark is not None:
                axes.plot([bar.mark] * 2, [row - 0.44, row + 0.44], color=COLOURS["ink"], linewidth=1.6)
            for words, right, align, colour in (
                (bar.text, text_width, "right", "ink"),
                (bar.remark, text_width + 7, "left", "muted"),
            ):
                axes.annotate(
                    words,
                    (top, row),
                    xytext=(right, 0),
                    textcoords="offset points",
                    ha=align,
                    va="center_baseline",
                    color=COLOURS[colour],
                )
        axes.set_yticks(rows, [bar.label for bar in bars])
        axes.set_ylim(len(bars) - 0.45, -0.55)
        axes.set_xlim(0, top)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
        axes.tick_params(axis="y", length=0, colors=COLOURS["ink"])
        return finish()


def _legend_above(axes: Axes, labels: Sequence[str], *, width: float) -> None:
    """A legend in even rows above the axes; a blank title keeps its place."""
    fit = max(1, round(width * 13 / (max(map(len, labels)) + 5)))
    rows = -(-len(labels) // fit)
    legend = axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=-(-len(labels) // rows), columnspacing=1.2)
    legend.set_in_layout(False)
    axes.set_title(" ", fontsize=9.5, pad=3 + 13 * (rows - 1))


def _draw_line(axes: Axes, line: Line) -> None:
    colour = COLOURS[line.colour]
    x, y = pooled(line.x, line.y)
    if line.smooth and len(x) > 20:
        axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.28)
        y = smoothed(y)
    marker = "o" if line.marked or len(x) == 1 else None
    axes.plot(x, y, color=colour, linewidth=1.7, label=plain(line.label) or None, marker=marker, markersize=3.5)


def plain(text: str) -> str:
    """A label as it stands: $ would begin mathematics, and a leading underscore hides it from the legend."""
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")


def pooled(x: np.ndarray, y: np.ndarray, limit: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Means of equally long stretches, so that a long run does not make a heavy page."""
    if len(x) <= limit:
        return x, y
    edges = np.linspace(0, len(x), limit + 1).astype(int)
    counts = np.diff(edges)
    return np.add.reduceat(x, edges[:-1]) / counts, np.add.reduceat(y, edges[:-1]) / counts


def smoothed(y: np.ndarray, span: float = 0.05) -> np.ndarray:
    """Centred moving average over about `span` of the curve; windows that reach over an end are cut there."""
    half = max(1, round(span * len(y) / 2))
    total = np.concatenate([[0.0], np.cumsum(y)])
    low, high = np.maximum(np.arange(len(y)) - half, 0), np.minimum(np.arange(len(y)) + half + 1, len(y))
    return (total[high] - total[low]) / (high - low)


def _samples_axis(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.margins(x=0.01)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def short(value: float) -> str:
    """1234567 -> 1.23M."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


@contextmanager
def _axes(size: tuple[float, float]) -> Iterator[tuple[Axes, Any]]:
    """Axes in the page's style, and a function that gives the finished SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "neuclip",
        "font.family": "sans-serif",
        "font.size": 9,
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
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")

        def finish() -> str:
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
            return _for_page(buffer.getvalue())

        yield figure.add_subplot(), finish


def _for_page(svg: str) -> str:
    """Only the <svg> element, scaling with its container, with CSS variables for colours and the page's font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()  # type: ignore[union-attr]
    svg = re.sub(
        r"<svg[^>]*>", f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">', svg, count=1
    )
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)
    svg = svg.replace('xlink:href="', 'href="')
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # ids of groups would repeat from chart to chart
    for name, stand_in in COLOURS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return svg
