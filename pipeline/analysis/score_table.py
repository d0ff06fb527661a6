"""The table of `neuclip score`: one row per pair, the names of the worst pairs, and a page to look at them first."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.shards.manifest_format import Manifest
from pipeline.data.shards.storage import open_records
from pipeline.data.shards.tar_reader import CaptionField, CorruptSample, rgb_image, thumbnail_url
from pipeline.errors import UserError
from pipeline.files import replacing, write_json, write_text
from pipeline.report.page import render

TABLE_NAME, FACTS_NAME = "scores.parquet", "scores.json"
SCHEMA = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("shard", pa.dictionary(pa.int32(), pa.string())),
        ("row", pa.int32()),
        ("key", pa.string()),
        ("uid", pa.string()),
        ("cosine", pa.float32()),
        ("log_normalizer_image", pa.float32()),
        ("log_normalizer_text", pa.float32()),
        ("score", pa.float32()),
        ("problem", pa.string()),
        ("transparent", pa.bool_()),
        ("single_colour", pa.bool_()),
    ]
)
SIDE, SHOWN = 192, 48
"""Most pixels of a thumbnail from top to bottom; number of the worst pairs, and half as many of the others."""


def part_of(output: Path, shard: int) -> Path:
    """The table of one shard."""
    return output / "parts" / f"{shard:06d}.parquet"


def join_parts(manifest: Manifest, output: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Write `scores.parquet` from the tables of all shards, and the counts, which are returned, to `scores.json`.

    Raises:
        UserError: Tables are missing.
    """
    paths = [part_of(output, index) for index in range(len(manifest.shards))]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise UserError(f"{len(missing)} tables are missing in {output / 'parts'} ({missing[0]}, ...): run it again.")
    problems, flags = Counter[str](), Counter(transparent=0, single_colour=0)
    with (
        replacing(output / TABLE_NAME) as temporary,
        pq.ParquetWriter(temporary, SCHEMA, write_page_checksum=True) as writer,
    ):
        for path in paths:
            table = read_scores(path, schema=SCHEMA)
            problems.update(table["problem"].drop_null().to_pylist())
            flags.update({name: table[name].to_pylist().count(True) for name in flags})
            writer.write_table(table)
    counts = {"pairs": manifest.n, "scored": manifest.n - problems.total(), "problems": dict(problems), **flags}
    write_json(output / FACTS_NAME, {"facts": facts, **counts})
    return counts


def read_scores(path: Path, **options: Any) -> pa.Table:
    """A table of scores, or some of its columns.

    Raises:
        UserError: It is damaged.
    """
    try:
        return pq.read_table(path, page_checksum_verification=True, **options)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is damaged ({error}): delete it, and run the same command again.") from error


def worst_keys(table: Path, share: float) -> list[str]:
    """Names of the pairs with the lowest scores, worst first; pairs that could not be scored are not among them.

    A name is the sample's key, or SHARD:KEY in a dataset where several shards have the same keys.
    """
    columns = read_scores(table, columns=["shard", "key", "score"])
    order = by_score(columns)
    keys, shards = columns["key"].to_pylist(), columns["shard"].to_pylist()
    known = [key for key in keys if key is not None]
    qualified = len(set(known)) < len(known)
    return [f"{shards[i]}:{keys[i]}" if qualified else keys[i] for i in order[: share_of(len(order), share)]]


def share_of(count: int, share: float) -> int:
    """`share` of a number of pairs, rounded down: 29 for 0.29 of 100, which is 28.999... in floating point."""
    return int(share * count + 1e-6)


def by_score(table: pa.Table) -> np.ndarray:
    """Rows of a table of scores in increasing order of the score, without those that have none."""
    score = table["score"].to_numpy(zero_copy_only=False)
    order = np.argsort(score, kind="stable")  # nan, of pairs without a score, comes last
    return order[: int(np.isfinite(score).sum())]


def write_contact_sheet(path: Path, table: Path, manifest: Manifest, *, caption: CaptionField, share: float) -> None:
    """Write a page with the worst pairs, those on both sides of the cut, and for comparison the best.

    `share` is that of the worst of the scored pairs in `table`, which may be removed: where the cut is.
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
    shown = {title: rows.take(part).to_pylist() for title, part in parts.items() if len(part)}
    wanted: dict[str, dict[int, list[dict[str, Any]]]] = {}  # by shard and row
    for row in itertools.chain.from_iterable(shown.values()):
        row["numbers"] = f"score {row['score']:.2f}, cosine {row['cosine']:.3f}"
        row |= {"source": "", "caption": "", "name": f"{row['shard']}:{row['key']}"}
        wanted.setdefault(row["shard"], {}).setdefault(row["row"], []).append(row)
    for shard in (shard for shard in manifest.shards if shard.name in wanted):
        here = wanted[shard.name]
        with open_records(manifest.url(shard), skip=0, caption_suffix=caption.suffix) as records:
            for number, record in enumerate(itertools.islice(records, max(here) + 1)):
                for row in here.get(number, ()):
                    with suppress(CorruptSample):  # it has a score, so it was readable a moment ago
                        row["source"] = thumbnail_url(rgb_image(record.image or b""), (2 * SIDE, SIDE))
                    row["caption"] = caption.read(record)
    title = f"Scores of {Path(manifest.root).resolve().name}"
    write_text(path, render("contact_sheet.html", {"title": title, "count": len(order), "parts": shown}))
