"""Permanently remove samples from a data set: opt-outs, duplicates, overlap with evaluation sets.

The same for downloads, what `neuclip pairs` made, and tars from elsewhere with a manifest: every shard that changes is
written anew beside the old one, with its meta file and record, `removed.txt` and the manifest, and all of them are
swapped at once (`swap`). Then the new shards are read again: what was removed must not be in them. It needs the space
of the shards that change.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from data_prep import reasons
from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import Folder, as_stored, load_config, names_of, read_meta, write_meta_to
from data_prep.dataset.manifest_writer import local_manifest, manifest_of_records
from data_prep.dataset.published_shard import check_keys_of, check_meta
from data_prep.dataset.sessions import exclusive_lock, part_lock
from data_prep.dataset.shard_commit import recover
from data_prep.dataset.shard_plan import load_plan, read_shard
from data_prep.dataset.swap import Swap, discard, finish, leftovers
from data_prep.settings.source_config import HASH_KINDS
from pipeline.data.shards.manifest_format import MANIFEST_NAME, Manifest, Shard, check_keys, make_manifest
from pipeline.data.shards.storage import list_shards
from pipeline.errors import UserError
from pipeline.files import as_text, sha256_of

PART = "pairs"
"""The part of the work that `neuclip pairs` and removals hold the lock of."""
_SHOWN = 5
Hits = dict[str, set[str]]
"""The keys of samples to remove, by shard."""


@dataclass(frozen=True)
class Removal:
    """Result of a removal."""

    asked: int
    """Names on the list."""
    missing: tuple[str, ...]
    """Names that match no row of the data set."""
    samples: int
    """Samples removed, counted in the new shards."""
    shards: int
    """Shards rewritten."""


def remove(root: str | Path, names: set[str]) -> tuple[Removal, Manifest | None]:
    """Remove every sample whose uid, URL, hash, key or SHARD:KEY is in `names`; other shards are not changed.

    The names are stored in `removed.txt`, so that no later resume, retry or conversion restores the samples. After a
    kill, the same call finishes the removal; so do `neuclip download` and `neuclip pairs`.

    Returns:
        The result, in which names that an earlier removal has found are not missing, and the new manifest, which is
        None if the download is unfinished; the download then writes it.

    Raises:
        UserError: No sample would be left, another process is using the folder, a shard is elsewhere, has a key of
            several samples or differs from its record or the manifest, and nothing was changed; or some of the samples
            are still there, because other files of the folder have them as well.
    """
    folder, names = Folder(Path(root)), as_stored(names)
    if folder.is_download:
        load_config(folder.root)  # fails if the settings are lost
    with locked(folder):
        if folder.is_download:
            before, hits, found, is_whole = _in_download(folder, names)
        else:
            before, is_whole = local_manifest(folder.root), True
            hits, found = _in_tars(before, names)
        changing = [shard for shard in before.shards if shard.name in hits]
        _check(folder, before, changing, hits, is_whole=is_whole)
        of_records = (path for number in folder.finished() for path in folder.files(number))
        of_root = (folder.removed, folder.pending_removal, folder.root / MANIFEST_NAME)
        discard([*(Path(before.url(shard)) for shard in before.shards), *of_records, *of_root])
        known = folder.removed_names()
        manifest = local_manifest(folder.root) if (folder.root / MANIFEST_NAME).is_file() else None
        kept = known | (names if folder.is_download else found)
        manifest = _swap(folder, manifest, changing, hits, kept) if hits or kept != known else manifest
        if manifest is not None:
            manifest.update_indexes()
        samples = sum(shard.samples for shard in changing) - _check_gone(folder, hits, names)
        missing = tuple(sorted(names - found - (set() if folder.is_download else known)))
        return Removal(len(names), missing, samples, len(hits)), manifest if is_whole else None


def finish_removals(folder: Folder) -> bool:
    """Finish a removal that was killed. The caller must hold the folder's lock, of downloads the exclusive one.

    Returns:
        Whether there was an unfinished removal.

    Raises:
        UserError: Samples that it removes are still there.
    """
    if not folder.pending_removal.exists():
        return False
    changed = [name for name in finish(folder.root, folder.pending_removal) if name.endswith(".tar")]
    _check_gone(folder, changed, folder.removed_names())
    return True


@contextmanager
def locked(folder: Folder) -> Iterator[None]:
    """Keep every other command from changing a data set, once what was interrupted in a download is finished.

    Raises:
        UserError: Another process is working in the folder.
    """
    with exclusive_lock(folder) if folder.is_download else part_lock(folder, PART):
        finish_removals(folder)
        if folder.is_download:
            recover(folder, folder.numbered(".commit"))
            for left in (*leftovers(folder.root / "shards"), *leftovers(folder.root / "meta")):
                left.unlink(missing_ok=True)
        yield


def _in_download(folder: Folder, names: Set[str]) -> tuple[Manifest, Hits, set[str], bool]:
    """The shards as recorded, what to remove, the names that match a row, and whether all shards are finished."""
    plan, hits, found = load_plan(folder), Hits(), set[str]()
    finished = folder.finished()
    for shard in finished:
        name = folder.tar(shard).relative_to(folder.root).as_posix()
        rows = read_meta(folder, shard, ["row", "key", "status", "url", "uid", *HASH_KINDS]).to_pylist()
        check_meta(folder, shard)
        for row in rows:
            if matching := names_of(row) & names:
                found |= matching
                if row["status"] == "success":
                    hits.setdefault(name, set()).add(row["key"])
    missing = set(range(plan.shards)) - set(finished)
    for shard in missing:
        found.update(*(names & names_of(row) for row in read_shard(folder, shard).to_pylist()))
    return manifest_of_records(folder), hits, found, not missing


def _in_tars(manifest: Manifest, names: Set[str]) -> tuple[Hits, set[str]]:
    """What to remove, and the names that match a sample."""
    hits, found = Hits(), set[str]()
    for shard in manifest.shards:
        for key, parts in canonical_tar.intact_samples(manifest.url(shard)):
            if matching := names_of_sample(shard.name, key, parts) & names:
                found |= matching
                hits.setdefault(shard.name, set()).add(key)
    return hits, found


def _check(folder: Folder, manifest: Manifest, changing: list[Shard], hits: Hits, *, is_whole: bool) -> None:
    """Refuse to leave nothing, and to copy from shards that are not what was recorded."""
    if is_whole and hits and sum(map(len, hits.values())) >= manifest.n:
        raise UserError(
            f"The list names all {manifest.n:,} samples of {folder.root}: nothing would be left, and nothing was "
            "changed. Delete the folder if that is what you mean."
        )
    check_keys(manifest, changing)
    for shard in changing:
        path = Path(manifest.url(shard))
        if shard.sha256 and not (path.is_file() and sha256_of(path) == shard.sha256):
            raise UserError(
                f"{path} is missing or is not what the manifest and its record say, and nothing was changed. "
                f"{folder.repair_hint}"
            )
        check_keys_of(folder, shard.name, hits[shard.name])


def _swap(
    folder: Folder, manifest: Manifest | None, changing: list[Shard], hits: Hits, names: Set[str]
) -> Manifest | None:
    """Put new shards in the place of the old ones, and return the new manifest if there was one."""
    with Swap(folder.root, folder.pending_removal) as swap:
        changed = {shard.name: _rewrite(folder, swap, shard, hits[shard.name]) for shard in changing}
        swap.new(folder.removed).write_text("".join(f"{name}\n" for name in sorted(names)), encoding="utf-8")
        if manifest is not None:
            manifest = _changed_manifest(manifest, changed)
            manifest.write_to(swap.new(folder.root / MANIFEST_NAME))
        swap.commit()
    return manifest


def _rewrite(folder: Folder, swap: Swap, shard: Shard, keys: Set[str]) -> Shard:
    """Write a shard without these samples, its meta file and record if it has any, and return what the shard is now."""
    path = folder.root / shard.name
    left = replace(shard, samples=shard.samples - len(keys), bytes=0, sha256="")
    if left.samples:
        members = (
            (f"{key}.{suffix}", payload)
            for key, parts in canonical_tar.intact_samples(path)
            if key not in keys
            for suffix, payload in parts.items()
        )
        size, digest = canonical_tar.write_to(swap.new(path), members)
        left = replace(left, bytes=size, sha256=digest)
    else:
        swap.delete(path)
    number = folder.number_of(shard.name)
    if number is None or not folder.record(number).exists():
        return left
    record, rows = folder.read_record(number), read_meta(folder, number)
    table = rows.to_pylist()
    for row in table:
        if row["key"] in keys:
            row.update(status="failed", reason=reasons.REMOVED, error=None)
    meta = swap.new(folder.meta(number))
    write_meta_to(meta, pa.Table.from_pylist(table, schema=rows.schema))
    record = replace(
        record,
        samples=left.samples,
        bytes=left.bytes,
        sha256=left.sha256,
        meta_sha256=sha256_of(meta) if record.meta_sha256 else "",
        failures=Counter(record.failures) + Counter({reasons.REMOVED: len(keys)}),
    )
    swap.new(folder.record(number)).write_text(record.text(), encoding="utf-8")
    return left


def _changed_manifest(before: Manifest, changed: Mapping[str, Shard]) -> Manifest:
    entries, failures = [], Counter(before.failures)
    for shard in before.shards:
        new = changed.get(shard.name, shard)
        failures[reasons.REMOVED] += shard.samples - new.samples
        if new.samples:
            entries.append((new.name, new.samples, new.bytes, new.sha256))
    return make_manifest(entries, root=before.root, failures=+failures, facts=before.facts)


def _check_gone(folder: Folder, changed: Iterable[str], names: Set[str]) -> int:
    """Read shards that were changed, and tars that nothing lists, and count the samples of the former.

    Raises:
        UserError: A sample with one of these names is in them.
    """
    count, left, changed = 0, list[str](), {name for name in changed if (folder.root / name).exists()}
    listed = manifest_of_records(folder) if folder.is_download else local_manifest(folder.root)
    others = set(list_shards(folder.root)) - {shard.name for shard in listed.shards} - changed
    for name in sorted(changed | others):
        try:
            for key, parts in canonical_tar.intact_samples(folder.root / name):
                count += name in changed
                if names_of_sample(name, key, parts) & names:
                    left.append(as_text(f"{name}:{key}"))
        except UserError as error:
            left.append(f"perhaps {name} ({error})")
    if left:
        raise UserError(
            f"{len(left):,} samples that were to be removed are still there: {', '.join(left[:_SHOWN])}"
            f"{', ...' if len(left) > _SHOWN else ''}. The manifest does not list these shards, or something else has "
            "changed them meanwhile. Delete them, or list them in the manifest, and repeat the command."
        )
    return count


def names_of_sample(shard: str, key: str, parts: Mapping[str, bytes]) -> set[str]:
    """The names (key, SHARD:KEY, uid, URL, hashes) under which a sample can be removed."""
    try:
        tree = json.loads(parts.get("json", b"{}"))
    except (ValueError, RecursionError):
        tree = {}
    fields = [tree.get(name) for name in ("uid", "url", *HASH_KINDS)] if isinstance(tree, dict) else []
    keys = [as_text(name) for name in (key, f"{shard}:{key}") if key == key.strip()]  # a list's names have no blanks
    return as_stored([*keys, *(field for field in fields if isinstance(field, str))])
