"""Permanently remove samples from a data set: opt-outs, duplicates, overlap with evaluation sets.

Of a download, every shard is published anew as in shard_commit.py. Of shards that `neuclip download` did not make
(those of `neuclip pairs`, and tars from elsewhere), each that changes is written beside the old one. After all of them,
`removed.txt` names what is removed, and small files `SHARD.removal` say what the new shards are; only then are these
renamed, the manifest is written and the small files are deleted. An error before the renames undoes this, except for
`removed.txt`. A killed removal is undone or, for the shards with such a file, finished by the next one or by
`neuclip pairs`. A removal needs the space of the shards that change.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep import reasons
from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import (
    Folder,
    as_stored,
    content,
    load_config,
    names_of,
    read_lines,
    read_meta,
    signed,
    tar_name,
    write_meta,
)
from data_prep.dataset.manifest_writer import check_recorded, local_manifest, write_manifest
from data_prep.dataset.salvage import check_converted, check_meta, check_shard
from data_prep.dataset.sessions import exclusive_lock, part_lock
from data_prep.dataset.shard_commit import publish, recover
from data_prep.dataset.shard_plan import load_plan, read_shard
from data_prep.settings.source_config import HASH_KINDS
from pipeline.data.shards.manifest_format import MANIFEST_NAME, Manifest, check_keys, make_manifest
from pipeline.errors import UserError
from pipeline.files import as_text, flush, sha256_of, write_text


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
        return remove_from_shards(folder, names)
    load_config(folder.root)  # fails if the settings are lost
    with exclusive_lock(folder):
        plan = load_plan(folder)
        check_recorded(folder, plan)
        recover(folder, range(plan.shards))
        if read_lines(folder.pending_removal) - names:  # of another list
            finish_removal(folder)
        return _remove(folder, names)


def finish_removal(folder: Folder) -> bool:
    """Finish a removal that was killed. The caller must hold the folder's lock.

    Returns:
        Whether there was an unfinished removal.
    """
    if not folder.pending_removal.exists():
        return False
    _remove(folder, set(read_lines(folder.pending_removal)))
    return True


def _remove(folder: Folder, names: set[str]) -> tuple[Removal, Manifest | None]:
    plan, found = load_plan(folder), set[str]()
    hits = {shard: hit for shard in folder.finished() if (hit := _hits(folder, shard, names, found))}
    samples = sum(map(len, hits.values()))
    total = sum(folder.read_record(shard).samples for shard in folder.finished())
    missing = set(range(plan.shards)) - set(folder.finished())
    if samples and samples == total and not missing and names != read_lines(folder.pending_removal):
        raise UserError(
            f"The list names all {total:,} samples of {folder.root}: nothing would be left, and nothing was changed. "
            "Delete the folder if that is what you mean."
        )
    for shard in hits:
        check_shard(folder, shard)
    # Before anything is removed, so that a killed removal can be detected and finished.
    _write_names(folder.pending_removal, names | read_lines(folder.pending_removal))
    _write_names(folder.removed, folder.removed_names() | names)
    for shard, hit in hits.items():
        _rewrite(folder, shard, hit)
    for shard in missing:
        found.update(*(names & names_of(row) for row in read_shard(folder, shard).to_pylist()))
    manifest = None if missing else write_manifest(folder, plan)
    folder.pending_removal.unlink(missing_ok=True)
    return Removal(len(names), tuple(sorted(names - found)), samples, len(hits)), manifest


def _write_names(path: Path, names: Set[str]) -> None:
    """Write sorted names, one a line, to the disk."""
    write_text(path, "".join(f"{name}\n" for name in sorted(names)), durable=True)
    flush(path.parent)


def _hits(folder: Folder, shard: int, names: set[str], found: set[str]) -> set[int]:
    """Rows of a shard to remove; `found` collects the names that match a row."""
    hit = set()
    rows = read_meta(folder, shard, ["row", "status", "url", "uid", *HASH_KINDS]).to_pylist()
    check_meta(folder, shard)
    for row in rows:
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


PART = "pairs"
"""The part of the work that `neuclip pairs` and removals hold the lock of."""
_NOTE, _NEW = ".removal", ".new"


def remove_from_shards(folder: Folder, names: set[str]) -> tuple[Removal, Manifest]:
    """Remove every sample whose key, SHARD:KEY, uid, URL or hash is in `names`.

    Returns:
        The result, in which names that an earlier removal has found are not missing, and the new manifest.

    Raises:
        UserError: There is no manifest, a shard is elsewhere, differs from it or has a key of several samples, no
            sample would be left, or another process works in the folder.
    """
    with part_lock(folder, PART):
        finish_removals(folder)
        manifest = local_manifest(folder.root)
        found, hits = set[str](), dict[str, set[str]]()
        for shard in manifest.shards:
            for key, parts in canonical_tar.intact_samples(manifest.url(shard)):
                if matching := names_of_sample(shard.name, key, parts) & names:
                    found |= matching
                    hits.setdefault(shard.name, set()).add(key)
        samples = sum(map(len, hits.values()))
        if samples >= manifest.n:
            raise UserError(
                f"The list names all {manifest.n:,} samples of {folder.root}: nothing would be left, and nothing was "
                "changed. Delete the folder if that is what you mean."
            )
        changed = [shard for shard in manifest.shards if shard.name in hits]
        check_keys(manifest, changed)
        for shard in changed:
            if shard.sha256 and sha256_of(manifest.url(shard)) != shard.sha256:
                raise UserError(
                    f"{shard.name} is not what the manifest says, and nothing was changed: `neuclip verify "
                    f"{folder.root}` finds all damage."
                )
            check_converted(folder, shard.name, hits[shard.name])
        known = folder.removed_names()
        paths = {shard.name: Path(manifest.url(shard)) for shard in changed}
        try:
            notes = {path: _rewrite_tar(path, name, hits[name]) for name, path in paths.items()}
            # Before the notes: a removal that is killed between two of them finds these names when it is repeated.
            _write_names(folder.removed, known | found)
            for path, note in notes.items():
                write_text(_beside(path, _NOTE), signed(note), durable=True)
                flush(path.parent)
        except BaseException:
            for suffix in (_NOTE, _NEW):  # the notes first: without them, the next removal ignores the new shards
                for path in paths.values():
                    _beside(path, suffix).unlink(missing_ok=True)
            raise
        manifest = finish_removals(folder) or manifest
        return Removal(len(names), tuple(sorted(names - found - known)), samples, len(changed)), manifest


def finish_removals(folder: Folder) -> Manifest | None:
    """Finish removals that were killed; the caller holds the lock of `PART`.

    Returns:
        The new manifest; None if there was nothing to do.
    """
    if not (folder.root / MANIFEST_NAME).is_file():
        return None
    notes = {path: _read_note(path) for path in sorted(folder.root.rglob(f"*.tar{_NOTE}"))}
    for path in folder.root.rglob(f"*.tar{_NEW}"):
        if path.with_suffix(_NOTE) not in notes:
            path.unlink()  # not finished
    if not notes:
        return None
    for path, note in notes.items():
        _publish_tar(folder, path.with_suffix(""), note)
    manifest = _changed_manifest(folder, {note["name"]: note for note in notes.values()})
    manifest.save(folder.root)
    flush(folder.root)
    for path in notes:
        path.unlink()
    return manifest


def _read_note(path: Path) -> dict[str, Any]:
    try:
        return content(path.read_bytes())
    except ValueError as error:
        raise UserError(
            f"{path}, which says how to finish a removal, is damaged ({error}): copy the data set again from its "
            "source, and repeat the removal."
        ) from error


def _changed_manifest(folder: Folder, changes: Mapping[str, Mapping[str, Any]]) -> Manifest:
    """The folder's manifest with some of its shards changed."""
    before = local_manifest(folder.root)
    entries, failures = [], Counter(before.failures)
    for shard in before.shards:
        new = changes.get(shard.name, {"samples": shard.samples, "bytes": shard.bytes, "sha256": shard.sha256})
        failures[reasons.REMOVED] += shard.samples - new["samples"]
        if new["samples"]:
            entries.append((shard.name, new["samples"], new["bytes"], new["sha256"]))
    return make_manifest(entries, root=folder.root, failures=+failures, facts=before.facts)


