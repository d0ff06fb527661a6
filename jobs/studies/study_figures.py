"""Figures of a study as SVG: final scores with one dot per seed, scores against a cost, curves over samples seen."""

from __future__ import annotations

import io
import statistics
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jobs.studies.declare import Size, Study, Variant, size_of
from jobs.studies.outcomes import COLUMNS, Outcome, curve, spread

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8f98",
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.color": "#e7e9ec",
    "axes.axisbelow": True,
    "svg.fonttype": "path",
    "svg.hashsalt": "neuclip",  # deterministic output
}
DOT = "#2b6cb0"


def draw(study: Study, size: str, outcomes: Sequence[Outcome]) -> dict[str, str]:
    """File name -> SVG of all figures of a study."""
    import matplotlib

    there = size_of(study, size)
    there = replace(there, arms={arm: it for arm, it in there.arms.items() if any(o.arm == arm for o in outcomes)})
    with matplotlib.rc_context(STYLE):
        figures = {"final.svg": _final(study, there, outcomes)} if outcomes else {}
        if outcomes and study.against:
            figures[f"against-{study.against.replace('_', '-')}.svg"] = _against(study, there, outcomes, study.against)
        for column in study.curves:
            # A setting whose runs were measured only once has no curve; its value is in the table.
            if curved := {o.setting for o in outcomes if len(curve(outcomes, o.setting, o.arm, column)) > 1}:
                figures[f"curve-{column.replace('_', '-')}.svg"] = _curves(study, there, outcomes, column, curved)
    return figures


def _panels(settings: Mapping[str, Variant], *, rows: int = 1, size: tuple[float, float], **shared: bool) -> Any:
    """A figure of `size` inches, and its axes by row and setting, each with the setting's title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, len(settings), squeeze=False, **shared)
    for line in panels:
        for axes, (setting, variant) in zip(line, settings.items(), strict=True):
            axes.set_title(textwrap.fill(variant.title or setting, 32), loc="left")
    return figure, panels


def _final(study: Study, size: Size, outcomes: Sequence[Outcome]) -> str:
    """The study's first column: a dot per seed, a bar at the mean, a line at the baseline; one panel per setting."""
    from matplotlib.ticker import MaxNLocator

    column, arms = study.columns[0], list(size.arms)
    inches = (min(9.0, 1.2 + 3.6 * len(size.settings)), 0.9 + 0.24 * len(arms))
    figure, (panels,) = _panels(size.settings, size=inches, sharey=True)
    for axes, setting in zip(panels, size.settings, strict=True):
        for row, arm in enumerate(arms):
            if values := spread(outcomes, setting, arm, column):
                axes.scatter(values.values, [row] * len(values.values), s=16, color=DOT, alpha=0.65, linewidths=0)
                axes.plot([values.mean] * 2, [row - 0.32, row + 0.32], color="#1a202c", linewidth=1.6)
        if before := spread(outcomes, setting, size.baseline, column):
            axes.axvline(before.mean, color="#8a8f98", linewidth=0.8, linestyle=":", zorder=0)
        axes.set_xlabel(COLUMNS[column].title)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_yticks(range(len(arms)), arms)
        axes.grid(axis="y", visible=False)
    panels[0].set_ylim(len(arms) - 0.4, -0.6)
    return _as_svg(figure)


def _against(study: Study, size: Size, outcomes: Sequence[Outcome], cost: str) -> str:
    """The study's first column over `cost`: means with standard deviations of both; one panel per setting."""
    column, look = study.columns[0], _looks(size.arms)
    figure, (panels,) = _panels(size.settings, size=(1.9 + 3.6 * len(size.settings), 3.0))
    for axes, setting in zip(panels, size.settings, strict=True):
        for arm in size.arms:
            x, y = (spread(outcomes, setting, arm, name) for name in (cost, column))
            if x is not None and y is not None:
                colour = look[arm][0]
                axes.errorbar(x.mean, y.mean, xerr=x.sd, yerr=y.sd, fmt="o", markersize=5, color=colour, label=arm)
        axes.set_xlabel(COLUMNS[cost].title)
        axes.set_xlim(left=0)
    panels[0].set_ylabel(COLUMNS[column].title)
    panels[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _as_svg(figure)


def _curves(study: Study, size: Size, outcomes: Sequence[Outcome], column: str, curved: Collection[str]) -> str:
    """Mean over seeds with the range as a shaded area; rows are groups of arms, columns the settings in `curved`."""
    settings = {name: variant for name, variant in size.settings.items() if name in curved}
    rows = [[a for a in names if a in size.arms] for names in study.groups.values()] or [list(size.arms)]
    rows = [names for names in rows if names]
    inches = (1.9 + min(4, len(settings)) * 2.6, 0.4 + 2.1 * len(rows))
    figure, panels = _panels(settings, rows=len(rows), size=inches, sharey=True)
    look = _looks(size.arms)
    for names, line in zip(rows, panels, strict=True):
        for axes, setting in zip(line, settings, strict=True):
            for arm in names:
                _draw_curve(axes, curve(outcomes, setting, arm, column), label=arm, look=look[arm])
            axes.set_xlabel("samples seen, thousands")
            if column.startswith("mse"):
                axes.set_yscale("log")
        line[0].set_ylabel(COLUMNS[column].title)
        line[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _as_svg(figure)


def _looks(arms: Iterable[str]) -> dict[str, tuple[Any, str]]:
    """Colour and line style of every arm."""
    import matplotlib

    palette = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    return {arm: (palette[number % 10], "--" if number >= 10 else "-") for number, arm in enumerate(arms)}


def _draw_curve(axes: Any, points: list[tuple[float, list[float]]], *, label: str, look: tuple[Any, str]) -> None:
    """Plot mean and range at the points that all seeds of the arm have; `look` is colour and line style."""
    colour, style = look
    most = max((len(values) for _, values in points), default=0)
    whole = [(samples / 1e3, values) for samples, values in points if len(values) == most]
    x = [samples for samples, _ in whole]
    means = [statistics.fmean(values) for _, values in whole]
    axes.plot(x, means, color=colour, linestyle=style, label=label, linewidth=1.5, marker="o", markersize=2.5)
    axes.fill_between(x, [min(v) for _, v in whole], [max(v) for _, v in whole], color=colour, alpha=0.13, linewidth=0)


def _as_svg(figure: Any) -> str:
    """The figure as SVG; the output is deterministic."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", facecolor="white", metadata={"Date": None})
    return stream.getvalue()
