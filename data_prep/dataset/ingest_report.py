"""The page of a data set: one HTML file for people. Of the shards, the first samples of some are read."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dataset.dataset_folder import REPORT_NAME, Folder
from data_prep.dataset.duplicates import near_duplicates, signature
from data_prep.reasons import is_transient, meaning_of
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
from pipeline.pictures.pixels import open_image
from pipeline.report.page import render

TEMPLATES = Path(__file__).parent / "templates"
_PICTURES = 18
_REASONS = 40
"""Reasons that are listed one by one."""
_READ, _SHARDS_READ = 5_000, 32
"""Samples that are read, of so many shards."""
_SIDES = np.array([0, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 1 << 31])
_WORDS = np.array([0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 1 << 31])
_COUNTS = {
    "distinct_captions": "Distinct captions",
    "long_captions": "Captions of more than 77 tokens",
    "transparent": "Images with transparency",
    "single_colour": "Images of a single colour",
}
"""Counts in a manifest that may be other than the user expects."""


def write_report(
    root: str | Path,
    *,
    output: str | Path | None = None,
    caption: CaptionField | None = None,
    allow_outside: bool = False,
) -> Path:
    """Write the page of a data set with a manifest into the folder `output`, by default its own; returns its path.

    `caption` says where captions are, by default in `.txt`; `allow_outside` is that of `load_manifest`.

    Raises:
        UserError: There is no manifest, or a file of the data set is missing or damaged.
    """
    folder = Folder(Path(root))
    manifest = load_manifest(folder.root, allow_outside=allow_outside)
    census = take_census(manifest, caption or CaptionField())
    counts = manifest.facts.get("counts", {})
    facts = {
        "title": folder.root.absolute().name,
        "is_download": folder.is_download,
        "manifest": manifest,
        "facts": manifest.facts,
        "counts": [(counts[name], words) for name, words in _COUNTS.items() if counts.get(name)],
        "reasons": _reasons(manifest, is_download=folder.is_download),
        "census": census,
        "sides": _bars(census.sides, _SIDES),
        "words": _bars(census.words, _WORDS),
        "problems": census.problems.most_common(_REASONS),
        "removed": len(folder.removed_names()),
    }
    place = Path(output or folder.root)
    return write_text(place / REPORT_NAME, render(f"{REPORT_NAME}.j2", facts, folder=TEMPLATES), durable=True)


@dataclass
class Census:
    """The samples that were read, of some shards."""

    shards_read: int
    samples_read: int = 0
    sides: list[int] = field(default_factory=list)
    """Shorter sides in pixels, of samples that can be used."""
    words: list[int] = field(default_factory=list)
    """Numbers of words of their captions."""
    problems: Counter[str] = field(default_factory=Counter)
    """Samples that training cannot use, by reason."""
    near: int = 0
    """Near duplicates of earlier samples."""
    pictures: list[dict[str, str]] = field(default_factory=list)
    """Thumbnails as data URLs, and captions, of samples that are spread over those that were read."""


def take_census(manifest: Manifest, caption: CaptionField) -> Census:
    """Read the first samples of shards that are spread over the data set; `caption` says where their captions are.

    Raises:
        UserError: A shard is missing or damaged.
    """
    count = min(_SHARDS_READ, len(manifest.shards))
    each = -(-_READ // count)
    shards = [manifest.shards[len(manifest.shards) * k // count] for k in range(count)]
    planned = sum(min(each, shard.samples) for shard in shards)
    census, signatures = Census(count), list[tuple[int, bytes]]()
    for record in itertools.chain.from_iterable(_first_records(manifest.url(s), caption, each) for s in shards):
        census.samples_read += 1
        try:
            if record.problem or not record.image:
                raise CorruptSample(record.problem or "image is missing")
            with counted_errors(), open_image(record.image) as image:
                side = min(image.size)
            text = caption.read(record)
            signatures.append(signature(record.image))
        except CorruptSample as problem:
            census.problems[str(problem)] += 1
            continue
        census.sides.append(side)
        census.words.append(len(text.split()))
        if len(census.pictures) * planned < census.samples_read * min(_PICTURES, planned):
            source = thumbnail_url(rgb_image(record.image), (192, 192))
            census.pictures.append({"source": source, "caption": text})
    census.near = len(near_duplicates(signatures))
    return census


def _first_records(url: str, caption: CaptionField, wanted: int) -> Iterator[TarRecord]:
    try:
        with open_records(url, caption_suffix=caption.suffix) as records:
            yield from itertools.islice(records, wanted)
    except (OSError, DamagedTar) as error:
        raise UserError(f"{url} is missing or damaged ({error}): `neuclip verify` finds all damage.") from error


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
