"""The files of a shard (tar, meta file, record), which are written together, and what they say of one row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep import reasons
from data_prep.dataset.commit import Commit
from data_prep.dataset.dataset_folder import Folder, ShardRecord, key_of, read_meta
from data_prep.download_config import HASH_KINDS
from pipeline.data.shards.storage import save_index, scan_members
from pipeline.errors import UserError
from pipeline.files import sha256_of

STORED_HASH = "stored_sha256"
"""Column of the meta file: SHA-256 of the image as encoded for the tar."""
TRANSPARENT = "transparent"
"""Column of the meta file: whether the served image had pixels that are not opaque."""
_TEXTS = ("url", "caption", "uid", "key", "status", "reason", "error", STORED_HASH, *HASH_KINDS)
_INT32 = ("width", "height", "original_width", "original_height")
_COLUMNS = {"row": pa.int64(), **dict.fromkeys(_TEXTS, pa.string()), **dict.fromkeys(_INT32, pa.int32()),
            TRANSPARENT: pa.bool_()}  # fmt: skip
_NOT_IN_JSON = ("row", "status", "reason", "error", STORED_HASH, TRANSPARENT)


def stage(commit: Commit, folder: Folder, record: ShardRecord, meta: pa.Table) -> ShardRecord:
    """Add a shard to a commit, for which the caller has written the new tar; one without samples gets no tar.

    Returns:
        The record as written, with sizes and digests of the files.
    """
    path = folder.tar(record.shard)
    record = replace(record, bytes=0, sha256="")
    if record.samples:
        tar = commit.new(path)
        record = replace(record, bytes=tar.stat().st_size, sha256=sha256_of(tar))
        save_index(folder.root, scan_members(tar), sha256=record.sha256)
    else:
        commit.delete(path)
    new = commit.new(folder.meta(record.shard))
    pq.write_table(meta, new, compression="zstd", write_page_checksum=True)
    record = replace(record, meta_sha256=sha256_of(new))
    commit.new(folder.record(record.shard)).write_text(record.text(), encoding="utf-8")
    return record


def withdraw(folder: Folder, shard: int) -> None:
    """Delete a shard, so that it is made again.

    Raises:
        UserError: There is a folder in the place of a file.
    """
    if folders := [path for path in folder.files(shard) if path.is_dir()]:
        raise UserError(f"{folders[0]} is a folder in the place of a file: move it away by hand.")
    with Commit(folder.root, folder.commit(shard)) as commit:
        for path in folder.files(shard):
            commit.delete(path)
        commit.finish()


def check_tar(folder: Folder, path: Path, sha256: str) -> None:
    """Check a tar before its samples are copied.

    Raises:
        UserError: It is missing or another.
    """
    if not (path.is_file() and sha256_of(path) == sha256):
        raise UserError(
            f"{path} is missing or differs from its record or the manifest; nothing was changed. {folder.repair_hint}"
        )


def failed_row(row: Mapping[str, Any], reason: str, error: str | None = None) -> dict[str, Any]:
    """The row of the meta file for a row of the plan that gave no sample."""
    return {**row, "key": key_of(row["row"]), "status": "failed", "reason": reason, "error": error}


def settled_rows(folder: Folder, shard: int) -> dict[int, dict[str, Any]]:
    """Rows that a retry does not request again: samples and permanent failures.

    Raises:
        UserError: A file of the shard is damaged.
    """
    record = folder.read_record(shard)
    if record.samples:
        check_tar(folder, folder.tar(shard), record.sha256)
    rows = {row["row"]: row for row in read_meta(folder, shard).to_pylist()}
    return {number: row for number, row in rows.items() if not (row["reason"] and reasons.is_transient(row["reason"]))}


def difference(row: Mapping[str, Any], suffix: str, payload: bytes) -> str:
    """How one part of a sample differs from what its row in the meta file says; empty if they agree."""
    if suffix == "txt":
        return "" if payload == str(row["caption"]).encode() else "the caption differs from the stored one"
    if suffix != "json":
        is_same = hashlib.sha256(payload).hexdigest() == row.get(STORED_HASH)
        return "" if is_same else "the image differs from the stored one"
    try:
        facts = json.loads(payload)
        wrong = [name for name in _COLUMNS if name not in _NOT_IN_JSON and facts.get(name) != row.get(name)]
    except (ValueError, AttributeError, RecursionError):
        return "the JSON cannot be read"
    return f"{', '.join(wrong)} in the JSON differ from the meta file" if wrong else ""


def facts_text(row: Mapping[str, Any]) -> str:
    """A sample's JSON, from its row in the meta file."""
    facts = {name: value for name, value in row.items() if value is not None and name not in _NOT_IN_JSON}
    return json.dumps(facts, ensure_ascii=False, sort_keys=True, default=str)


def meta_table(rows: list[dict[str, Any]]) -> pa.Table:
    """The table of a download's meta file."""
    present = {name for row in rows for name in row}
    # In a fixed order, so that a retry gives the same bytes as a run that needed none.
    names = [*(name for name in _COLUMNS if name in present), *sorted(present - _COLUMNS.keys())]
    return pa.table({name: pa.array([row.get(name) for row in rows], _COLUMNS.get(name)) for name in names})
