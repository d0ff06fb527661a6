"""The page of a data set (one HTML file for people), and a download's datasheet (Markdown, to stay with the shards)."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.journal import read_sessions
from data_prep.dataset.locks import REPORT, part_lock
from data_prep.dataset.statistics import PARTS, SIDE_EDGES, WORD_EDGES, Census, Place, take_census
from data_prep.reasons import is_transient, meaning_of
from data_prep.settings.source_config import SourceConfig
from pipeline.config import to_tree
from pipeline.data.shards.manifest_format import Manifest, load_manifest
from pipeline.data.shards.rgb_image import rgb_image, thumbnail_url
from pipeline.data.shards.storage import open_records
from pipeline.data.shards.tar_reader import CaptionField
from pipeline.files import write_text
from pipeline.report.page import Bar, percent, render

TEMPLATES = Path(__file__).parent / "templates"
REPORT_NAME, DATASHEET_NAME = "report.html", "datasheet.md"
_PICTURES, _NEAR_PAIRS = 18, 6
_REASONS = 40
"""Reasons that are listed one by one."""
_COLOURS = 5
"""Reasons that are shown apart along the list; `report.html.j2` has the colours."""


def write_report(
    root: str | Path,
    *,
    output: str | Path | None = None,
    caption: CaptionField | None = None,
    allow_commands: bool = False,
    allow_outside: bool = False,
) -> Path:
    """Write the page of a data set with a manifest; for those of `neuclip download`, also the datasheet.

    Args:
        root: The data set.
        output: Folder to write into; the data set's own by default.
        caption: Where captions are, in shards that `neuclip download` did not make; in `.txt` by default.
        allow_commands: As for `load_manifest`.
        allow_outside: As for `load_manifest`.

    Returns:
        The path of the page.

    Raises:
        UserError: There is no manifest, or a file of the data set is missing or damaged.
    """
    folder, caption = Folder(Path(root)), caption or CaptionField()
    manifest = load_manifest(folder.root, allow_commands=allow_commands, allow_outside=allow_outside)
    facts = page_facts(folder, manifest, take_census(folder, manifest, caption), caption)
    place = Path(output or folder.root)
    place.mkdir(parents=True, exist_ok=True)
    is_own = folder.is_download and place.resolve() == folder.root.resolve()  # else the data set may be read-only
    with part_lock(folder, REPORT) if is_own else nullcontext():
        for name in (REPORT_NAME, DATASHEET_NAME) if folder.is_download else (REPORT_NAME,):
            write_text(place / name, render(f"{name}.j2", facts, folder=TEMPLATES), durable=True)
    return place / REPORT_NAME


def page_facts(folder: Folder, manifest: Manifest, census: Census, caption: CaptionField) -> dict[str, Any]:
    """The context of both templates."""
    sessions, damaged = read_sessions(folder)
    read = len(census.places)
    shown = [census.places[(2 * k + 1) * read // (2 * min(_PICTURES, read))] for k in range(min(_PICTURES, read))]
    near = census.near[:_NEAR_PAIRS]
    pictures = _pictures(manifest, caption, {*shown, *(place for pair in near for place in pair)})
    return {
        "title": folder.root.absolute().name,
        "manifest": manifest,
        "source": {**to_tree(SourceConfig()), **manifest.facts["source"]} if folder.is_download else None,
        "facts": manifest.facts,
        "odd": _odd(census, manifest),
        "reasons": _reasons(manifest, is_download=folder.is_download),
        "parts": _parts(census, manifest),
        "hosts": _hosts(census),
        "host_count": len(census.hosts),
        "served": _bars(census.served_sides, SIDE_EDGES),
        "stored": _bars(census.stored_sides, SIDE_EDGES),
        "words": _bars(census.caption_words, WORD_EDGES),
        "languages": _shares(census),
        "captions_guessed": len(census.captions),
        "sessions": sessions,
        "damaged_sessions": damaged,
        "seconds": sum(session["seconds"] for session in sessions),
        "pictures": [pictures[place] for place in shown],
        "near": [(pictures[earlier], pictures[later]) for later, earlier in near],
        "near_count": len(census.near),
        "samples_read": read + census.problems.total(),
        "shards_read": census.shards_read,
        "problems": census.problems.most_common(_REASONS),
        "removed": len(folder.removed_names()),
    }


def _odd(census: Census, manifest: Manifest) -> list[tuple[int, str]]:
    """Numbers of captions and images that may be other than the user expects: counted, or among the samples read."""
    counts = manifest.facts.get("counts")
    among = "" if counts else f" among {len(census.places):,} that were read"
    words = {
        "distinct_captions": "Distinct captions",
        "long_captions": "Captions of more than 77 tokens",
        "transparent": "Images with transparency",
        "single_colour": "Images of a single colour",
    }
    return [(number, f"{words[name]}{among}") for name, number in (counts or census.odd).items()
            if name in words and number]  # fmt: skip


def _reasons(manifest: Manifest, *, is_download: bool) -> list[dict[str, Any]]:
    """The most frequent reasons of failures, and the others in a row or two: those that may pass, and lasting ones."""
    ranked = sorted(manifest.failures.items(), key=lambda item: (-item[1], item[0]))
    rows: list[dict[str, Any]] = [
        {"name": name, "count": count, "meaning": meaning_of(name), "transient": is_transient(name) and is_download}
        for name, count in ranked[:_REASONS]
    ]
    for transient in (True, False):
        counts = [n for name, n in ranked[_REASONS:] if (is_transient(name) and is_download) == transient]
        if counts:
            name = f"{len(counts):,} other reasons"
            rows.append({"name": name, "count": sum(counts), "meaning": "", "transient": transient})
    return [{**row, "share": row["count"] / max(1, manifest.attempted)} for row in rows]


def _parts(census: Census, manifest: Manifest) -> dict[str, Any]:
    """Failures along the list: the reasons with a colour of their own, and the height of each in each part, in %."""
    order = sorted(census.reasons, key=lambda reason: (-census.reasons[reason].sum(), reason))
    series = {reason: census.reasons[reason] for reason in order[:_COLOURS]}
    if rest := order[_COLOURS:]:
        series["others"] = np.sum([census.reasons[reason] for reason in rest], axis=0)
    if not series:
        return {}
    edges = -(-np.arange(PARTS + 1) * manifest.attempted // PARTS)
    sizes = np.maximum(1, np.diff(edges))
    most = (np.sum(list(series.values()), axis=0) / sizes).max()
    columns = [
        {
            "rows": f"{edges[k] + 1:,} to {edges[k + 1]:,}",
            "reasons": [(name, int(counts[k]), 100 * counts[k] / sizes[k] / most) for name, counts in series.items()],
        }
        for k in range(PARTS)
        if edges[k + 1] > edges[k]
    ]
    return {"names": list(series), "columns": columns, "most": most}


def _hosts(census: Census, shown: int = 15) -> list[dict[str, Any]]:
    rows = []
    for host, urls in census.hosts.most_common(shown):
        failed = {reason: n for (name, reason), n in census.host_reasons.items() if name == host}
        worst = max(failed, key=lambda reason: failed[reason], default="")
        rows.append({"name": host, "urls": urls, "success": census.host_samples[host] / urls, "worst": worst})
    return rows


def _bars(counts: np.ndarray, edges: np.ndarray) -> list[dict[str, Any]]:
    """One bar per bin between the first and the last that is not empty; `height` is relative to the tallest."""
    filled = np.flatnonzero(counts)
    if not len(filled):
        return []
    bars = []
    for i in range(filled[0], filled[-1] + 1):
        last = int(edges[i + 1]) - 1
        label = str(int(edges[i])) if last == edges[i] else f"{edges[i]}–{last}"
        label = f"≥ {edges[i]}" if edges[i + 1] >= 1 << 31 else label
        height = counts[i] / counts.max()
        bars.append({"label": label, "count": int(counts[i]), "height": height, "share": counts[i] / counts.sum()})
    return bars


def _shares(census: Census, shown: int = 8) -> list[Bar]:
    total = census.languages.total()
    common = [(code, n) for code, n in census.languages.most_common(shown) if n >= 0.005 * total]
    rest = total - sum(count for _, count in common)
    shares = [(code, n / total) for code, n in [*common, *([("other", rest)] if rest else [])]]
    return [Bar(code, share, percent(share)) for code, share in shares]


def _pictures(manifest: Manifest, caption: CaptionField, places: set[Place]) -> dict[Place, dict[str, str]]:
    """Thumbnails of samples, as data URLs, and their captions."""
    pictures = {}
    for number in sorted({number for number, _ in places}):
        wanted = {place for shard, place in places if shard == number}
        with open_records(manifest.url(manifest.shards[number]), caption_suffix=caption.suffix) as records:
            for place, record in zip(range(max(wanted) + 1), records, strict=False):
                if place not in wanted:
                    continue
                source = thumbnail_url(rgb_image(record.image or b""), (192, 192))
                pictures[number, place] = {"source": source, "caption": caption.read(record)}
    return pictures
