"""What is kept of a published shard when it is written again, and how it is compared with what was recorded.

A tar with its recorded SHA-256 is copied as it is. Of a damaged one, `neuclip verify --rebuild` keeps the images that
have the SHA-256 recorded in the meta file; captions and JSON are then written from its rows, so that nothing
unverified is copied. Other commands refuse a damaged tar.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from data_prep import reasons
from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import Folder, ShardRecord, key_of, read_meta, tar_name
from data_prep.dataset.manifest_writer import has_rules
from data_prep.dataset.shard_commit import STORED_HASH, difference, facts_text
from data_prep.dataset.shard_plan import Plan
from data_prep.settings.source_config import HASH_KINDS
from pipeline.data.shards.manifest_format import MANIFEST_NAME
from pipeline.errors import UserError
from pipeline.files import sha256_of

Rows = dict[int, dict[str, Any]]


def settled_rows(folder: Folder, shard: int) -> Rows:
    """Rows that a retry does not request again: samples and permanent failures.

    Raises:
        UserError: A file of the shard is damaged.
    """
    check_shard(folder, shard)
    rows = {row["row"]: row for row in read_meta(folder, shard).to_pylist()}
    return {number: row for number, row in rows.items() if not (row["reason"] and reasons.is_transient(row["reason"]))}


def check_shard(folder: Folder, shard: int) -> None:
    """Compare a published tar, captions and JSON included, and its meta file with the SHA-256 in the record.

    Raises:
        UserError: One of them is missing or differs.
    """
    record = folder.read_record(shard)
    if record.samples and sha256_of_tar(folder, shard) != record.sha256:
        raise UserError(f"{folder.tar(shard)} is missing or differs from its record. {folder.repair_hint}")
    check_meta(folder, shard)


def check_meta(folder: Folder, shard: int) -> None:
    """Compare a meta file, whose missing is found when it is read, with the SHA-256 in the record.

    Raises:
        UserError: It differs: another shard's, for instance.
    """
    digest, meta = folder.read_record(shard).meta_sha256, folder.meta(shard)
    if digest and meta.is_file() and sha256_of(meta) != digest:
        raise UserError(f"{meta} is missing or differs from its record. {folder.repair_hint}")


def check_converted(folder: Folder, name: str, keys: Set[str]) -> None:
    """Check record and meta file of the shard with this name in the manifest, which has samples with these keys.

    Only shards that `neuclip pairs` made have such files; others pass.

    Raises:
        UserError: One of them is damaged or another shard's.
    """
    number = int(stem) if (stem := Path(name).stem).isdecimal() else 0
    if tar_name(number) != name or not folder.record(number).exists():
        return
    rows = read_meta(folder, number, ["key", "status"]).to_pylist()
    samples = {row["key"] for row in rows if row["status"] == "success"}
    if folder.read_record(number).samples != len(samples) or not keys <= samples:
        raise UserError(f"{folder.meta(number)} is another shard's. {folder.repair_hint}")


def intact_rows(folder: Folder, plan: Plan, shard: int, planned: Mapping[int, Mapping[str, Any]]) -> Rows:
    """Rows that a rebuild does not request again: failures, and samples whose image is intact.

    Without a readable meta file, samples are intact if the tar matches the record or the manifest. Nothing is kept of a
    shard that was made with other settings. `planned` has the plan's rows by number.
    """
    record = _readable_record(folder, shard)
    if record and not has_rules(record, plan.rules) and sha256_of_tar(folder, shard) not in _listed(folder, shard):
        return {}
    rows = _readable_meta(folder, shard, planned)
    if rows is None:
        return _from_tar(folder, shard, planned) if _is_vouched_for(folder, shard) else {}
    samples = {number: row for number, row in rows.items() if not row["reason"]}
    found = {number for number, _ in published_samples(folder, shard, samples)}
    return {number: row for number, row in rows.items() if row["reason"] or number in found}


def published_samples(
    folder: Folder, shard: int, rows: Mapping[int, Mapping[str, Any]]
) -> Iterator[tuple[int, dict[str, bytes]]]:
    """`(row number, {extension: payload})` of the intact samples among `rows` of the meta file, in order."""
    path = folder.tar(shard)
    if not path.is_file():
        return
    found = canonical_tar.samples(path) if _is_vouched_for(folder, shard) else _intact_images(path, rows)
    for key, parts in found:
        row = rows.get(int(key)) if key.isdecimal() else None
        if row is None:
            continue
        images = {suffix: payload for suffix, payload in parts.items() if suffix not in ("json", "txt")}
        if len(parts) == 3 and len(images) == 1 and not any(difference(row, *part) for part in parts.items()):
            yield int(key), parts
            continue
        intact = [(suffix, payload) for suffix, payload in images.items() if not difference(row, suffix, payload)]
        if len(intact) == 1:
            yield int(key), {**dict(intact), "json": facts_text(row).encode(), "txt": row["caption"].encode()}


def _intact_images(path: Path, rows: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """`(key, {extension: payload})` of the images in a damaged tar that have their recorded SHA-256, ordered by key.

    The tar is read by blocks, so that images after a damaged header are found as well, and its samples may be in any
    order or repeated.
    """
    hashes = {key_of(number): row[STORED_HASH] for number, row in rows.items() if row.get(STORED_HASH)}
    found: dict[str, tuple[str, int, int]] = {}
    size = path.stat().st_size
    with path.open("rb") as file:
        while len(block := file.read(tarfile.BLOCKSIZE)) == tarfile.BLOCKSIZE:
            with contextlib.suppress(tarfile.HeaderError):
                info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
                key, _, suffix = info.name.partition(".")
                start = file.tell()
                is_wanted = key in hashes and key not in found and suffix not in ("json", "txt")
                if not is_wanted or not 0 <= info.size <= size - start:
                    continue
                if hashlib.sha256(file.read(info.size)).hexdigest() == hashes[key]:
                    found[key] = suffix, start, info.size
                    start += -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                file.seek(start)
        for key, (suffix, start, length) in sorted(found.items()):
            file.seek(start)
            yield key, {suffix: file.read(length)}


def _readable_meta(folder: Folder, shard: int, planned: Mapping[int, Mapping[str, Any]]) -> Rows | None:
    """The meta file's rows, if it is readable and belongs to this shard."""
    try:
        rows = {row["row"]: row for row in read_meta(folder, shard).to_pylist()}
        alike = set(rows) == set(planned) and all(rows[n]["url"] == planned[n]["url"] for n in rows)
    except (UserError, KeyError, UnicodeDecodeError):
        return None
    record = _readable_record(folder, shard)
    return rows if alike and (not record or record.meta_sha256 in ("", sha256_of(folder.meta(shard)))) else None


