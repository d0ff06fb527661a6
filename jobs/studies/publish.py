"""Writes a study's outcomes: `results.json` (the data), and rendered from it `results.csv`, `results.md`, figures."""

from __future__ import annotations

import csv
import io
import itertools
import json
import platform
import statistics
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import scipy.stats

from jobs.studies.declare import RESULT_NAME, Size, Study, Unit, Variant, load_study, size_of
from jobs.studies.outcomes import COLUMNS, LEVEL, PAIRED, Outcome, Spread, curve, holm, paired, spread
from pipeline.cores import usable_cores
from pipeline.versions import source_commit

DATA_NAME = "results.json"
COMPARED = {"average": "+.2f", "retrieval": "+.2f", "imagenet": "+.2f", "saving": ".2f"}
"""Columns that are compared with the baseline, and the formats of their differences."""
COMPARED_NOTE = (
    " The last table has every paired difference in a score with its 95% interval; p is corrected for the number of "
    "comparisons on the page by Holm's method, and significant at 5%."
)
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


def publish(name: str, *, size: str, units: Sequence[Unit], place: Path, command: str) -> list[Path]:
    """Write all files of a study, of its finished runs in `place`, to `place/name`. Returns their paths."""
    folder, left_out = place / name, ("label", "config", "versions")  # not repeated for every run
    finished = [unit for unit in units if unit.is_done(place)]
    results = [json.loads((unit.folder(place) / RESULT_NAME).read_text(encoding="utf-8")) for unit in finished]
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    named = (line.partition(":")[2].strip() for line in facts if line.startswith("model name"))
    cpu = next(named, platform.processor() or "an unnamed CPU")
    data = {
        "study": name,
        "size": size,
        "command": command,
        "date": date.today().isoformat(),
        "commit": source_commit(),
        "machine": {"cpu": cpu, "cores": usable_cores(), "system": platform.system()},
        "versions": results[-1]["versions"] if results else {},
        "units": len(units),
        "overrides": {unit.key: list(unit.overrides) for unit in units},
        "runs": [
            {
                **{fact: getattr(unit, fact) for fact in ("setting", "arm", "seed", "key")},
                "result": {key: value for key, value in result.items() if key not in left_out},
            }
            for unit, result in zip(finished, results, strict=True)
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DATA_NAME).write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")
    return [folder / DATA_NAME, *render(folder)]


def render(folder: Path) -> list[Path]:
    """Render tables and figures from `folder/results.json`. Returns their paths."""
    data = json.loads((folder / DATA_NAME).read_text(encoding="utf-8"))
    study = load_study(data["study"])
    outcomes = [Outcome(**run) for run in data["runs"]]
    figures = draw(study, data["size"], outcomes)
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["setting", "arm", "seed", *COLUMNS, "key"])
    for outcome in outcomes:
        values = (column.value(outcome.result) for column in COLUMNS.values())
        cells = ("" if value is None else f"{value:.6g}" for value in values)
        writer.writerow([outcome.setting, outcome.arm, outcome.seed, *cells, outcome.key])
    texts = {
        "results.csv": table.getvalue(),
        "results.md": as_markdown(study, data, outcomes, list(figures)),
        **figures,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def as_markdown(study: Study, data: Mapping[str, Any], outcomes: Sequence[Outcome], drawn: Sequence[str]) -> str:
    """The generated page of a study: its question, how it was run, a table per setting, and the figures."""
    packages = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version != "absent")
    # Results record their commit; older ones have only that of their publication, or none.
    named = (outcome.result.get("commit", data.get("commit")) for outcome in outcomes)
    commits = sorted({commit for commit in named if commit})
    listed = " and ".join(part for part in (", ".join(commits[:-1]), *commits[-1:]) if part)
    how = (
        f"Size `{data['size']}`; modelled on {study.reproduces}. "
        f"Made with `{data['command']}` on {data['date']}{f' from commit {listed}' if listed else ''}, "
        f"{data['machine']['cores']} cores of {data['machine']['cpu']}; {packages}. "
        f"{len(outcomes)} of {data['units']} runs are finished. "
        "Figures are means ± standard deviation over seeds; differences are paired by seed. Errors and variances of "
        "normalizers are means over the intermediate checkpoints, without the last one."
        + (COMPARED_NOTE if _comparisons(study, data["size"], outcomes) else "")
        + " This page is generated from `results.json` by `neuclip study`; do not edit it."
    )
    lines = [f"# {study.title}", "", study.question.strip(), "", how]
    for title, (header, *rows) in _tables(study, data["size"], outcomes):
        lines += ["", f"## {title}", "", f"| {' | '.join(header)} |", "|---" + "|---:" * (len(header) - 1) + "|"]
        for row in rows:  # a row with one cell is a group heading
            lines.append(f"| {row[0]} |" + " |" * (len(header) - 1) if len(row) == 1 else f"| {' | '.join(row)} |")
    for file in drawn:
        lines += ["", f"![{file.removesuffix('.svg').replace('-', ' ')}]({file})"]
    return "\n".join(lines) + "\n"


