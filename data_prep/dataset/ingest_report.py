"""The page of a data set (one HTML file for people), and a download's datasheet (Markdown, to stay with the shards).

The meta files of `neuclip download` and `neuclip pairs` are read as a whole; of the shards, the first samples of some.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.dataset.dataset_folder import Folder, read_meta
from data_prep.dataset.duplicates import near_duplicates, signature, stacked
from data_prep.dataset.locks import REPORT, part_lock
from data_prep.reasons import is_transient, meaning_of
from data_prep.settings.source_config import SourceConfig
from pipeline.config import to_tree
from pipeline.data.shards.manifest_format import Manifest, load_manifest
from pipeline.data.shards.storage import open_records
from pipeline.data.shards.tar_reader import (
    CaptionField,
    CorruptSample,
    DamagedTar,
    TarRecord,
    counted_errors,
    rgb_image,
    thumbnail_url,
)
from pipeline.errors import UserError
from pipeline.files import write_text
from pipeline.pictures.pixels import has_transparency, open_image
from pipeline.report.page import render

TEMPLATES = Path(__file__).parent / "templates"
REPORT_NAME, DATASHEET_NAME = "report.html", "datasheet.md"
_PICTURES, _NEAR_PAIRS = 18, 6
_REASONS, _HOSTS = 40, 15
"""Reasons and hosts that are listed one by one."""
_READ, _SHARDS_READ = 5_000, 32
"""Samples that are read, of so many shards."""
_HOSTS_KEPT = 200_000
_SIDES = np.array([0, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 1 << 31])
_WORDS = np.array([0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 1 << 31])
_COLUMNS = ["url", "caption", "status", "reason", "width", "height", "original_width", "original_height"]
_SESSION = {"started", "seconds", "host", "worker", "distributor", "outcome"}
Place = tuple[int, int]
"""Number of a shard in the manifest, and of a sample in it."""


def write_report(
    root: str | Path,
    *,
    output: str | Path | None = None,
    caption: CaptionField | None = None,
    allow_outside: bool = False,
) -> Path:
    """Write the page of a data set with a manifest; for those of `neuclip download`, also the datasheet.

    Args:
        root: The data set.
        output: Folder to write into; the data set's own by default.
        caption: Where captions are, in shards that `neuclip download` did not make; in `.txt` by default.
        allow_outside: As for `load_manifest`.

    Returns:
        The path of the page.

    Raises:
        UserError: There is no manifest, or a file of the data set is missing or damaged.
    """
    folder, caption = Folder(Path(root)), caption or CaptionField()
    manifest = load_manifest(folder.root, allow_outside=allow_outside)
    facts = _page_facts(folder, manifest, take_census(folder, manifest, caption), caption)
    place = Path(output or folder.root)
    place.mkdir(parents=True, exist_ok=True)
    is_own = folder.is_download and place.resolve() == folder.root.resolve()  # else the data set may be read-only
    with part_lock(folder, REPORT) if is_own else nullcontext():
        for name in (REPORT_NAME, DATASHEET_NAME) if folder.is_download else (REPORT_NAME,):
            write_text(place / name, render(f"{name}.j2", facts, folder=TEMPLATES), durable=True)
    return place / REPORT_NAME


@dataclass
class Census:
    """Statistics of a data set. Histograms count by `_SIDES` (pixels) and `_WORDS` (words)."""

    hosts: Counter[str] = field(default_factory=Counter)
    host_reasons: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    """URLs by host and reason; None: a sample."""
    served_sides: np.ndarray = field(default_factory=lambda: np.zeros(len(_SIDES) - 1, np.int64))
    stored_sides: np.ndarray = field(default_factory=lambda: np.zeros(len(_SIDES) - 1, np.int64))
    caption_words: np.ndarray = field(default_factory=lambda: np.zeros(len(_WORDS) - 1, np.int64))
    places: list[Place] = field(default_factory=list)
    """The samples that were read, without those that cannot be used."""
    shards_read: int = 0
    odd: Counter[str] = field(default_factory=Counter)
    """Among those read: images with transparency, and of a single colour."""
    problems: Counter[str] = field(default_factory=Counter)
    """Samples among those read that training cannot use, by reason."""
    near: list[tuple[Place, Place]] = field(default_factory=list)
    """Near duplicates among the samples that were read, and the earlier sample that each resembles."""


def take_census(folder: Folder, manifest: Manifest, caption: CaptionField) -> Census:
    """Read every meta file of a data set once, and some samples; `caption` says where these have their captions.

    Raises:
        UserError: A meta file or a shard is missing or damaged.
    """
    census = Census()
    for shard in folder.finished() if folder.is_download or folder.is_converted else ():
        _count(census, read_meta(folder, shard, _COLUMNS))
    _read_samples(census, manifest, caption)
    return census


def _count(census: Census, table: Any) -> None:
    kept = table.filter(pc.equal(table["status"], "success"))
    if "url" in table.column_names:
        found = pc.extract_regex(table["url"], r"^[a-zA-Z][a-zA-Z0-9+.-]*://(?:[^/@]*@)?(?P<host>\[[^\]]*\]|[^/:?#]+)")
        hosts = pc.fill_null(pc.utf8_lower(pc.struct_field(found, "host")), "(no host)").to_pylist()
        census.hosts.update(hosts)
        census.host_reasons.update(zip(hosts, table["reason"].to_pylist(), strict=True))
        if len(census.hosts) > 2 * _HOSTS_KEPT:  # the page shows a few, and a crawl has millions
            census.hosts = Counter(dict(census.hosts.most_common(_HOSTS_KEPT)))
            census.host_reasons = Counter({k: n for k, n in census.host_reasons.items() if k[0] in census.hosts})
    for name, into in (("original_", census.served_sides), ("", census.stored_sides)):
        if f"{name}width" in kept.column_names:
            sides = pc.min_element_wise(kept[f"{name}width"], kept[f"{name}height"]).drop_null().to_numpy()
            into += np.histogram(sides, _SIDES)[0]
    if "caption" in kept.column_names:
        _count_words(census, kept["caption"])


def _count_words(census: Census, captions: Any) -> None:
    trimmed = pc.utf8_trim_whitespace(captions)
    words = pc.if_else(pc.equal(trimmed, ""), 0, pc.list_value_length(pc.utf8_split_whitespace(trimmed)))
    census.caption_words += np.histogram(words, _WORDS)[0]


def _read_samples(census: Census, manifest: Manifest, caption: CaptionField) -> None:
    """Read the first samples of shards that are spread over the data set."""
    count = census.shards_read = min(_SHARDS_READ, len(manifest.shards))
    sides, captions, signatures = list[int](), list[str](), []
    for number in (len(manifest.shards) * k // count for k in range(count)):
        url = manifest.url(manifest.shards[number])
        for place, record in enumerate(_first_records(url, caption, -(-_READ // count))):
            try:
                side, text, found = _examined(record, caption)
            except CorruptSample as problem:
                census.problems[str(problem)] += 1
                continue
            sides.append(side)
            captions.append(text)
            signatures.append(found)
            census.places.append((number, place))
            census.odd["transparent"] += has_transparency(record.image or b"")
            census.odd["single_colour"] += len({found[1][k : k + 3] for k in range(0, len(found[1]), 3)}) == 1
    if not census.stored_sides.any():
        census.stored_sides += np.histogram(sides, _SIDES)[0]
    if captions and not census.caption_words.any():
        _count_words(census, pa.array(captions))
    near = near_duplicates(stacked(signatures))
    census.near = [(census.places[later], census.places[earlier]) for later, earlier in near.items()]


def _first_records(url: str, caption: CaptionField, wanted: int) -> Iterator[TarRecord]:
    try:
        with open_records(url, caption_suffix=caption.suffix) as records:
            yield from itertools.islice(records, wanted)
    except (OSError, DamagedTar) as error:
        raise UserError(f"{url} is missing or damaged ({error}): `neuclip verify` finds all damage.") from error


def _examined(record: TarRecord, caption: CaptionField) -> tuple[int, str, tuple[int, bytes]]:
    """The shorter side, the caption and the signature of a sample."""
    if record.problem or not record.image:
        raise CorruptSample(record.problem or "image is missing")
    with counted_errors(), open_image(record.image) as image:
        side = min(image.size)
    return side, caption.read(record), signature(record.image)


def _page_facts(folder: Folder, manifest: Manifest, census: Census, caption: CaptionField) -> dict[str, Any]:
    """The context of both templates."""
    sessions, damaged = _read_sessions(folder)
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
        "hosts": _hosts(census),
        "host_count": len(census.hosts),
        "served": _bars(census.served_sides, _SIDES),
        "stored": _bars(census.stored_sides, _SIDES),
        "words": _bars(census.caption_words, _WORDS),
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


def _read_sessions(folder: Folder) -> tuple[list[dict[str, Any]], int]:
    """The sessions of a download in order, and the number of damaged lines."""
    sessions, damaged = [], 0
    for line in filter(None, folder.sessions.read_bytes().splitlines() if folder.sessions.exists() else []):
        try:
            session = json.loads(line)
            if not set(session) >= _SESSION:
                raise ValueError("it lacks a field")
            sessions.append(session)
        except (ValueError, TypeError):
            damaged += 1
    return sessions, damaged


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


def _hosts(census: Census) -> list[dict[str, Any]]:
    rows = []
    for host, urls in census.hosts.most_common(_HOSTS):
        outcomes = {reason: n for (name, reason), n in census.host_reasons.items() if name == host}
        success = outcomes.pop(None, 0) / urls
        worst = max(outcomes, key=lambda reason: outcomes[reason], default="")
        rows.append({"name": host, "urls": urls, "success": success, "worst": worst})
    return rows


def _bars(counts: np.ndarray, edges: np.ndarray) -> list[dict[str, Any]]:
    """One bar per bin between the first and the last that is not empty; `height` is relative to the tallest."""
    filled = np.flatnonzero(counts)
    bars = []
    for i in range(filled[0], filled[-1] + 1) if len(filled) else ():
        last = int(edges[i + 1]) - 1
        label = f"≥ {edges[i]}" if last + 1 >= 1 << 31 else f"{edges[i]}–{last}" if last > edges[i] else str(last)
        height = counts[i] / counts.max()
        bars.append({"label": label, "count": int(counts[i]), "height": height, "share": counts[i] / counts.sum()})
    return bars


def _pictures(manifest: Manifest, caption: CaptionField, places: set[Place]) -> dict[Place, dict[str, str]]:
    """Thumbnails of samples, as data URLs, and their captions."""
    pictures = {}
    for number in sorted({number for number, _ in places}):
        wanted = {place for shard, place in places if shard == number}
        with open_records(manifest.url(manifest.shards[number]), caption_suffix=caption.suffix) as records:
            for place, record in zip(range(max(wanted) + 1), records, strict=False):
                if place in wanted:
                    source = thumbnail_url(rgb_image(record.image or b""), (192, 192))
                    pictures[number, place] = {"source": source, "caption": caption.read(record)}
    return pictures
