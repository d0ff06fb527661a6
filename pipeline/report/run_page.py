"""The report of one run as a self-contained HTML page and as markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.files import write_text
from pipeline.report import charts
from pipeline.report.headlines import flat, score_rows, tiles
from pipeline.report.page import duration, render
from pipeline.report.run_data import Run
from pipeline.report.stored_scores import Classes
from pipeline.report.temperatures import temperatures

HTML_NAME, MARKDOWN_NAME = "report.html", "report.md"
WHOLE_MATRIX, CONFUSIONS = 16, 15
"""Up to how many classes a confusion matrix is shown in full, and how many confusions are listed otherwise."""


def write_page(run: Run, output: Path) -> Path:
    """Write `report.html` and `report.md` to `output`. Returns the path of the page."""
    context = _context(run)
    write_text(output / MARKDOWN_NAME, render("run.md", context))
    return write_text(output / HTML_NAME, render("run.html", context))


def _context(run: Run) -> dict[str, Any]:
    latest = run.latest
    zero_shot = latest.of("classification") if latest else []
    retrieval = latest.of("retrieval") if latest else []
    return {
        "run": run,
        "title": run.name,
        "subtitle": " · ".join(_subtitle(run)),
        "tiles": tiles(run),
        "zero_shot_chart": charts.score_chart(zero_shot) if zero_shot else None,
        "retrieval_charts": [charts.retrieval_chart(score, named=len(retrieval) > 1) for score in retrieval],
        "progress": charts.progress_charts(run),
        "confusions": [_confusions(classes) for classes in latest.classes] if latest else [],
        "score_rows": score_rows(run),
        "examples": latest.examples if latest else (),
        "described": latest.described if latest else (),
        "temperatures": temperatures(run),
        "training_charts": charts.training_charts(run),
        "constants": charts.constants(run),
        "failure_chart": charts.failure_chart(run),
        "stage_chart": charts.stage_chart(run),
        "data_facts": _data_facts(run),
        "data_provenance": [pair for manifest in run.manifests for pair in flat(manifest.facts)],
        "provenance": _provenance(run),
        "settings": flat(run.config),
        "next": _next_commands(run),
        "events": [(_elapsed(event, run.events[0]), event["message"]) for event in shown_events(run.events)],
    }


def shown_events(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The events without the ends of epochs, of which metrics.jsonl has each; those with corrupt samples stay."""
    return [event for event in events if _is_news(event.get("data") or {})]


def _is_news(facts: Mapping[str, Any]) -> bool:
    return "order_hash" not in facts or bool(facts.get("replaced"))


def _elapsed(event: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """The time from the first event to this one; empty if a record has none."""
    times = [record.get("time") for record in (event, first)]
    if not all(isinstance(time, int | float) for time in times):
        return ""
    return duration(max(0.0, times[0] - times[1]))  # type: ignore[operator]


def _next_commands(run: Run) -> list[tuple[str, str]]:
    """Commands that go on from the report, each with its purpose."""
    folder, name = shlex.quote(str(run.folder)), shlex.quote(f"hub/{run.name}")
    images = shlex.quote(str(run.manifests[0].root)) if run.manifests else "FOLDER"
    commands = [
        (f"neuclip evaluate {folder} --suite FOLDER", "scores it"),
        (f"neuclip playground {folder} --images {images}", "lets you try it"),
        (f"neuclip export {folder} --output {name}", "writes what open_clip loads"),
    ]
    return commands if run.latest is None else commands[1:]


def _confusions(classes: Classes) -> dict[str, Any]:
    """A small matrix in full, or the most frequent confusions of a larger one."""
    whole = classes.matrix is not None and len(classes.names) <= WHOLE_MATRIX
    matrix = [[cell / max(1, sum(row)) for cell in row] for row in classes.matrix or ()] if whole else None
    known = [accuracy for accuracy in classes.accuracy if accuracy is not None]
    lowest = min(known, default=0.0)
    worst = classes.names[classes.accuracy.index(lowest)] if known else ""
    return {
        "label": classes.task,
        "summary": f"{len(classes.names):,} classes, lowest “{worst}” with {100 * lowest:.0f}%",
        "names": classes.names,
        "matrix": matrix,
        "pairs": [
            {"true": true, "predicted": predicted, "count": f"{count:,}"}
            for true, predicted, count in ([] if whole else classes.confusions[:CONFUSIONS])
        ],
    }


def _subtitle(run: Run) -> Iterable[str]:
    for value in (run.setting("objective.name"), run.architecture, run.setting("engine.deepspeed")):
        if value is not None and value != "auto":
            yield str(value)
    if run.setting("batch_size") is not None:
        yield f"global batch {run.setting('batch_size')}"
    if run.latest is not None:
        yield f"evaluated at {run.latest.checkpoint}"


def _data_facts(run: Run) -> list[tuple[str, str]]:
    """The statistics of every data source."""
    rows = []
    for manifest in run.manifests:
        rows += [
            ("shards of", str(manifest.root)),
            (f"{manifest.counted} tried", f"{manifest.attempted:,}"),
            ("pairs", f"{manifest.n:,} ({100 * manifest.n / manifest.attempted:.2f}%)"),
            ("shards", f"{len(manifest.shards):,}, {manifest.bytes / 1e6:,.1f} MB"),
            ("digest", manifest.digest[:16]),
        ]
    return rows


def _provenance(run: Run) -> list[tuple[str, str]]:
    """The settings that all of the latest scores were computed with."""
    if run.latest is None or not run.latest.scores:
        return []
    inputs = [score.inputs for score in run.latest.scores]
    rows = [("checkpoint", run.latest.checkpoint)]
    for key in ("checkpoint", "architecture", "device", "precision", "micro_batch", "code"):
        values = {str(one[key])[:40] for one in inputs if key in one}
        if values:
            rows.append((f"{key} digest" if key == "checkpoint" else key, " and ".join(sorted(values))))
    packages = inputs[0].get("packages", {})
    return [*rows, *((name, version) for name, version in packages.items())]
