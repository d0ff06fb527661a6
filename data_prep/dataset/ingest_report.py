"""The page of a data set (one HTML file for people), and a download's datasheet (Markdown, to stay with the shards).

Of the shards, the first samples of some are read.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.duplicates import Signatures, near_duplicates, signature
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
_REASONS = 40
"""Reasons that are listed one by one."""
_READ, _SHARDS_READ = 5_000, 32
"""Samples that are read, of so many shards."""
_SIDES = np.array([0, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 1 << 31])
_WORDS = np.array([0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 1 << 31])
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
    facts = _page_facts(folder, manifest, take_census(manifest, caption), caption)
    place = Path(output or folder.root)
    place.mkdir(parents=True, exist_ok=True)
    is_own = folder.is_download and place.resolve() == folder.root.resolve()  # else the data set may be read-only
    with part_lock(folder, REPORT) if is_own else nullcontext():
        for name in (REPORT_NAME, DATASHEET_NAME) if folder.is_download else (REPORT_NAME,):
            write_text(place / name, render(f"{name}.j2", facts, folder=TEMPLATES), durable=True)
    return place / REPORT_NAME


@dataclass
class Census:
    """The samples that were read."""

    shards_read: int
    places: list[Place] = field(default_factory=list)
    """Those that can be used."""
    sides: list[int] = field(default_factory=list)
    """Their shorter sides in pixels."""
    words: list[int] = field(default_factory=list)
    """Numbers of words of their captions."""
    odd: Counter[str] = field(default_factory=Counter)
    """Images with transparency, and of a single colour."""
    problems: Counter[str] = field(default_factory=Counter)
    """Samples that training cannot use, by reason."""
    near: list[tuple[Place, Place]] = field(default_factory=list)
    """Near duplicates, and the earlier sample that each resembles."""


def take_census(manifest: Manifest, caption: CaptionField) -> Census:
    """Read the first samples of shards that are spread over the data set; `caption` says where their captions are.

    Raises:
        UserError: A shard is missing or damaged.
    """
    count = min(_SHARDS_READ, len(manifest.shards))
    census, signatures = Census(count), []
    for number in (len(manifest.shards) * k // count for k in range(count)):
        url = manifest.url(manifest.shards[number])
        for place, record in enumerate(_first_records(url, caption, -(-_READ // count))):
            try:
                side, text, found = _examined(record, caption)
            except CorruptSample as problem:
                census.problems[str(problem)] += 1
                continue
            census.sides.append(side)
            census.words.append(len(text.split()))
            signatures.append(found)
            census.places.append((number, place))
            census.odd["transparent"] += has_transparency(record.image or b"")
            census.odd["single_colour"] += len({found[1][k : k + 3] for k in range(0, len(found[1]), 3)}) == 1
    near = near_duplicates(Signatures.stacked(signatures))
    census.near = [(census.places[later], census.places[earlier]) for later, earlier in near.items()]
    return census


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
        "sides": _bars(census.sides, _SIDES),
        "words": _bars(census.words, _WORDS),
        "dates": _dates(folder),
        "pictures": [pictures[place] for place in shown],
        "near": [(pictures[earlier], pictures[later]) for later, earlier in near],
        "near_count": len(census.near),
        "samples_read": read + census.problems.total(),
        "shards_read": census.shards_read,
        "problems": census.problems.most_common(_REASONS),
        "removed": len(folder.removed_names()),
    }


def _dates(folder: Folder) -> list[str]:
    """The first and the last day of a download, one if they are the same."""
    text = folder.sessions.read_text(encoding="utf-8", errors="replace") if folder.sessions.exists() else ""
    days = sorted(set(re.findall(r'"started": "(\d{4}-\d\d-\d\d)T', text)))
    return [*days[:1], *days[1:][-1:]]


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
    """The most frequent reasons of failures, and the others in one row."""
    ranked = sorted(manifest.failures.items(), key=lambda item: (-item[1], item[0]))
    rows: list[dict[str, Any]] = [
        {"name": name, "count": count, "meaning": meaning_of(name), "transient": is_transient(name) and is_download}
        for name, count in ranked[:_REASONS]
    ]
    if others := [count for _, count in ranked[_REASONS:]]:
        rows.append({"name": f"{len(others):,} other reasons", "count": sum(others), "meaning": "", "transient": False})
    return [{**row, "share": row["count"] / max(1, manifest.attempted)} for row in rows]


def _bars(values: list[int], edges: np.ndarray) -> list[dict[str, Any]]:
    """One bar per bin between the first and the last that is not empty; `height` is relative to the tallest."""
    counts = np.histogram(values, edges)[0]
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