def _tables(study: Study, size: str, outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[list[str]]]]:
    """(title, table) of every setting that has runs, then the comparisons.

    A table is its header and rows: arms in order of declaration under group headings, which are rows with one cell.
    """
    at_size = size_of(study, size)
    for setting, variant in at_size.settings.items():
        here = [outcome for outcome in outcomes if outcome.setting == setting]
        left = [arm for arm in at_size.arms if any(outcome.arm == arm for outcome in here)]
        if not left:
            continue
        rows = [["", "seeds", *(_title(column, at_size.baseline) for column in study.columns)]]
        for heading, names in [*study.groups.items(), ("", tuple(left))]:
            arms = [name for name in names if name in left]  # an arm is in the first group that lists it
            left = [name for name in left if name not in arms]
            rows += [[f"**{heading}**"]] if heading and arms else []
            for arm in arms:
                seeds = len({outcome.seed for outcome in here if outcome.arm == arm})
                label = f"`{arm}` {at_size.arms[arm].title}".rstrip()
                cells = (_cell(here, setting, arm, column, at_size.baseline) for column in study.columns)
                rows.append([label, str(seeds), *cells])
        yield variant.title or setting, rows
    if rows := _comparisons(study, size, outcomes):
        yield f"Comparisons with {at_size.baseline}", rows


def _comparisons(study: Study, size: str, outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Every score and saving against the baseline, over two seeds or more that differ; empty if there is none."""
    at_size = size_of(study, size)
    baseline = at_size.baseline
    columns = [column for column in study.columns if column in COMPARED]
    compared: dict[tuple[str, str, str], tuple[Spread, Any]] = {}
    for setting, column, arm in itertools.product(at_size.settings, columns, at_size.arms):
        difference = paired(outcomes, setting, arm, kind=column, baseline=baseline)
        if arm != baseline and difference is not None and difference.sd:
            null = 1.0 if column == "saving" else 0.0  # a ratio
            compared[setting, column, arm] = difference, scipy.stats.ttest_1samp(difference.values, null)
    adjusted = holm({name: test.pvalue for name, (_, test) in compared.items()})
    clear = sum(p <= LEVEL for p in adjusted.values())
    title = f"{len(adjusted)} comparisons, {clear} significant"
    rows = [[title, "difference", "95% interval", "t", "p", "p, corrected"]]
    for (setting, column, arm), (difference, test) in compared.items():
        heading = [f"**{at_size.settings[setting].title or setting}**"]
        if heading not in rows:
            rows.append(heading)
        form = COMPARED[column]
        ends = " to ".join(f"{end:{form}}" for end in test.confidence_interval(1 - LEVEL))
        tests = (f"{test.statistic:+.1f}", f"{test.pvalue:.2g}", f"{adjusted[setting, column, arm]:.2g}")
        rows.append([f"{_title(column, baseline)}: `{arm}`", f"{difference.mean:{form}}", ends, *tests])
    return rows if compared else []


def _title(column: str, baseline: str) -> str:
    return PAIRED[column][1].format(baseline=baseline) if column in PAIRED else COLUMNS[column].title


def _cell(outcomes: Sequence[Outcome], setting: str, arm: str, column: str, baseline: str) -> str:
    """`12.3 ± 0.4`, mean and standard deviation, or `–` if there is no value."""
    if column in PAIRED:
        value = None if arm == baseline else paired(outcomes, setting, arm, kind=column, baseline=baseline)
        form, unit = ".2f" if column == "saving" else "+.1f", "%" if column == "extra_time" else ""
    else:
        value, form, unit = spread(outcomes, setting, arm, column), COLUMNS[column].form, ""
    if value is None:
        return "–"
    return f"{value.mean:{form}}{unit}" + (f" ± {value.sd:{form.replace('+', '')}}" if value.sd is not None else "")


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


def _panels(settings: Mapping[str, Variant], *, rows: int = 1, size: tuple[float, float], sharey: bool = False) -> Any:
    """A figure of `size` inches, and its axes by row and setting, each with the setting's title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, len(settings), squeeze=False, sharey=sharey)
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
    column = study.columns[0]
    figure, (panels,) = _panels(size.settings, size=(1.9 + 3.6 * len(size.settings), 3.0))
    for axes, setting in zip(panels, size.settings, strict=True):
        for number, arm in enumerate(size.arms):
            x, y = (spread(outcomes, setting, arm, name) for name in (cost, column))
            if x is not None and y is not None:
                how = {"color": f"C{number % 10}", "label": arm}
                axes.errorbar(x.mean, y.mean, xerr=x.sd, yerr=y.sd, fmt="o", markersize=5, **how)
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
    for names, line in zip(rows, panels, strict=True):
        for axes, setting in zip(line, settings, strict=True):
            for arm in names:
                number = list(size.arms).index(arm)
                colour, style = f"C{number % 10}", "--" if number >= 10 else "-"
                points = curve(outcomes, setting, arm, column)
                most = max((len(values) for _, values in points), default=0)  # points that all seeds of the arm have
                x, whole = [x / 1e3 for x, v in points if len(v) == most], [v for _, v in points if len(v) == most]
                means = [statistics.fmean(values) for values in whole]
                axes.plot(x, means, color=colour, linestyle=style, label=arm, linewidth=1.5, marker="o", markersize=2.5)
                axes.fill_between(x, [*map(min, whole)], [*map(max, whole)], color=colour, alpha=0.13, linewidth=0)
            axes.set_xlabel("samples seen, thousands")
            if column.startswith("mse"):
                axes.set_yscale("log")
        line[0].set_ylabel(COLUMNS[column].title)
        line[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _as_svg(figure)


def _as_svg(figure: Any) -> str:
    """The figure as SVG; the output is deterministic."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", facecolor="white", metadata={"Date": None})
    return stream.getvalue()
