"""Which parts of a published shard can be kept when some of its files are damaged."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_prep import reasons
from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import Folder, key_of, read_meta
from data_prep.dataset.shard_commit import STORED_HASH
from pipeline.data.shards.manifest_format import MANIFEST_NAME
from pipeline.errors import UserError
from pipeline.files import sha256_of

Rows = dict[int, dict[str, Any]]


def settled_rows(folder: Folder, shard: int) -> Rows:
    """Rows that a retry does not request again: samples and permanent failures.

    Raises:
        UserError: The meta file is damaged.
    """
    rows = {row["row"]: row for row in read_meta(folder, shard).to_pylist()}
    return {number: row for number, row in rows.items() if not (row["reason"] and reasons.is_transient(row["reason"]))}


def intact_rows(folder: Folder, shard: int, planned: Mapping[int, Mapping[str, Any]]) -> Rows:
    """Rows that a rebuild does not request again: failures, and samples whose image and caption are intact.

    Without a readable meta file, samples are intact if the tar matches the record or the manifest.

    Args:
        folder: The data set.
        shard: Which of its shards.
        planned: The plan's rows by number.
    """
    rows = _readable_meta(folder, shard, planned)
    if rows is None:
        return _from_tar(folder, shard, planned) if _is_vouched_for(folder, shard) else {}
    samples = dict(_readable_samples(folder.tar(shard)))
    return {
        number: row for number, row in rows.items() if row["reason"] or _is_intact(row, samples.get(row["key"], {}))
    }


def _is_intact(row: Mapping[str, Any], parts: Mapping[str, str]) -> bool:
    """Whether a sample's parts, given as digests, are as recorded."""
    image = [digest for suffix, digest in parts.items() if suffix not in ("txt", "json")]
    caption = hashlib.sha256(str(row["caption"]).encode()).hexdigest()
    return image == [row.get(STORED_HASH)] and parts.get("txt") == caption and "json" in parts


def _readable_meta(folder: Folder, shard: int, planned: Mapping[int, Mapping[str, Any]]) -> Rows | None:
    """The meta file's rows, if it is readable and belongs to this shard."""
    try:
        rows = {row["row"]: row for row in read_meta(folder, shard).to_pylist()}
        alike = set(rows) == set(planned) and all(rows[n]["url"] == planned[n]["url"] for n in rows)
    except (UserError, KeyError, UnicodeDecodeError):
        return None
    stated = ""
    with contextlib.suppress(UserError, FileNotFoundError):
        stated = folder.read_record(shard).meta_sha256
    return rows if alike and stated in ("", sha256_of(folder.meta(shard))) else None


def _readable_samples(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Digests of the parts of each sample, up to where a damaged tar ends."""
    try:
        for key, parts in canonical_tar.samples(path):
            yield key, {suffix: hashlib.sha256(payload).hexdigest() for suffix, payload in parts.items()}
    except (OSError, tarfile.TarError, EOFError, ValueError):
        return


def _is_vouched_for(folder: Folder, shard: int) -> bool:
    """Whether the tar has the digest that its record, or else the manifest, states."""
    path = folder.tar(shard)
    if not path.is_file():
        return False
    stated = set()
    with contextlib.suppress(UserError, FileNotFoundError):
        stated.add(folder.read_record(shard).sha256)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        tree = json.loads((folder.root / MANIFEST_NAME).read_bytes())
        stated |= {entry["sha256"] for entry in tree["shards"] if entry["name"] == str(path.relative_to(folder.root))}
    return sha256_of(path) in stated


def _from_tar(folder: Folder, shard: int, planned: Mapping[int, Mapping[str, Any]]) -> Rows:
    """Rows of the meta file, restored from the samples themselves."""
    rows: Rows = {}
    for key, parts in canonical_tar.samples(folder.tar(shard)):
        facts = json.loads(parts["json"])
        plan = planned[int(key)]
        sizes = {name: facts.get(name) for name in ("width", "height", "original_width", "original_height")}
        hashes = {name: facts[name] for name in ("sha256", "md5", "sha512") if name in facts}
        image = next(payload for suffix, payload in parts.items() if suffix not in ("txt", "json"))
        rows[int(key)] = {
            **plan,
            "key": key_of(int(key)),
            "status": "success",
            "reason": None,
            "error": None,
            **sizes,
            **hashes,
            STORED_HASH: hashlib.sha256(image).hexdigest(),
        }
    return rows
