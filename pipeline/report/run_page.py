"""The report of one run as a self-contained HTML page and as markdown."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.data.shards.manifest_format import Manifest
from pipeline.data.shards.storage import is_local, open_records
from pipeline.data.shards.tar_reader import CaptionField
from pipeline.files import write_text
from pipeline.report import charts
from pipeline.report.headlines import flat, score_rows, tiles
from pipeline.report.run_data import Run
from pipeline.report.stored_scores import Classes

HTML_NAME, MARKDOWN_NAME = "report.html", "report.md"
WHOLE_MATRIX, CONFUSIONS = 16, 15
"""Up to how many classes a confusion matrix is shown in full, and how many confusions are listed otherwise."""
COUNT, SIDE = 12, 160
"""Training pairs that are shown, and the longest side of their images in pixels."""


def write_page(run: Run, output: Path) -> Path:
    """Write `report.html` and `report.md` to `output`. Returns the path of the page."""
    context = _context(run)
    write_text(output / MARKDOWN_NAME, render("run.md", context))
    return write_text(output / HTML_NAME, render("run.html", context))


def render(template: str, context: Mapping[str, Any]) -> str:
    """Render a template of this folder; values are escaped for HTML or for markdown tables."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=lambda name: bool(name and name.endswith(".html")),
        finalize=in_markdown if template.endswith(".md") else None,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_uri"] = _data_uri
    return environment.get_template(template).render(context)


def in_markdown(value: Any) -> Any:
    """Text escaped for a cell of a markdown table."""
    return value.replace("|", "\\|").replace("<", "&lt;") if isinstance(value, str) else value


def _context(run: Run) -> dict[str, Any]:
    latest = run.latest
    zero_shot = latest.of("classification") if latest else []
    retrieval = latest.of("retrieval") if latest else []
    progress = charts.progress_charts(run)
    return {
        "run": run,
        "title": run.name,
        "subtitle": " · ".join(_subtitle(run)),
        "tiles": (headline := tiles(run)),
        "tile_columns": -(-len(headline) // -(-max(1, len(headline)) // 5)),  # at most five, in rows of like length
        "zero_shot_chart": charts.score_chart(zero_shot) if zero_shot else None,
        "retrieval_charts": [charts.retrieval_chart(score, named=len(retrieval) > 1) for score in retrieval],
        "progress": progress,
        "columns": columns(len(progress)),
        "confusions": [_confusions(classes) for classes in latest.classes] if latest else [],
        "score_rows": score_rows(run),
        "examples": latest.examples if latest else (),
        "described": latest.described if latest else (),
        "pairs": sample_pairs(run.manifests, caption=str(run.setting("data.caption", "txt"))),
        "training_charts": charts.training_charts(run),
        "constants": charts.constants(run),
        "failure_chart": charts.failure_chart(run),
        "stage_chart": charts.stage_chart(run),
        "data_facts": _data_facts(run),
        "data_provenance": [pair for manifest in run.manifests for pair in flat(manifest.facts)],
        "provenance": _provenance(run),
        "settings": flat(run.config),
        "next": _next_commands(run),
        "duration": charts.duration,
        "events": [(_elapsed(event, run.events[0]), event["message"]) for event in shown_events(run.events)],
    }


def shown_events(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The events, with one line for all epochs but the first, the last and those with corrupt samples."""
    epochs = [i for i, event in enumerate(events) if "order_hash" in (event.get("data") or {})]
    plain = [i for i in epochs[1:-1] if not events[i]["data"].get("replaced")]
    if len(plain) < 2:
        return list(events)
    numbers = [events[i]["data"]["epoch"] for i in plain]
    samples, left = (sum(events[i]["data"][name] for i in plain) for name in ("samples", "dropped"))
    message = (
        f"{len(plain):,} more epochs (from {min(numbers):,} to {max(numbers):,}): {samples:,} samples, {left:,} left "
        "over, 0 corrupt; metrics.jsonl has each."
    )
    summary = {**events[plain[-1]], "message": message}
    return [summary if i == plain[-1] else event for i, event in enumerate(events) if i not in set(plain[:-1])]


def _elapsed(event: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """The time from the first event to this one; empty if a record has none."""
    times = [record.get("time") for record in (event, first)]
    if not all(isinstance(time, int | float) for time in times):
        return ""
    return charts.duration(max(0.0, times[0] - times[1]))  # type: ignore[operator]


def columns(tiles: int) -> str:
    """CSS variables for a grid of tiles: its columns where three or four fit, so that no row has a single tile.

    If no number of columns avoids that, the last tile is as wide as the grid.
    """
    found = []
    for name, most in (("three", 3), ("four", 4)):
        fitting = [n for n in range(most, 1, -1) if tiles % n != 1]
        number = next(iter(fitting), most) if tiles > most else max(1, tiles)
        found += [f"--{name}: {number}", f"--{name}-last: {'auto' if fitting or tiles <= most else '1 / -1'}"]
    return "; ".join(found)


def _next_commands(run: Run) -> list[tuple[str, str]]:
    """Commands that go on from the report, each with its purpose."""
    folder, name = shlex.quote(str(run.folder)), shlex.quote(f"hub/{run.name}")
    images = shlex.quote(str(run.manifests[0].root)) if run.manifests else "FOLDER"
    found = [
        (f"neuclip evaluate {folder} --suite FOLDER", "scores it"),
        (f"neuclip playground {folder} --images {images}", "lets you try it"),
        (f"neuclip export {folder} {name}", "writes what open_clip loads"),
    ]
    return found if run.latest is None else found[1:]


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
    found = [("checkpoint", run.latest.checkpoint)]
    for key in ("checkpoint", "architecture", "device", "precision", "micro_batch", "code"):
        values = {str(one[key])[:40] for one in inputs if key in one}
        if values:
            found.append((f"{key} digest" if key == "checkpoint" else key, " and ".join(sorted(values))))
    packages = inputs[0].get("packages", {})
    return [*found, *((name, version) for name, version in packages.items())]


def _data_uri(path: Path) -> str | None:
    """None if the thumbnail is missing; the page then shows an empty frame."""
    try:
        return f"data:image/jpeg;base64,{base64.b64encode(path.read_bytes()).decode()}"
    except OSError:
        return None


def sample_pairs(manifests: Sequence[Manifest], *, caption: str = "txt") -> list[tuple[str, str]]:
    """Captions (`data.caption` of the run) with their images as data URIs; unreadable ones are skipped.

    They are at most `COUNT`, at even intervals from all local shards.
    """
    try:
        field = CaptionField.parse(caption)
    except ValueError:
        return []
    places = [
        (manifest, shard, row)
        for manifest in manifests
        for shard in range(len(manifest.shards))
        for row in (0, manifest.shards[shard].samples // 2)
    ]
    chosen = [places[k * len(places) // COUNT] for k in range(COUNT)] if len(places) > COUNT else places
    found = [_read(manifest.url(manifest.shards[shard]), row, field) for manifest, shard, row in chosen]
    return [pair for pair in found if pair is not None]


def _read(url: str, row: int, field: CaptionField) -> tuple[str, str] | None:
    from pipeline.data.shards.rgb_image import rgb_image, thumbnail_url

    if not is_local(url) or not Path(url).is_file():
        return None
    try:
        with open_records(url, skip=row, caption_suffix=field.suffix) as records:
            record = next(iter(records), None)
        if record is None or record.image is None or record.caption is None:
            return None
        return field.read(record), thumbnail_url(rgb_image(record.image), (SIDE, SIDE))
    except (OSError, ValueError):
        return None