def names_of_sample(shard: str, key: str, parts: Mapping[str, bytes]) -> set[str]:
    """The names (key, SHARD:KEY, uid, URL, hashes) under which a sample can be removed."""
    try:
        tree = json.loads(parts.get("json", b"{}"))
    except (ValueError, RecursionError):
        tree = {}
    fields = [tree.get(name) for name in ("uid", "url", *HASH_KINDS)] if isinstance(tree, dict) else []
    keys = [as_text(name) for name in (key, f"{shard}:{key}") if key == key.strip()]  # a list's names have no blanks
    return as_stored([*keys, *(field for field in fields if isinstance(field, str))])


def _rewrite_tar(path: Path, name: str, hit: set[str]) -> dict[str, Any]:
    """Write the shard without some of its samples beside it, and return the note about it."""
    kept = 0

    def members() -> Iterator[tuple[str, bytes]]:
        nonlocal kept
        for key, parts in canonical_tar.intact_samples(path):
            if key not in hit:
                kept += 1
                yield from ((f"{key}.{suffix}", payload) for suffix, payload in parts.items())

    size, digest = canonical_tar.write(_beside(path, _NEW), members())
    flush(path.parent)
    return {"name": name, "samples": kept, "bytes": size, "sha256": digest, "removed": sorted(hit)}


def _beside(shard: Path, suffix: str) -> Path:
    return shard.with_name(shard.name + suffix)


def _publish_tar(folder: Folder, tar: Path, note: Mapping[str, Any]) -> None:
    """Put a new shard in the place of the old one, and correct the records of `neuclip pairs`; may be repeated."""
    new = _beside(tar, _NEW)
    if new.exists():
        new.replace(tar)
    if not note["samples"]:
        tar.unlink(missing_ok=True)
    flush(tar.parent)
    number = next((shard for shard in folder.finished() if tar_name(shard) == note["name"]), None)
    if number is None:
        return
    removed, rows = set(note["removed"]), read_meta(folder, number)
    table = rows.to_pylist()
    for row in table:
        if row["key"] in removed:
            row.update(status="failed", reason=reasons.REMOVED, error=None)
    write_meta(folder.meta(number), pa.Table.from_pylist(table, schema=rows.schema))
    flush(folder.meta(number).parent)
    failures = Counter(row["reason"] for row in table if row["reason"])
    size, digest = (note["bytes"], note["sha256"]) if note["samples"] else (0, "")
    record = folder.read_record(number)
    folder.write_record(replace(record, samples=note["samples"], bytes=size, sha256=digest, failures=failures))
