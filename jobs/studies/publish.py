"""Writes a study's outcomes: `results.json` (the data), and rendered from it `results.csv`, `results.md`, figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs.studies import study_figures
from jobs.studies.declare import Study, Unit, Variant, arms_of, load_study, size_of
from jobs.studies.outcomes import COLUMNS, PAIRED, Outcome, paired, spread
from jobs.studies.paired import as_lines, shown
from jobs.studies.results_data import DATA_NAME, csv_of, figure_title, provenance, read_data, write_data, write_texts
from pipeline.report.run_page import render as render_page

KEPT = (
    "commit",
    "batch_size",
    "ranks",
    "curve",
    "last",
    "step_ms",
    "peak_memory_mib",
    "traffic_bytes_per_step",
    "normalizers",
    "cost",
    "validation",
)


def publish(
    name: str, *, size: str, units: Sequence[Unit], outcomes: Sequence[Outcome], folder: Path, command: str
) -> list[Path]:
    """Write all files of a study to `folder`. Returns their paths."""
    write_data(
        folder,
        study=name,
        size=size,
        command=command,
        versions=[outcome.result["versions"] for outcome in outcomes][-1] if outcomes else {},
        units=len(units),
        overrides={unit.key: list(unit.overrides) for unit in units},
        runs=[_compact(outcome) for outcome in outcomes],
    )
    return [folder / DATA_NAME, *render(folder)]


def render(folder: Path) -> list[Path]:
    """Render tables and figures from `folder/results.json`. Returns their paths."""
    data = read_data(folder)
    study, size = load_study(data["study"]), data["size"]
    outcomes = [Outcome(**run) for run in data["runs"]]
    drawn = study_figures.draw(study, size, outcomes)
    texts = {
        "results.csv": as_csv(outcomes),
        "results.md": as_markdown(study, data, outcomes, list(drawn)),
        "study.html": as_html(study, data, outcomes, drawn),
        **drawn,
    }
    return write_texts(folder, texts)


def as_csv(outcomes: Sequence[Outcome]) -> str:
    """One line per run with every column; empty if the run does not have the metric."""
    return csv_of(
        ["setting", "arm", "seed", *COLUMNS, "key"],
        (((o.setting, o.arm, o.seed), [c.value(o.result) for c in COLUMNS.values()], (o.key,)) for o in outcomes),
    )


def as_markdown(study: Study, data: Mapping[str, Any], outcomes: Sequence[Outcome], drawn: Sequence[str]) -> str:
    """The generated page of a study: its question, how it was run, a table per setting, and the figures."""
    how = (
        f"{_how(study, data, outcomes)} This page is generated from `results.json` by `neuclip study`; do not edit it."
    )
    lines = [f"# {study.title}", "", study.question.strip(), "", how]
    for title, rows in _tables(study, data["size"], outcomes):
        lines += ["", f"## {title}", "", *as_lines(rows)]
    for file in drawn:
        lines += ["", f"![{figure_title(file)}]({file})"]
    return "\n".join(lines) + "\n"


def as_html(study: Study, data: Mapping[str, Any], outcomes: Sequence[Outcome], drawn: Mapping[str, str]) -> str:
    """The same content as one self-contained HTML file."""
    parts = [
        {
            "title": title,
            "header": rows[0],
            "rows": [[cell.replace("`", "").strip("*") for cell in r] for r in rows[1:]],
        }
        for title, rows in _tables(study, data["size"], outcomes)
    ]
    figures = [{"title": figure_title(file), "svg": svg[svg.index("<svg") :]} for file, svg in drawn.items()]
    how = _how(study, data, outcomes).replace("`", "")
    context = {"title": study.title, "question": study.question.strip(), "how": how, "parts": parts, "figures": figures}
    return render_page("study.html", context)


def _how(study: Study, data: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    return (
        provenance(data, reproduces=study.reproduces, results=[outcome.result for outcome in outcomes])
        + " Figures are means ± standard deviation over seeds; differences are paired by seed. Errors and variances of "
        "normalizers are means over the intermediate checkpoints, without the last one."
    )


def _tables(study: Study, size: str, outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[list[str]]]]:
    """(title, table) of every setting that has runs."""
    at_size, arms = size_of(study, size), arms_of(study, size)
    baseline = at_size.baseline or study.baseline
    for setting, variant in at_size.settings.items():
        there = {arm: arms[arm] for arm in arms if any(o.setting == setting and o.arm == arm for o in outcomes)}
        if there:
            yield variant.title or setting, table(study, outcomes, setting=setting, arms=there, baseline=baseline)


def table(
    study: Study, outcomes: Sequence[Outcome], *, setting: str, arms: Mapping[str, Variant], baseline: str
) -> list[list[str]]:
    """The header and rows of one setting: arms in order of declaration under group headings (rows with one cell)."""
    rows = [["", "seeds", *(_title(column, baseline) for column in study.columns)]]
    for heading, names in _grouped(study, list(arms)):
        if heading:
            rows.append([f"**{heading}**"])
        for arm in names:
            seeds = len({o.seed for o in outcomes if o.setting == setting and o.arm == arm})
            label = f"`{arm}`" + (f" {arms[arm].title}" if arms[arm].title else "")
            rows.append([label, str(seeds), *(_cell(outcomes, setting, arm, c, baseline) for c in study.columns)])
    return rows


def _grouped(study: Study, arms: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(heading, arms) per group; each arm appears once, in the first group that lists it."""
    left = dict.fromkeys(arms)
    for heading, names in study.groups.items():
        here = [name for name in names if name in left]
        for name in here:
            left.pop(name)
        if here:
            yield heading, here
    if left:
        yield "", list(left)


def _title(column: str, baseline: str) -> str:
    return PAIRED[column][1].format(baseline=baseline) if column in PAIRED else COLUMNS[column].title


def _cell(outcomes: Sequence[Outcome], setting: str, arm: str, column: str, baseline: str) -> str:
    if column not in PAIRED:
        return shown(spread(outcomes, setting, arm, column), COLUMNS[column].form)
    if arm == baseline:
        return "–"
    found = paired(outcomes, setting, arm, kind=column, baseline=baseline)
    form = {"saving": ".2f", "loss_difference": "+.3f"}.get(column, "+.1f")
    return shown(found, form, unit="%" if column == "extra_time" else "")


def _compact(outcome: Outcome) -> dict[str, Any]:
    return {**asdict(outcome), "result": {key: outcome.result[key] for key in KEPT if key in outcome.result}}