def _is_vouched_for(folder: Folder, shard: int) -> bool:
    """Whether the tar has the digest that its record, or else the manifest, states."""
    record = _readable_record(folder, shard)
    return sha256_of_tar(folder, shard) in {*([record.sha256] if record else []), *_listed(folder, shard)} - {""}


def sha256_of_tar(folder: Folder, shard: int) -> str:
    """The SHA-256 of a shard's tar; empty if there is none."""
    return sha256_of(folder.tar(shard)) if folder.tar(shard).is_file() else ""


def _readable_record(folder: Folder, shard: int) -> ShardRecord | None:
    with contextlib.suppress(UserError, FileNotFoundError):
        return folder.read_record(shard)
    return None


def _listed(folder: Folder, shard: int) -> set[str]:
    """The digest of a shard's tar according to a readable manifest."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        tree = json.loads((folder.root / MANIFEST_NAME).read_bytes())
        return {entry["sha256"] for entry in tree["shards"] if entry["name"] == tar_name(shard)}
    return set()


def _from_tar(folder: Folder, shard: int, planned: Mapping[int, Mapping[str, Any]]) -> Rows:
    """Rows of the meta file, restored from the samples themselves; samples of other rows are left out."""
    rows: Rows = {}
    for key, parts in canonical_tar.samples(folder.tar(shard)):
        with contextlib.suppress(ValueError, KeyError, TypeError, StopIteration):
            facts, plan = json.loads(parts["json"]), planned[int(key)]
            image = next(payload for suffix, payload in parts.items() if suffix not in ("txt", "json"))
            if (facts["url"], facts["key"]) != (plan["url"], key):
                continue
            sizes = {name: facts.get(name) for name in ("width", "height", "original_width", "original_height")}
            rows[int(key)] = {
                **plan,
                "key": key,
                "status": "success",
                "reason": None,
                "error": None,
                **sizes,
                **{name: facts[name] for name in HASH_KINDS if name in facts},
                STORED_HASH: hashlib.sha256(image).hexdigest(),
            }
    return rows
