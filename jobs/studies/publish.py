"""Writes a study's outcomes: `results.json` (the data), and rendered from it `results.csv`, `results.md`, figures."""

from __future__ import annotations

import csv
import io
import itertools
import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from jobs.studies import study_figures
from jobs.studies.declare import Study, Unit, Variant, arms_of, load_study, size_of
from jobs.studies.outcomes import COLUMNS, LEVEL, PAIRED, Outcome, Spread, as_lines, holm, paired, shown, spread
from pipeline.cores import usable_cores
from pipeline.report.run_page import render as render_page
from pipeline.versions import source_commit

DATA_NAME = "results.json"
COMPARED = {"held_out_loss": "+.3f", "average": "+.2f", "retrieval": "+.2f", "imagenet": "+.2f", "saving": ".2f"}
"""Columns that are compared with the baseline, and the formats of their differences."""
COMPARED_NOTE = (
    " The last table has every paired difference in a score with its 95% interval; p is corrected for the number of "
    "comparisons on the page by Holm's method, and significant at 5%."
)
LEFT_OUT = ("label", "config", "versions")
"""Entries of a run's result that `results.json` does not repeat for every run."""


def publish(
    name: str, *, size: str, units: Sequence[Unit], outcomes: Sequence[Outcome], folder: Path, command: str
) -> list[Path]:
    """Write all files of a study to `folder`. Returns their paths."""
    overrides = {unit.key: list(unit.overrides) for unit in units}
    facts = {"units": len(units), "overrides": overrides, "runs": [_compact(outcome) for outcome in outcomes]}
    versions = outcomes[-1].result["versions"] if outcomes else {}
    write_data(folder, study=name, size=size, command=command, versions=versions, **facts)
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
    how = "This page is generated from `results.json` by `neuclip study`; do not edit it."
    lines = [f"# {study.title}", "", study.question.strip(), "", f"{_how(study, data, outcomes)} {how}"]
    for title, rows in _tables(study, data["size"], outcomes):
        lines += ["", f"## {title}", "", *as_lines(rows)]
    for file in drawn:
        lines += ["", f"![{figure_title(file)}]({file})"]
    return "\n".join(lines) + "\n"


def as_html(study: Study, data: Mapping[str, Any], outcomes: Sequence[Outcome], drawn: Mapping[str, str]) -> str:
    """The same content as one self-contained HTML file."""
    parts = []
    for title, (header, *rows) in _tables(study, data["size"], outcomes):
        plain = [[cell.replace("`", "").strip("*") for cell in row] for row in rows]
        parts.append({"title": title, "header": header, "rows": plain})
    figures = [{"title": figure_title(file), "svg": svg[svg.index("<svg") :]} for file, svg in drawn.items()]
    how = _how(study, data, outcomes).replace("`", "")
    context = {"title": study.title, "question": study.question.strip(), "how": how, "parts": parts, "figures": figures}
    return render_page("study.html", context)


def _how(study: Study, data: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    return (
        provenance(data, reproduces=study.reproduces, results=[outcome.result for outcome in outcomes])
        + " Figures are means ± standard deviation over seeds; differences are paired by seed. Errors and variances of "
        "normalizers are means over the intermediate checkpoints, without the last one."
        + (COMPARED_NOTE if _comparisons(study, data["size"], outcomes) else "")
    )


def _tables(study: Study, size: str, outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[list[str]]]]:
    """(title, table) of every setting that has runs."""
    at_size, arms = size_of(study, size), arms_of(study, size)
    baseline = at_size.baseline or study.baseline
    for setting, variant in at_size.settings.items():
        there = {arm: arms[arm] for arm in arms if any(o.setting == setting and o.arm == arm for o in outcomes)}
        if there:
            yield variant.title or setting, table(study, outcomes, setting=setting, arms=there, baseline=baseline)
    if rows := _comparisons(study, size, outcomes):
        yield f"Comparisons with {baseline}", rows


