"""Take samples out of a finished data set, for good: opt-outs, duplicates, overlap with evaluation sets."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_prep import reasons
from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import Folder, load_config
from data_prep.dataset.manifest_writer import write_manifest
from data_prep.dataset.shard_plan import load_plan
from data_prep.settings.source_config import HASH_KINDS
from pipeline.data.shards.manifest_format import Manifest
from pipeline.files import replacing, write_text

_NAMES = ("uid", "url", "key", *HASH_KINDS)


@dataclass(frozen=True)
class Removal:
    """What a removal did: names asked for, names found, samples taken out, shards rewritten."""

    asked: int
    found: int
    samples: int
    shards: int


def remove(root: str | Path, names: set[str]) -> tuple[Removal, Manifest]:
    """Take out every sample whose uid, URL, hash or key is in `names`; shards without any are not touched.

    The names are kept in `removed.txt`, so that no later resume, retry or rebuild brings the samples back. Safe to
    repeat after a kill. Returns: what was done, and the new manifest. Raises: UserError when nothing would be left.
    """
    folder = Folder(Path(root))
    config = load_config(folder.root)
    _remember(folder, names)
    found: set[str] = set()
    samples = touched = 0
    for shard in folder.finished():
        hit = _hits(folder, shard, names, found)
        if hit:
            _rewrite(folder, shard, hit)
            samples, touched = samples + len(hit), touched + 1
    manifest = write_manifest(config, folder, load_plan(folder))
    return Removal(len(names), len(found), samples, touched), manifest


def _remember(folder: Folder, names: set[str]) -> None:
    lines = sorted(folder.removed_names() | names)
    write_text(folder.removed, "".join(f"{line}\n" for line in lines))


def _hits(folder: Folder, shard: int, names: set[str], found: set[str]) -> set[int]:
    """Rows of a shard to take out; `found` collects the names that any row of the list has."""
    import pyarrow.parquet as pq

    path = folder.meta(shard)
    present = [name for name in _NAMES if name in pq.read_schema(path).names]
    hit = set()
    for row in pq.read_table(path, columns=["row", "status", *present]).to_pylist():
        matching = {row[name] for name in present} & names
        found |= matching
        if matching and row["status"] == "success":
            hit.add(row["row"])
    return hit


def _rewrite(folder: Folder, shard: int, hit: set[int]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    record = folder.read_record(shard)
    left = record.samples - len(hit)
    path = folder.tar(shard)
    members = (
        (f"{key}.{suffix}", parts[suffix])
        for key, parts in canonical_tar.samples(path)
        if int(key) not in hit
        for suffix in sorted(parts)
    )
    # Without a record the shard counts as unfinished: a kill from here on means that it is fetched again.
    folder.record(shard).unlink()
    size, digest = canonical_tar.write(path, members)
    if not left:
        path.unlink()
        size, digest = 0, ""
    table = pq.read_table(folder.meta(shard))
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        if row["row"] in hit:
            row.update(status="failed", reason=reasons.REMOVED)
    with replacing(folder.meta(shard), unique=False) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), temporary, compression="zstd")
    failures = Counter(record.failures) + Counter({reasons.REMOVED: len(hit)})
    folder.write_record(replace(record, samples=left, bytes=size, sha256=digest, failures=failures))
