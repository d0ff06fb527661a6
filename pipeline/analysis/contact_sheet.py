"""Pairs with their scores on one HTML page, to look at before the worst are removed."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pipeline.analysis.pair_scores import by_score, read_scores, share_of
from pipeline.data.shards.manifest_format import Manifest
from pipeline.data.shards.rgb_image import rgb_image, thumbnail_url
from pipeline.data.shards.storage import open_records
from pipeline.data.shards.tar_reader import CaptionField, CorruptSample
from pipeline.files import write_text
from pipeline.report.page import render

SIDE, SHOWN = 192, 48
"""Most pixels of a thumbnail from top to bottom; number of the worst pairs, and half as many of the others."""


def write_contact_sheet(path: Path, table: Path, manifest: Manifest, *, caption: CaptionField, share: float) -> None:
    """Write a page with the worst pairs, those on both sides of the cut, and for comparison the best.

    Args:
        path: The page.
        table: Scores of the dataset, `scores.parquet`.
        manifest: The dataset.
        caption: Where captions are.
        share: Of the pairs, the worst of which may be removed; where the cut is.
    """
    rows = read_scores(table, columns=["shard", "row", "key", "score", "cosine"])
    order = by_score(rows)
    cut, half = share_of(len(order), share), SHOWN // 2
    parts = {
        "The worst pairs": order[: min(SHOWN, cut)],
        f"Just below the cut at {share:.0%}: the last that would be removed": order[max(SHOWN, cut - half) : cut],
        f"Just above the cut at {share:.0%}: the first that would be kept": order[cut : cut + half],
        "The best pairs, for comparison": order[max(cut + half, len(order) - half) :][::-1],
    }
    chosen = {int(index) for part in parts.values() for index in part}
    picked = {index: rows.slice(index, 1).to_pylist()[0] for index in sorted(chosen)}
    pairs = _read(manifest, {(row["shard"], row["row"]) for row in picked.values()}, caption)
    facts = {
        "title": f"Scores of {Path(manifest.root).resolve().name}",
        "count": len(order),
        "parts": {title: [_sample(picked[int(k)], pairs) for k in part] for title, part in parts.items() if len(part)},
    }
    write_text(path, render("contact_sheet.html", facts))


def _read(
    manifest: Manifest, wanted: Collection[tuple[str, int]], caption: CaptionField
) -> dict[tuple[str, int], tuple[str, str]]:
    """The thumbnail, as a data URL, and the caption of samples, by shard and row."""
    pairs: dict[tuple[str, int], tuple[str, str]] = {}
    last = dict(sorted(wanted))  # the last wanted row of each shard
    for shard in (shard for shard in manifest.shards if shard.name in last):
        with open_records(manifest.url(shard), skip=0, caption_suffix=caption.suffix) as records:
            for row, record in enumerate(itertools.islice(records, last[shard.name] + 1)):
                if (shard.name, row) in wanted:
                    pairs[shard.name, row] = _thumbnail(record.image or b""), caption.read(record)
    return pairs


def _thumbnail(body: bytes) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = rgb_image(body)
    except CorruptSample:  # it has a score, so it was readable a moment ago
        return ""
    return thumbnail_url(image, (2 * SIDE, SIDE))


def _sample(row: dict[str, Any], pairs: dict[tuple[str, int], tuple[str, str]]) -> dict[str, str]:
    source, caption = pairs.get((row["shard"], row["row"]), ("", ""))
    numbers = f"score {row['score']:.2f}, cosine {row['cosine']:.3f}"
    return {"source": source, "caption": caption, "numbers": numbers, "name": f"{row['shard']}:{row['key']}"}
