"""Writes a study's outcomes: `results.json` (the data), and rendered from it `results.csv`, `results.md`, figures."""

from __future__ import annotations

import csv
import io
import json
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from jobs.studies import study_figures
from jobs.studies.declare import Study, Unit, Variant, arms_of, load_study, size_of
from jobs.studies.outcomes import COLUMNS, PAIRED, Outcome, Spread, paired, spread
from jobs.studies.schedule import cores
from pipeline.report.run_page import render as render_page

DATA_NAME = "results.json"
KEPT = ("batch_size", "ranks", "curve", "last", "step_ms", "peak_memory_mib", "traffic_bytes_per_step", "normalizers")


def publish(
    name: str, *, size: str, units: Sequence[Unit], outcomes: Sequence[Outcome], folder: Path, command: str
) -> list[Path]:
    """Write all files of a study to `folder`. Returns their paths."""
    data = {
        "study": name,
        "size": size,
        "command": command,
        "date": date.today().isoformat(),
        "commit": source_commit(),
        "machine": {"cpu": cpu_name(), "cores": cores(), "system": platform.system()},
        "versions": [outcome.result["versions"] for outcome in outcomes][-1] if outcomes else {},
        "units": len(units),
        "overrides": {unit.key: list(unit.overrides) for unit in units},
        "runs": [_compact(outcome) for outcome in outcomes],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DATA_NAME).write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")
    return [folder / DATA_NAME, *render(folder)]


def render(folder: Path) -> list[Path]:
    """Render tables and figures from `folder/results.json`. Returns their paths."""
    data = json.loads((folder / DATA_NAME).read_text(encoding="utf-8"))
    study, size = load_study(data["study"]), data["size"]
    outcomes = [Outcome(**run) for run in data["runs"]]
    drawn = study_figures.draw(study, size, outcomes)
    texts = {
        "results.csv": as_csv(outcomes),
        "results.md": as_markdown(study, data, outcomes, list(drawn)),
        "study.html": as_html(study, data, outcomes, drawn),
        **drawn,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def as_csv(outcomes: Sequence[Outcome]) -> str:
    """One line per run with every column; empty if the run does not have the metric."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["setting", "arm", "seed", *COLUMNS, "key"])
    for o in outcomes:
        values = [column.value(o.result) for column in COLUMNS.values()]
        writer.writerow([o.setting, o.arm, o.seed, *("" if v is None else f"{v:.6g}" for v in values), o.key])
    return stream.getvalue()


def as_markdown(study: Study, data: Mapping[str, Any], outcomes: Sequence[Outcome], drawn: Sequence[str]) -> str:
    """The generated page of a study: its question, how it was run, a table per setting, and the figures."""
    how = (
        f"{_how(study, data, outcomes)} This page is generated from `results.json` by `neuclip study`; do not edit it."
    )
    lines = [f"# {study.title}", "", study.question.strip(), "", how]
    for title, rows in _tables(study, data["size"], outcomes):
        lines += ["", f"## {title}", "", *_as_lines(rows)]
    for file in drawn:
        lines += ["", f"![{_figure_title(file)}]({file})"]
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
    figures = [{"title": _figure_title(file), "svg": svg[svg.index("<svg") :]} for file, svg in drawn.items()]
    how = _how(study, data, outcomes).replace("`", "")
    context = {"title": study.title, "question": study.question.strip(), "how": how, "parts": parts, "figures": figures}
    return render_page("study.html", context)


def _how(study: Study, data: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    made = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version != "absent")
    return (
        f"Size `{data['size']}`; stands for {study.reproduces}. Made with `{data['command']}` on {data['date']}, "
        f"{data['machine']['cores']} cores of {data['machine']['cpu']}; {made}. {len(outcomes)} of {data['units']} "
        "runs are in. Every figure is the mean ± standard deviation over seeds; differences are taken seed by seed. "
        "Errors and variances of normalizers are means over the checkpoints on the way, without the last."
    )


def _figure_title(file: str) -> str:
    return file.removesuffix(".svg").replace("-", " ")


def _tables(study: Study, size: str, outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[list[str]]]]:
    """(title, table) of every setting that has runs."""
    at_size, arms = size_of(study, size), arms_of(study, size)
    baseline = at_size.baseline or study.baseline
    for setting, variant in at_size.settings.items():
        there = {arm: arms[arm] for arm in arms if any(o.setting == setting and o.arm == arm for o in outcomes)}
        if there:
            yield variant.title or setting, table(study, outcomes, setting=setting, arms=there, baseline=baseline)


def _as_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as markdown lines; a row with one cell is a group heading."""
    width = len(rows[0])
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" + "|---:" * (width - 1) + "|"]
    return lines + [
        f"| {row[0]} |" + " |" * (width - 1) if len(row) == 1 else f"| {' | '.join(row)} |" for row in rows[1:]
    ]


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
    return shown(found, "+.1f", unit="%" if column == "extra_time" else "")


def shown(value: Spread | None, form: str, unit: str = "") -> str:
    """`12.3 ± 0.4`, or `–` if there is no value."""
    if value is None:
        return "–"
    return f"{value.mean:{form}}{unit}" + (f" ± {value.sd:{form.replace('+', '')}}" if value.sd is not None else "")


def _compact(outcome: Outcome) -> dict[str, Any]:
    return {**asdict(outcome), "result": {key: outcome.result[key] for key in KEPT}}


def source_commit() -> str:
    """The git commit of this source tree, with `-dirty` if files were changed; "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_name() -> str:
    """The model name of this machine's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "an unnamed CPU"
