"""Permanently remove samples from a data set: opt-outs, duplicates, overlap with evaluation sets."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_prep import reasons
from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import Folder, as_stored, load_config, names_of, read_lines, read_meta
from data_prep.dataset.foreign_removal import remove_from_shards
from data_prep.dataset.locks import exclusive_lock
from data_prep.dataset.manifest_writer import write_manifest
from data_prep.dataset.salvage import check_shard
from data_prep.dataset.shard_commit import publish, recover
from data_prep.dataset.shard_plan import load_plan, read_shard
from data_prep.settings.source_config import HASH_KINDS
from pipeline.data.shards.manifest_format import Manifest
from pipeline.errors import UserError
from pipeline.files import flush, write_text


@dataclass(frozen=True)
class Removal:
    """Result of a removal."""

    asked: int
    """Names on the list."""
    missing: tuple[str, ...]
    """Names that match no row of the data set."""
    samples: int
    """Samples removed."""
    shards: int
    """Shards rewritten."""


def remove(root: str | Path, names: set[str]) -> tuple[Removal, Manifest | None]:
    """Remove every sample whose uid, URL, hash or key is in `names`; other shards are not changed.

    In a folder that `neuclip download` did not make, this is `remove_from_shards`.

    The names are stored in `removed.txt`, so that no later resume, retry or rebuild restores the samples. After a kill,
    the same call finishes the removal; so does `neuclip download`.

    Returns:
        The result and the new manifest, which is None if the download is unfinished; the download then writes it.

    Raises:
        UserError: No sample would be left, another process is using the folder, or a file is damaged.
    """
    folder, names = Folder(Path(root)), as_stored(names)
    if not folder.is_download:
        found, samples, shards, rest = remove_from_shards(folder, names)
        return Removal(len(names), tuple(sorted(names - found)), samples, shards), rest
    load_config(folder.root)  # fails if the settings are lost
    with exclusive_lock(folder):
        recover(folder, range(load_plan(folder).shards))
        if read_lines(folder.pending_removal) - names:  # of another list
            finish_removal(folder)
        done = _remove(folder, names)
        manifest = _new_manifest(folder)
        _end(folder)
    return done, manifest


def finish_removal(folder: Folder) -> bool:
    """Finish a removal that was killed. The caller must hold the folder's lock.

    Returns:
        Whether there was an unfinished removal.
    """
    if not folder.pending_removal.exists():
        return False
    _remove(folder, set(read_lines(folder.pending_removal)))
    _new_manifest(folder)
    _end(folder)
    return True


def _remove(folder: Folder, names: set[str]) -> Removal:
    found: set[str] = set()
    hits = {shard: hit for shard in folder.finished() if (hit := _hits(folder, shard, names, found))}
    samples = sum(map(len, hits.values()))
    total = sum(folder.read_record(shard).samples for shard in folder.finished())
    is_complete = len(folder.finished()) == load_plan(folder).shards
    if samples and samples == total and is_complete and names != read_lines(folder.pending_removal):
        raise UserError(
            f"The list names all {total:,} samples of {folder.root}: nothing would be left, and nothing was changed. "
            "Delete the folder if that is what you mean."
        )
    for shard in hits:
        check_shard(folder, shard)
    _begin(folder, names)
    for shard, hit in hits.items():
        _rewrite(folder, shard, hit)
    for shard in set(range(load_plan(folder).shards)) - set(folder.finished()):
        found.update(*(names & names_of(row) for row in read_shard(folder, shard).to_pylist()))
    return Removal(len(names), tuple(sorted(names - found)), samples, len(hits))


def _begin(folder: Folder, names: set[str]) -> None:
    """Record the names before anything is removed, so that a killed removal can be detected and finished."""
    pending = sorted(names | read_lines(folder.pending_removal))
    write_text(folder.pending_removal, "".join(f"{line}\n" for line in pending), durable=True)
    flush(folder.root)
    lines = sorted(folder.removed_names() | names)
    write_text(folder.removed, "".join(f"{line}\n" for line in lines), durable=True)
    flush(folder.root)


def _end(folder: Folder) -> None:
    folder.pending_removal.unlink(missing_ok=True)


def _new_manifest(folder: Folder) -> Manifest | None:
    plan = load_plan(folder)
    return write_manifest(folder, plan) if len(folder.finished()) == plan.shards else None


def _hits(folder: Folder, shard: int, names: set[str], found: set[str]) -> set[int]:
    """Rows of a shard to remove; `found` collects the names that match a row."""
    hit = set()
    for row in read_meta(folder, shard, ["row", "status", "url", "uid", *HASH_KINDS]).to_pylist():
        matching = names_of(row) & names
        found |= matching
        if matching and row["status"] == "success":
            hit.add(row["row"])
    return hit


def _rewrite(folder: Folder, shard: int, hit: set[int]) -> None:
    record = folder.read_record(shard)
    members = (
        (f"{key}.{suffix}", parts[suffix])
        for key, parts in canonical_tar.samples(folder.tar(shard))
        if int(key) not in hit
        for suffix in sorted(parts)
    )
    rows: list[dict[str, Any]] = read_meta(folder, shard).to_pylist()
    for row in rows:
        if row["row"] in hit:
            row.update(status="failed", reason=reasons.REMOVED)
    failures = Counter(record.failures) + Counter({reasons.REMOVED: len(hit)})
    publish(folder, replace(record, samples=record.samples - len(hit), failures=failures), members, rows)
