"""Publishing a shard of a download, and comparing what is published with what was recorded.

Every command that changes a download begins with `recover`.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import Folder, ShardRecord, write_meta_to
from data_prep.dataset.swap import Swap, discard, finish
from data_prep.settings.source_config import HASH_KINDS
from pipeline.data.shards.shard_index import write_index
from pipeline.errors import UserError
from pipeline.files import sha256_of

STORED_HASH = "stored_sha256"
"""Column of the meta file: SHA-256 of the image as encoded for the tar."""
TRANSPARENT = "transparent"
"""Column of the meta file: whether the served image had pixels that are not opaque."""
_INT32 = ("width", "height", "original_width", "original_height")
_TEXTS = ("url", "caption", "uid", "key", "status", "reason", "error", STORED_HASH, *HASH_KINDS)
# Columns that are not stored in a sample's JSON.
_NOT_IN_JSON = ("row", "status", "reason", "error", STORED_HASH, TRANSPARENT)


def publish(
    folder: Folder, record: ShardRecord, members: Iterable[tuple[str, bytes]], rows: list[dict[str, Any]]
) -> ShardRecord:
    """Publish one shard: the tar's members, sorted by name, and the meta file's rows, in order.

    Tar, meta file and record change together, see `swap`.

    Returns:
        The record as written, with sizes and digests of the files.

    Raises:
        UserError: The members do not match the rows. Nothing was changed.
    """
    shard, size, digest = record.shard, 0, ""
    with Swap(folder.root, folder.commit(shard)) as swap:
        if record.samples:
            checked = _checked(folder, shard, members, rows)
            size, digest = canonical_tar.write_to(swap.new(folder.tar(shard)), checked)
        else:
            swap.delete(folder.tar(shard))
        meta_digest = _write_meta(swap.new(folder.meta(shard)), rows)
        record = replace(record, bytes=size, sha256=digest, meta_sha256=meta_digest)
        swap.new(folder.record(shard)).write_text(record.text(), encoding="utf-8")
        swap.commit()
    if record.samples:
        write_index(folder.root, folder.tar(shard), sha256=digest)
    return record


def recover(folder: Folder, shards: Iterable[int]) -> None:
    """Finish committed changes to these shards, and remove uncommitted ones. The caller must hold the lock."""
    wanted = set(shards)
    for shard in wanted.intersection(folder.numbered(".commit")):
        try:
            finish(folder.root, folder.commit(shard))
        except UserError:  # damaged: the older record, if any, remains in effect
            folder.commit(shard).unlink()
    discard(path for shard in wanted for path in (*folder.files(shard), folder.commit(shard)))


def _checked(
    folder: Folder, shard: int, members: Iterable[tuple[str, bytes]], rows: list[dict[str, Any]]
) -> Iterator[tuple[str, bytes]]:
    """Pass on the members and compare them with the rows: keys, captions, and hashes of the images."""
    expected = iter([row for row in rows if row["status"] == "success"])
    row: dict[str, Any] = {"key": ""}
    try:
        for name, payload in members:
            key, _, suffix = name.partition(".")
            if key != row["key"]:
                row = next(expected, {"key": None})
            if key != row["key"]:
                raise ValueError(f"sample {key} has no row")
            problem = difference(row, suffix, payload)
            if problem:
                raise ValueError(f"sample {key}: {problem}")
            yield name, payload
        missing = next(expected, None)
        if missing is not None:
            raise ValueError(f"sample {missing['key']} is missing")
    except (ValueError, tarfile.TarError, EOFError, FileNotFoundError) as error:
        raise UserError(f"{folder.tar(shard)} differs from its record ({error}). {folder.repair_hint}") from error


def difference(row: Mapping[str, Any], suffix: str, payload: bytes) -> str:
    """How one part of a sample differs from what its row in the meta file says; empty if they agree."""
    if suffix == "txt":
        return "" if payload == str(row["caption"]).encode() else "the caption differs from the stored one"
    if suffix == "json":
        return _different_facts(row, payload)
    return (
        "" if hashlib.sha256(payload).hexdigest() == row.get(STORED_HASH) else "the image differs from the stored one"
    )


def facts_text(row: Mapping[str, Any]) -> str:
    """A sample's JSON, from its row in the meta file."""
    facts = {name: value for name, value in row.items() if value is not None and name not in _NOT_IN_JSON}
    return json.dumps(facts, ensure_ascii=False, sort_keys=True, default=str)


def _different_facts(row: Mapping[str, Any], payload: bytes) -> str:
    """How a sample's JSON differs from its row."""
    if payload == facts_text(row).encode():
        return ""
    try:
        facts, wanted = json.loads(payload), json.loads(facts_text(row))
        different = sorted(name for name in {*facts, *wanted} if repr(facts.get(name)) != repr(wanted.get(name)))
    except (ValueError, TypeError):
        return "the facts cannot be read"
    # Dates and other values that JSON does not have are written as text, which parquet may have changed in form.
    different = [name for name in different if not _is_no_json(row.get(name))]
    return f"{', '.join(different)} in the JSON differ from the meta file" if different else ""


def _is_no_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return True
    return False


def _write_meta(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write a meta file.

    Returns:
        The SHA-256 of the file.
    """
    known: dict[str, Any] = {"row": pa.int64(), **dict.fromkeys(_TEXTS, pa.string())}
    known |= {**dict.fromkeys(_INT32, pa.int32()), TRANSPARENT: pa.bool_()}
    present = {name for row in rows for name in row}
    # In a fixed order, so that a retry gives the same bytes as a run that needed none.
    names = [*(name for name in known if name in present), *sorted(present - set(known))]
    columns = {name: pa.array([row.get(name) for row in rows], known.get(name)) for name in names}
    write_meta_to(path, pa.table(columns))
    return sha256_of(path)
