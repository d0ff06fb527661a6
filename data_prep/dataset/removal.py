"""Permanently remove samples from a data set: opt-outs, duplicates, overlap with evaluation sets.

The same for downloads, what `neuclip pairs` made, and tars from elsewhere with a manifest: every shard that changes is
written anew beside the old one, with its meta file and record, `removed.txt` and the manifest. The new shards are read
again: what was removed must not be in them. Then all of these files change at once (`commit`). It needs the space of
the shards that change.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from data_prep import reasons
from data_prep.dataset import canonical_tar
from data_prep.dataset.commit import Commit, delete_leftovers, exclusive_lock, real_path
from data_prep.dataset.dataset_folder import (
    REPORT_NAME,
    Folder,
    as_stored,
    key_of,
    names_of,
    read_meta,
    tar_name,
)
from data_prep.dataset.manifest_writer import local_manifest, manifest_of_records
from data_prep.dataset.shard_files import check_tar, stage
from data_prep.dataset.shard_plan import load_plan, read_shard
from data_prep.download_config import HASH_KINDS
from pipeline.data.shards.manifest_format import MANIFEST_NAME, Manifest, Shard, check_keys, make_manifest
from pipeline.data.shards.storage import list_shards
from pipeline.errors import UserError
from pipeline.files import as_text, sha256_of

_SHOWN = 5
Hits = dict[str, set[str]]
"""The keys of samples to remove, by shard."""


@dataclass(frozen=True)
class Removal:
    """Result of a removal: numbers of samples removed and of shards written anew."""

    samples: int
    shards: int
    missing: tuple[str, ...]
    """Names that match no row of the data set."""


def remove(root: str | Path, names: Set[str], *, allow_outside: bool = False) -> tuple[Removal, Manifest | None]:
    """Remove every sample whose uid, URL, hash, key or SHARD:KEY is in `names`; other shards are not changed.

    The names are stored in `removed.txt`, so that no later resume, retry or conversion restores the samples. After a
    kill, the same call finishes the removal; so do `neuclip download` and `neuclip pairs`. Links out of the folder are
    followed with `allow_outside` only.

    Returns:
        The result, in which names that an earlier removal has found are not missing, and the new manifest, which is
        None if the download is unfinished; the download then writes it.

    Raises:
        UserError: No sample would be left, another process is using the folder, a shard is elsewhere, has a key of
            several samples or differs from its record or the manifest, and nothing was changed; or some of the samples
            are still there, because other files of the folder have them as well.
    """
    folder, names = Folder(Path(root)), as_stored(names)
    with exclusive_lock(folder, allow_outside=allow_outside):
        before = manifest_of_records(folder) if folder.is_download else local_manifest(folder.root)
        hits, matched = Hits(), set[str]()
        for name, key, theirs in _named_in_download(folder) if folder.is_download else _named_in_tars(before):
            if matching := theirs & names:
                matched |= matching
                if name is not None:
                    hits.setdefault(name, set()).add(key)
        is_whole = not folder.is_download or set(range(load_plan(folder).shards)) <= set(folder.finished())
        changing = [shard for shard in before.shards if shard.name in hits]
        if is_whole and hits and sum(map(len, hits.values())) >= before.n:
            raise UserError(
                f"The list names all {before.n:,} samples of {folder.root}: nothing would be left, and nothing was "
                "changed. Delete the folder if that is what you mean."
            )
        check_keys(before, changing)
        for shard in changing:
            path = Path(before.url(shard))
            if shard.sha256:
                check_tar(folder, path, shard.sha256)
            delete_leftovers(real_path(folder.root, path, allow_outside=allow_outside).parent)
        known = folder.removed_names()
        manifest = local_manifest(folder.root) if (folder.root / MANIFEST_NAME).is_file() else None
        kept = known | (names if folder.is_download else matched)
        if hits or kept != known:
            with Commit(folder.root, folder.pending_removal, allow_outside=allow_outside) as commit:
                manifest = _stage(folder, commit, manifest, changing, hits, kept)
                (folder.root / REPORT_NAME).unlink(missing_ok=True)  # it shows samples; the caller writes it anew
                commit.finish()
        if manifest is not None:
            manifest.update_indexes()
        _check_others(folder, names)
        missing = tuple(sorted(names - matched - (set() if folder.is_download else known)))
        return Removal(sum(map(len, hits.values())), len(hits), missing), manifest if is_whole else None


def _named_in_download(folder: Folder) -> Iterator[tuple[str | None, str, set[str]]]:
    """Shard, key and names of every row of the list; rows without a sample have no shard."""
    finished = set(folder.finished())
    for number in sorted(finished.union(range(load_plan(folder).shards))):
        columns = ["row", "key", "status", "url", "uid", *HASH_KINDS]
        table = read_meta(folder, number, columns) if number in finished else read_shard(folder, number)
        for row in table.to_pylist():
            shard = tar_name(number) if row.get("status") == "success" else None
            yield shard, key_of(row["row"]), names_of(row)


def _named_in_tars(manifest: Manifest) -> Iterator[tuple[str, str, set[str]]]:
    """Shard, key and names of every sample."""
    for shard in manifest.shards:
        for key, parts in canonical_tar.intact_samples(manifest.url(shard)):
            yield shard.name, key, names_of_sample(shard.name, key, parts)


def _stage(
    folder: Folder, commit: Commit, manifest: Manifest | None, changing: list[Shard], hits: Hits, names: Set[str]
) -> Manifest | None:
    """Write new shards and the list of removed names, and return the new manifest if there was one."""
    changed = {shard.name: _rewrite(folder, commit, shard, hits[shard.name]) for shard in changing}
    commit.new(folder.removed).write_text("".join(f"{name}\n" for name in sorted(names)), encoding="utf-8")
    if manifest is None:
        return None
    shards = [changed.get(shard.name, shard) for shard in manifest.shards]
    removed = manifest.n - sum(shard.samples for shard in shards)
    failures = Counter(manifest.failures) + Counter({reasons.REMOVED: removed})
    entries = [(shard.name, shard.samples, shard.bytes, shard.sha256) for shard in shards if shard.samples]
    manifest = make_manifest(entries, root=manifest.root, failures=failures, facts=manifest.facts)
    manifest.write_to(commit.new(folder.root / MANIFEST_NAME))
    return manifest


def _rewrite(folder: Folder, commit: Commit, shard: Shard, keys: Set[str]) -> Shard:
    """Write a shard without these samples, its meta file and record if it has any, and return what the shard is now."""
    path = folder.root / shard.name
    tar = commit.new(path)
    members = (
        (f"{key}.{suffix}", payload)
        for key, parts in canonical_tar.intact_samples(path)
        if key not in keys
        for suffix, payload in parts.items()
    )
    canonical_tar.write(tar, members)
    left = [key for key, _ in canonical_tar.intact_samples(tar)]
    if len(left) != shard.samples - len(keys) or not keys.isdisjoint(left):
        raise UserError(f"{path} has other samples than the manifest says; nothing was changed. {folder.repair_hint}")
    number = folder.number_of(shard.name)
    if number is not None and folder.record(number).exists():
        record, rows = folder.read_record(number), read_meta(folder, number)
        table = rows.to_pylist()
        for row in table:
            if row["key"] in keys:
                row.update(status="failed", reason=reasons.REMOVED, error=None)
        failures = Counter(record.failures) + Counter({reasons.REMOVED: len(keys)})
        record = replace(record, samples=len(left), failures=failures)
        record = stage(commit, folder, record, pa.Table.from_pylist(table, schema=rows.schema))
        return replace(shard, samples=len(left), bytes=record.bytes, sha256=record.sha256)
    new = replace(shard, samples=len(left), bytes=tar.stat().st_size, sha256=sha256_of(tar))
    if not left:
        commit.delete(path)
    return new


def _check_others(folder: Folder, names: Set[str]) -> None:
    """Refuse a sample with one of these names in the tars of the folder that nothing lists."""
    listed = manifest_of_records(folder) if folder.is_download else local_manifest(folder.root)
    left = list[str]()
    for name in sorted(set(list_shards(folder.root)) - {shard.name for shard in listed.shards}):
        try:
            left += [
                as_text(f"{name}:{key}")
                for key, parts in canonical_tar.intact_samples(folder.root / name)
                if names_of_sample(name, key, parts) & names
            ]
        except UserError as error:
            left.append(f"perhaps {name} ({error})")
    if left:
        raise UserError(
            f"{len(left):,} samples that were to be removed are still there: {', '.join(left[:_SHOWN])}"
            f"{', ...' if len(left) > _SHOWN else ''}. The manifest does not list these shards. Delete them, or list "
            "them in the manifest, and repeat the command."
        )


def names_of_sample(shard: str, key: str, parts: Mapping[str, bytes]) -> set[str]:
    """The names (key, SHARD:KEY, uid, URL, hashes) under which a sample can be removed."""
    try:
        tree = json.loads(parts.get("json", b"{}"))
    except (ValueError, RecursionError):
        tree = {}
    fields = [tree.get(name) for name in ("uid", "url", *HASH_KINDS)] if isinstance(tree, dict) else []
    keys = [as_text(name) for name in (key, f"{shard}:{key}") if key == key.strip()]  # a list's names have no blanks
    return as_stored([*keys, *(field for field in fields if isinstance(field, str))])
