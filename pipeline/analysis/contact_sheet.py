"""Pairs with their scores on one HTML page, to look at before the worst are removed."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection
from html import escape
from pathlib import Path
from typing import Any

from pipeline.analysis.pair_scores import by_score, read_scores, share_of
from pipeline.data.shards.manifest_format import Manifest
from pipeline.data.shards.rgb_image import rgb_image, thumbnail_url
from pipeline.data.shards.storage import open_records
from pipeline.data.shards.tar_reader import CaptionField, CorruptSample
from pipeline.files import write_text

SIDE, SHOWN = 192, 48
"""Most pixels of a thumbnail from top to bottom; number of the worst pairs, and half as many of the others."""
_STYLE = """
:root { color-scheme: light dark; --muted: #5c6169; --line: #d9dce1 }
@media (prefers-color-scheme: dark) { :root { --muted: #a2a8b1; --line: #3a4049 } }
body { font: 16px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 76rem; padding: 1rem }
.pairs { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)) }
figure { border: 1px solid var(--line); border-radius: 6px; margin: 0; overflow: hidden }
figure div { align-items: center; background: #8881; display: flex; height: 10rem; justify-content: center }
img { max-height: 100%; max-width: 100%; object-fit: contain }
figcaption { overflow-wrap: anywhere; padding: .5rem }
small, .note { color: var(--muted) } small { display: block; font-variant-numeric: tabular-nums }
"""


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
    body = [f"<p class=note>{len(order):,} pairs have a score. A score is how much better a pair fits than chance."]
    for title, part in ((title, part) for title, part in parts.items() if len(part)):
        figures = (_figure(picked[int(index)], pairs) for index in part)
        body.append(f"<h2>{escape(title)}</h2><div class=pairs>{''.join(figures)}</div>")
    title = f"Scores of {escape(Path(manifest.root).resolve().name)}"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    page = f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head>"
    write_text(path, f"{page}<body><h1>{title}</h1>{''.join(body)}</body></html>\n")


def _read(
    manifest: Manifest, wanted: Collection[tuple[str, int]], caption: CaptionField
) -> dict[tuple[str, int], tuple[str, str]]:
    """The thumbnail, as a data URL, and the caption of samples, by shard and row."""
    found: dict[tuple[str, int], tuple[str, str]] = {}
    last = dict(sorted(wanted))  # the last wanted row of each shard
    for shard in (shard for shard in manifest.shards if shard.name in last):
        with open_records(manifest.url(shard), skip=0, caption_suffix=caption.suffix) as records:
            for row, record in enumerate(itertools.islice(records, last[shard.name] + 1)):
                if (shard.name, row) in wanted:
                    found[shard.name, row] = _thumbnail(record.image or b""), caption.read(record)
    return found


def _thumbnail(body: bytes) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = rgb_image(body)
    except CorruptSample:  # it has a score, so it was readable a moment ago
        return ""
    return thumbnail_url(image, (2 * SIDE, SIDE))


def _figure(row: dict[str, Any], pairs: dict[tuple[str, int], tuple[str, str]]) -> str:
    source, caption = pairs.get((row["shard"], row["row"]), ("", ""))
    numbers = f"score {row['score']:.2f}, cosine {row['cosine']:.3f}"
    name = f"{row['shard']}:{row['key']}"
    return (
        f'<figure><div><img src="{source}" alt="{escape(caption, quote=True)}"></div>'
        f"<figcaption>{escape(caption)}<small>{numbers}</small><small>{escape(name)}</small></figcaption></figure>"
    )