def _comparisons(study: Study, size: str, outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Every score and saving against the baseline, over two seeds or more that differ; empty if there is none."""
    at_size = size_of(study, size)
    baseline = at_size.baseline or study.baseline
    columns = [column for column in study.columns if column in COMPARED]
    compared: dict[tuple[str, str, str], Spread] = {}
    for setting, column, arm in itertools.product(at_size.settings, columns, arms_of(study, size)):
        found = paired(outcomes, setting, arm, kind=column, baseline=baseline)
        if arm != baseline and found is not None and found.t is not None:
            equal = float(column == "saving")  # a ratio is compared with 1
            compared[setting, column, arm] = Spread(tuple(value - equal for value in found.values))
    adjusted = holm({name: one.p for name, one in compared.items() if one.p is not None})
    clear = sum(p <= LEVEL for p in adjusted.values())
    title = f"{len(adjusted)} comparisons, {clear} significant"
    rows = [[title, "difference", "95% interval", "t", "p", "p, corrected"]]
    for (setting, column, arm), one in compared.items():
        heading = [f"**{at_size.settings[setting].title or setting}**"]
        if heading not in rows:
            rows.append(heading)
        base, form, half = float(column == "saving"), COMPARED[column], one.half_width or 0.0
        ends = " to ".join(f"{base + one.mean + sign * half:{form}}" for sign in (-1, 1))
        tests = (f"{one.t:+.1f}", f"{one.p:.2g}", f"{adjusted[setting, column, arm]:.2g}")
        rows.append([f"{_title(column, baseline)}: `{arm}`", f"{base + one.mean:{form}}", ends, *tests])
    return rows if compared else []


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
    kept = {key: value for key, value in outcome.result.items() if key not in LEFT_OUT}
    return {**asdict(outcome), "result": kept}


def write_data(folder: Path, *, study: str, size: str, command: str, versions: Mapping[str, str], **rest: Any) -> None:
    """Write `folder/results.json`; `rest` are the fields that only this kind of study has."""
    data = {
        "study": study,
        "size": size,
        "command": command,
        "date": date.today().isoformat(),
        "commit": source_commit(),
        "machine": {"cpu": cpu_name(), "cores": usable_cores(), "system": platform.system()},
        "versions": versions,
        **rest,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DATA_NAME).write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")


def read_data(folder: Path) -> dict[str, Any]:
    """Read `folder/results.json`."""
    return json.loads((folder / DATA_NAME).read_text(encoding="utf-8"))


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write each text under its file name. Returns their paths."""
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def provenance(data: Mapping[str, Any], *, reproduces: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Sentences on the size, command, machine, versions and finished runs of a study, for its page.

    `data` is the content of `results.json`, `results` are those of the finished runs.
    """
    packages = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version != "absent")
    # Results record their commit; older ones have only that of their publication, or none.
    commits = sorted({commit for result in results if (commit := result.get("commit", data.get("commit")))})
    commit = f" from commit {_listed(commits)}" if commits else ""
    return (
        f"Size `{data['size']}`; modelled on {reproduces}. Made with `{data['command']}` on {data['date']}{commit}, "
        f"{data['machine']['cores']} cores of {data['machine']['cpu']}; {packages}. "
        f"{len(results)} of {data['units']} runs are finished."
    )


def _listed(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def csv_of(header: Sequence[str], rows: Iterable[tuple[Sequence[Any], Sequence[float | None], Sequence[Any]]]) -> str:
    """CSV of rows given as (labels, figures, more labels); a figure that is None becomes an empty cell."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    for labels, figures, more in rows:
        writer.writerow([*labels, *("" if value is None else f"{value:.6g}" for value in figures), *more])
    return stream.getvalue()


def figure_title(file: str) -> str:
    """The title of a figure, from its file name."""
    return file.removesuffix(".svg").replace("-", " ")


def cpu_name() -> str:
    """The model name of this machine's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "an unnamed CPU"
