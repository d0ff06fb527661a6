"""Publishing a shard: its tar, meta file and record change together, even if the program is killed.

1. The tar and the meta file are written beside the published ones, as `.new`, and flushed to the disk.
2. The new record is written as `meta/00000.commit`, in one step. From then on the new shard is valid.
3. Tar, meta file and record are renamed to their final names.

Before step 2 the published shard is unchanged; after it, `recover` finishes step 3, which can fail only in a rename.
Every command that changes a folder begins with `recover`.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import Folder, ShardRecord, record_of
from data_prep.settings.source_config import HASH_KINDS
from pipeline.errors import UserError
from pipeline.files import flush, replacing, sha256_of, write_text

STORED_HASH = "stored_sha256"
"""Column of the meta file: SHA-256 of the image as encoded for the tar."""
_INT32 = ("width", "height", "original_width", "original_height")
_TEXTS = ("url", "caption", "uid", "key", "status", "reason", "error", STORED_HASH, *HASH_KINDS)
# Columns that are not stored in a sample's JSON.
_NOT_IN_JSON = ("row", "status", "reason", "error", STORED_HASH)


def publish(
    folder: Folder, record: ShardRecord, members: Iterable[tuple[str, bytes]], rows: list[dict[str, Any]]
) -> ShardRecord:
    """Publish one shard: the tar's members, sorted by name, and the meta file's rows, in order.

    Returns:
        The record as written, with sizes and digests of the files.

    Raises:
        UserError: The members do not match the rows. Nothing was changed.
    """
    tar, meta = folder.staged_tar(record.shard), folder.staged_meta(record.shard)
    tar.unlink(missing_ok=True)
    size, digest = 0, ""
    if record.samples:
        size, digest = canonical_tar.write(tar, _checked(folder, record.shard, members, rows))
    meta_digest = _write_meta(folder, record.shard, rows)
    record = replace(record, bytes=size, sha256=digest, meta_sha256=meta_digest)
    # The names of both must be on the disk before the commit refers to them.
    flush(tar.parent)
    flush(meta.parent)
    write_text(folder.commit(record.shard), record.text(), durable=True)
    flush(meta.parent)  # else a power failure could keep the renames that follow, and lose this one
    _finish(folder, record.shard)
    return record


def recover(folder: Folder, shards: Iterable[int]) -> list[int]:
    """Finish committed changes to these shards, and remove uncommitted ones. The caller must hold the lock.

    Returns:
        The shards whose commit was finished.
    """
    wanted = set(shards)
    found = sorted(wanted.intersection(folder.numbered(".commit")))
    committed = [shard for shard in found if _is_whole(folder, shard)]
    for shard in found:
        if shard in committed:
            _finish(folder, shard)
        else:  # the older record, if any, remains in effect, and `neuclip verify` reports what does not agree with it
            folder.commit(shard).unlink()
    for pattern in ("shards/*.tar.new", "meta/*.parquet.new", "meta/.*.tmp", "shards/.*.tmp"):
        for path in folder.root.glob(pattern):
            number = path.name.lstrip(".").partition(".")[0]
            if number.isdecimal() and int(number) in wanted:
                path.unlink(missing_ok=True)
    return committed


def _is_whole(folder: Folder, shard: int) -> bool:
    """Whether a commit is readable and its files exist, staged or renamed."""
    try:
        record = record_of(folder.commit(shard).read_bytes())
    except ValueError:
        return False
    files = (
        (folder.staged_tar(shard), folder.tar(shard), record.sha256),
        (folder.staged_meta(shard), folder.meta(shard), record.meta_sha256),
    )
    return all(
        not digest or staged.exists() or (published.is_file() and sha256_of(published) == digest)
        for staged, published, digest in files
    )


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
    if not row.get(STORED_HASH):  # recorded since 0.2
        return ""
    return "" if hashlib.sha256(payload).hexdigest() == row[STORED_HASH] else "the image differs from the stored one"


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


def _finish(folder: Folder, shard: int) -> None:
    """Step 3, which can be repeated after a kill at any point."""
    commit = folder.commit(shard)
    record = json.loads(commit.read_text(encoding="utf-8"))
    if not record["samples"]:
        folder.tar(shard).unlink(missing_ok=True)
    elif folder.staged_tar(shard).exists():
        folder.staged_tar(shard).replace(folder.tar(shard))
    if folder.staged_meta(shard).exists():
        folder.staged_meta(shard).replace(folder.meta(shard))
    flush(folder.tar(shard).parent)
    flush(commit.parent)
    commit.replace(folder.record(shard))
    flush(commit.parent)


def _write_meta(folder: Folder, shard: int, rows: list[dict[str, Any]]) -> str:
    """Write the staged meta file.

    Returns:
        The SHA-256 of the file.
    """
    known = {"row": pa.int64(), **dict.fromkeys(_TEXTS, pa.string()), **dict.fromkeys(_INT32, pa.int32())}
    present = {name for row in rows for name in row}
    # In a fixed order, so that a retry gives the same bytes as a run that needed none.
    names = [*(name for name in known if name in present), *sorted(present - set(known))]
    columns = {name: pa.array([row.get(name) for row in rows], known.get(name)) for name in names}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, compression="zstd", write_page_checksum=True)
    body = sink.getvalue()
    with replacing(folder.staged_meta(shard), unique=False, durable=True) as path:
        path.write_bytes(body)
    return hashlib.sha256(body).hexdigest()
