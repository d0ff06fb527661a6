"""The report of one run as a self-contained HTML page and as markdown."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.data.shards.manifest_format import Manifest
from pipeline.files import write_text
from pipeline.report import charts
from pipeline.report.page import duration, percent, render, short
from pipeline.report.run_data import RECALLS, Run, flat, is_finite
from pipeline.report.stored_scores import StoredEvaluation


class Tile(NamedTuple):
    """A headline figure: its name, its value, and a reference to compare it with."""

    label: str
    value: str
    detail: str = ""


def write_page(run: Run, output: Path) -> Path:
    """Write `report.html` and `report.md` to `output`. Returns the path of the page."""
    latest = run.latest or StoredEvaluation("", None, None, ())
    facts = [run.setting("objective.name"), run.architecture, run.setting("engine.deepspeed")]
    facts = [str(value) for value in facts if value not in (None, "auto")]
    facts += [f"global batch {size}"] if (size := run.setting("batch_size")) is not None else []
    facts += [f"evaluated at {run.latest.checkpoint}"] if run.latest else []
    folder, name = shlex.quote(str(run.folder)), shlex.quote(f"hub/{run.name}")
    images = shlex.quote(str(run.manifests[0].root)) if run.manifests else "FOLDER"
    commands = [
        (f"neuclip evaluate {folder} --suite FOLDER", "scores it"),
        (f"neuclip playground {folder} --images {images}", "lets you try it"),
        (f"neuclip export {folder} --output {name}", "writes what open_clip loads"),
    ]
    context = {
        "run": run,
        "title": run.name,
        "subtitle": " · ".join(facts),
        "tiles": tiles(run),
        "progress": charts.progress_charts(run),
        "latest": latest,
        "training_charts": charts.training_charts(run),
        "constants": charts.constants(run),
        "failures": run.failures.most_common(),
        "tried": sum(manifest.attempted for manifest in run.manifests),
        "data_facts": [fact for manifest in run.manifests for fact in _data_facts(manifest)],
        "data_provenance": [pair for manifest in run.manifests for pair in flat(manifest.facts)],
        "provenance": _provenance(latest),
        "settings": flat(run.config),
        "next": commands[run.latest is not None :],
        "events": _news(run.events),
    }
    write_text(output / "report.md", render("run.md", context))
    return write_text(output / "report.html", render("run.html", context))


def tiles(run: Run) -> list[Tile]:
    """The headline figures whose inputs are available."""
    every = [*(_scores(run.latest) if run.latest else ()), *_validation(run)]
    if run.rows:
        last, speed, wait = run.rows[-1], run.curve("samples_per_second")[1], run.curve("data_wait")[1]
        epochs = f"{last['epoch']:.1f} epochs, " if isinstance(last.get("epoch"), int | float) else ""
        every.append(Tile("Samples seen", short(last["samples"]), f"{epochs}{last['step']:,} steps"))
        if len(speed):
            detail = f"{100 * float(wait.mean()):.1f}% waiting for data" if len(wait) else "median"
            every.append(Tile("Throughput", f"{short(float(np.median(speed)))} /s", detail))
    if run.manifests:
        n, tried = sum(m.n for m in run.manifests), sum(m.attempted for m in run.manifests)
        every.append(Tile("Pairs ingested", f"{n:,}", f"{100 * n / tried:.1f}% of {tried:,} {run.counted}"))
    return every


def _scores(latest: StoredEvaluation) -> list[Tile]:
    def mean_of(tasks: int) -> str:
        return f"mean of {tasks} tasks" if tasks > 1 else "one task"

    made = []
    for name, aggregate in latest.aggregates.items():
        if aggregate.get("complete"):
            note = "" if aggregate.get("official") else ", not the official data"
            made.append(Tile(name, f"{100 * aggregate['score']:.1f}%", f"{mean_of(aggregate['tasks'])}{note}"))
    zero_shot, retrieval = latest.of("classification"), latest.of("retrieval")
    if zero_shot and not made:
        mean = math.fsum(s.score for s in zero_shot) / len(zero_shot)
        chances = [s.chance for s in zero_shot if s.chance is not None]
        against = f", chance {percent(math.fsum(chances) / len(chances))}" if len(chances) == len(zero_shot) else ""
        made.append(Tile("Zero-shot accuracy", f"{100 * mean:.1f}%", f"{mean_of(len(zero_shot))}{against}"))
    for score in retrieval[:1]:
        of = f"{score.label}: " if len(retrieval) > 1 else ""
        for label, side in ((f"{of}image → text R@1", "text"), (f"{of}text → image R@1", "image")):
            value = score.metrics.get(f"{side}_retrieval_recall@1")
            if value is not None:
                among = f"among {score.samples:,} pairs, chance {percent(1 / score.samples)}"
                made.append(Tile(label[:1].upper() + label[1:], f"{100 * value:.1f}%", among))
    return made


def _validation(run: Run) -> list[Tile]:
    """The lowest loss on held-out pairs, and the retrieval of that step."""
    finite = [row for row in run.validations if is_finite(row.get("loss"))]
    if not finite:
        return []
    best, last = min(finite, key=lambda row: row["loss"]), finite[-1]
    where = f"at step {best['step']:,}, the lowest of {len(finite)}"
    end = "" if best is last else f"; {last['loss']:.3f} at step {last['step']:,}"
    made = [Tile("Validation loss", f"{best['loss']:.3f}", where + end)]
    if all(is_finite(best.get(key)) for key in (*RECALLS, "pairs")):
        recalls = [float(best[key]) for key in RECALLS]
        both = " and ".join(f"{value:.1%}" for value in recalls)
        among = f"mean of {both} among {best['pairs']:,.0f} held-out pairs"
        made.append(Tile("Validation R@1", f"{sum(recalls) / 2:.1%}", among))
    return made


def _news(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The time since the first event and the message of events, without the ends of epochs, of which metrics.jsonl has
    each; those with corrupt samples stay."""
    return [
        (duration(max(0.0, event["time"] - events[0]["time"])), event["message"])
        for event in events
        if "order_hash" not in event["data"] or event["data"].get("replaced")
    ]


def _data_facts(manifest: Manifest) -> list[tuple[str, str]]:
    return [
        ("shards of", str(manifest.root)),
        (f"{manifest.counted} tried", f"{manifest.attempted:,}"),
        ("pairs", f"{manifest.n:,} ({100 * manifest.n / manifest.attempted:.2f}%)"),
        ("shards", f"{len(manifest.shards):,}, {manifest.bytes / 1e6:,.1f} MB"),
        ("digest", manifest.digest[:16]),
    ]


def _provenance(latest: StoredEvaluation) -> list[tuple[str, str]]:
    """The settings that all of the latest scores were computed with."""
    if not (inputs := [score.inputs for score in latest.scores]):
        return []
    rows = [("checkpoint", latest.checkpoint)]
    for key in ("checkpoint", "architecture", "device", "precision", "micro_batch", "code"):
        values = {str(one[key])[:40] for one in inputs if key in one}
        if values:
            rows.append((f"{key} digest" if key == "checkpoint" else key, " and ".join(sorted(values))))
    return [*rows, *inputs[0].get("packages", {}).items()]
