"""A published shard that is read again, by a retry or a removal: nothing that differs from its record is copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from data_prep import reasons
from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import Folder, read_meta
from pipeline.errors import UserError
from pipeline.files import sha256_of

Rows = dict[int, dict[str, Any]]


def settled_rows(folder: Folder, shard: int) -> Rows:
    """Rows that a retry does not request again: samples and permanent failures.

    Raises:
        UserError: A file of the shard is damaged.
    """
    record, tar = folder.read_record(shard), folder.tar(shard)
    if record.samples and not (tar.is_file() and sha256_of(tar) == record.sha256):
        raise UserError(f"{tar} is missing or differs from its record. {folder.repair_hint}")
    check_meta(folder, shard)
    rows = {row["row"]: row for row in read_meta(folder, shard).to_pylist()}
    return {number: row for number, row in rows.items() if not (row["reason"] and reasons.is_transient(row["reason"]))}


def published_samples(
    folder: Folder, shard: int, rows: Mapping[int, Mapping[str, Any]]
) -> Iterator[tuple[int, dict[str, bytes]]]:
    """`(row number, {extension: payload})` of the samples among `rows`, in order."""
    for key, parts in canonical_tar.samples(folder.tar(shard)):
        if int(key) in rows:
            yield int(key), parts


def check_meta(folder: Folder, shard: int) -> None:
    """Compare a meta file, whose missing is found when it is read, with the SHA-256 in the record.

    Raises:
        UserError: It differs: another shard's, for instance.
    """
    digest, meta = folder.read_record(shard).meta_sha256, folder.meta(shard)
    if digest and meta.is_file() and sha256_of(meta) != digest:
        raise UserError(f"{meta} is missing or differs from its record. {folder.repair_hint}")


def check_keys_of(folder: Folder, name: str, keys: Set[str]) -> None:
    """Check record and meta file, if there are any, of the shard with this name in the manifest, which has these keys.

    Raises:
        UserError: One of them is damaged or another shard's.
    """
    number = folder.number_of(name)
    if number is None or not folder.record(number).exists():
        return
    rows = read_meta(folder, number, ["key", "status"]).to_pylist()
    samples = {row["key"] for row in rows if row["status"] == "success"}
    if folder.read_record(number).samples != len(samples) or not keys <= samples:
        raise UserError(f"{folder.meta(number)} is another shard's. {folder.repair_hint}")
