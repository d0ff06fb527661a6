"""`neuclip verify`: check that a data set matches its manifest, and the files that `neuclip download` keeps with it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dataset import canonical_tar
from data_prep.dataset.commit import exclusive_lock, real_path
from data_prep.dataset.dataset_folder import Folder, ShardRecord, read_meta
from data_prep.dataset.manifest_writer import expected_manifest, local_manifest, manifest_of_records
from data_prep.dataset.shard_files import difference, withdraw
from data_prep.dataset.shard_plan import PLAN_NAME, Plan, check_list, load_plan
from pipeline.data.shards.manifest_format import MANIFEST_NAME, Manifest, Shard, load_manifest
from pipeline.data.shards.storage import INDEX_FOLDER, index_path, list_shards, load_index, scan_members
from pipeline.data.shards.tar_reader import CorruptSample, DamagedTar, rgb_image
from pipeline.errors import UserError
from pipeline.files import sha256_of

UNLISTED, INDEX = "not listed", "index"


@dataclass(frozen=True)
class Problem:
    """One problem with one file of a data set; `shard` is its path below the folder."""

    shard: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.shard}: {self.kind}: {self.detail}"


def verify(root: str | Path, *, decode: int = 16, allow_outside: bool = False) -> list[Problem]:
    """Check every shard of a manifest: presence, size, SHA-256, that it is a complete tar of the expected samples, and
    that `decode` of its images decode; and that there are no other tars.

    In a folder made by `neuclip download`, shards are compared with their records, these and the other files with each
    other, and each image and caption with its row in the meta file.
    `allow_outside` is that of `load_manifest`.

    Raises:
        UserError: There is no manifest, or it cannot be read and the folder was not made by `neuclip download`; or
            shards are not on this machine.
    """
    folder = Folder(Path(root))
    problems, listed = list[Problem](), set[str]()
    if folder.is_download:
        listed, stated = _check_download(folder, problems), manifest_of_records(folder)
    else:
        stated = local_manifest(root, allow_outside=allow_outside)
        problems += _check_records(folder, None) if folder.is_converted else []
    for shard in stated.shards:
        problems += _check_shard(stated, shard, folder, decode=decode)
    listed |= {shard.name for shard in stated.shards}
    others = (name for name in list_shards(folder.root) if name not in listed)
    problems.extend(Problem(name, UNLISTED, "it is not in the manifest") for name in others)
    return problems


def delete_damaged(root: str | Path, problems: Iterable[Problem]) -> list[str]:
    """Delete the shards with problems, each with its record, so that the command that made the folder makes them again.

    A damaged list of URLs is deleted, too: `neuclip download` then reads its table again. Returns what was deleted.

    Raises:
        UserError: The shards are neither those of `neuclip download` nor of `neuclip pairs`, another process works in
            the folder, or a file is a folder or a link out of the data set.
    """
    folder = Folder(Path(root))
    if not (folder.is_download or folder.is_converted):
        raise UserError(
            f"No command of this program has made {root}, so that nothing was deleted. {folder.repair_hint}"
        )
    at_fault = [problem for problem in problems if problem.kind != UNLISTED]
    numbers = sorted({number for problem in at_fault if (number := folder.number_of(problem.shard)) is not None})
    others = sorted({p.shard for p in at_fault if p.kind == INDEX or p.shard == f"plan/{PLAN_NAME}"})
    with exclusive_lock(folder):
        for number in numbers:
            withdraw(folder, number)
        for path in map(folder.root.joinpath, others):  # without plan.json, the parts of the list are written again
            if path.is_dir():
                raise UserError(f"{path} is a folder in the place of a file: move it away by hand.")
            real_path(folder.root, path).unlink(missing_ok=True)
    return [*(folder.tar(number).relative_to(folder.root).as_posix() for number in numbers), *others]


def _check_download(folder: Folder, problems: list[Problem]) -> set[str]:
    """Add the problems of a download's files besides the shards; returns the shards that its manifest lists."""
    plan = manifest = None
    try:
        plan = load_plan(folder)
        check_list(folder, plan)
    except UserError as error:
        problems.append(Problem(f"plan/{PLAN_NAME}", "damaged", str(error)))
    try:
        manifest = load_manifest(folder.root)
    except UserError as error:
        is_there = (folder.root / MANIFEST_NAME).exists()
        if not is_there and not (plan and len(folder.finished()) == plan.shards):
            raise
        detail = f"{error} The same `neuclip download` writes it again."
        problems.append(Problem(MANIFEST_NAME, "damaged" if is_there else "missing", detail))
    if folder.pending_removal.exists():
        problems.append(Problem(folder.pending_removal.name, "unfinished", "a removal was interrupted"))
    try:
        folder.removed_names()
    except UserError as error:
        problems.append(Problem(folder.removed.name, "damaged", str(error)))
    of_records = list(_check_records(folder, plan))
    problems += of_records
    if plan is not None and manifest is not None and not of_records:
        try:
            expected = expected_manifest(folder, plan)
        except UserError as error:
            problems.append(Problem(MANIFEST_NAME, "contradicts", str(error)))
        else:
            stated = json.loads((folder.root / MANIFEST_NAME).read_bytes())
            for name in ("failures", "facts", "attempted"):  # compared as JSON, which has lists in place of tuples
                value = json.dumps(getattr(expected, name), sort_keys=True, default=dict)
                if json.dumps(stated.get(name), sort_keys=True) != value:
                    what = "it does not match the plan and the shards' records"
                    problems.append(Problem(MANIFEST_NAME, name, what))
            if manifest.digest != expected.digest:
                problems.append(Problem(MANIFEST_NAME, "shards", "it lists other shards than the records"))
    return {shard.name for shard in manifest.shards} if manifest else set()


def _check_records(folder: Folder, plan: Plan | None) -> Iterator[Problem]:
    """Problems of records and meta files; without a plan, of those that exist."""
    records: dict[int, ShardRecord | UserError] = {}
    for shard in folder.finished():
        try:
            records[shard] = folder.read_record(shard)
        except UserError as error:
            records[shard] = error
    origin = None if plan is None else (plan.digest, plan.rules_digest)
    others = {k for k, r in records.items() if isinstance(r, ShardRecord) and (r.plan, r.rules) != origin}
    if plan is not None and records and len(others) == len(records):
        yield Problem(f"plan/{PLAN_NAME}", "contradicts", "no shard was made from this list with these settings")
        plan = None
    for shard in records if plan is None else range(plan.shards):
        name = f"meta/{folder.record(shard).name}"
        record = records.get(shard)
        if record is None:
            yield Problem(name, "missing", "its shard is not finished; the same `neuclip download` fetches it")
        elif isinstance(record, UserError):
            yield Problem(name, "damaged", str(record))
        else:
            if plan is not None and shard in others:
                yield Problem(name, "contradicts", "it was made from another URL list, or with other settings")
            try:
                reasons = read_meta(folder, shard, ["reason"]).column("reason").to_pylist()
                rows = record.rows if plan is None else plan.rows_of(shard)
                if len(reasons) != rows or Counter(filter(None, reasons)) != Counter(record.failures):
                    raise UserError("it does not agree with the shard's record")
            except (UserError, UnicodeDecodeError, KeyError) as error:
                yield Problem(f"meta/{folder.meta(shard).name}", "damaged", str(error))


def _check_shard(manifest: Manifest, shard: Shard, folder: Folder, *, decode: int) -> Iterator[Problem]:
    path = Path(manifest.url(shard))
    if not path.is_file():
        what = "there is a folder in its place" if path.exists() else "there is no such file"
        yield Problem(shard.name, "missing", what)
        return
    size, digest = path.stat().st_size, sha256_of(path)
    if (size, digest) != (shard.bytes, shard.sha256):
        sizes = "" if size == shard.bytes else f"{size:,} bytes instead of {shard.bytes:,}, "
        yield Problem(shard.name, "sha256", f"{sizes}{digest[:16]}... instead of {shard.sha256[:16]}...")
        return
    rows = dict[str, dict[str, Any]]()
    if folder.is_download and (number := folder.number_of(shard.name)) is not None:
        # The bytes are those that were published, so only the published content can still be wrong. A meta file that
        # cannot be read is reported elsewhere.
        with suppress(UserError, KeyError, UnicodeDecodeError):
            rows = {row["key"]: row for row in read_meta(folder, number).to_pylist()}
    yield from _check_samples(path, shard, rows, decode=decode)
    index = index_path(manifest.root, shard.sha256)
    with suppress(DamagedTar):
        members = load_index(manifest.root, sha256=shard.sha256, samples=shard.samples)
        if index.exists() and (members is None or not np.array_equal(members, scan_members(path))):
            detail = f"it is not that of {shard.name}: delete it, which makes reading the shard a little slower"
            yield Problem(f"{INDEX_FOLDER}/{index.name}", INDEX, detail)


def _check_samples(
    path: Path, shard: Shard, rows: Mapping[str, Mapping[str, Any]], *, decode: int
) -> Iterator[Problem]:
    """Compare each sample with its row in the meta file, decode a few, and check the count."""
    chosen = set(random.Random(f"0/{shard.name}").sample(range(shard.samples), min(decode, shard.samples)))
    count = 0
    try:
        for count, (key, parts) in enumerate(canonical_tar.samples(path), start=1):
            row = rows.get(key, {})
            if rows and row.get("status") != "success":
                yield Problem(shard.name, "sample", f"{key} is not a sample according to its meta file")
            elif rows:
                names = ", ".join(parts)
                if not {"txt", "json"} < set(parts) or len(parts) != 3:
                    yield Problem(shard.name, "sample", f"{key} consists of {names} instead of an image, txt and json")
                differences = (difference(row, suffix, payload) for suffix, payload in parts.items())
                yield from (Problem(shard.name, "sample", f"{key}: {problem}") for problem in differences if problem)
            if count - 1 not in chosen:
                continue
            if picture := canonical_tar.picture(parts):
                try:
                    rgb_image(picture)
                except CorruptSample as error:
                    yield Problem(shard.name, "undecodable", f"sample {key} ({error})")
            else:
                what = f"sample {key} has no image, only {', '.join(parts) or 'empty members'}"
                yield Problem(shard.name, "incomplete", what)
    except ValueError as error:
        yield Problem(shard.name, "damaged", f"it is not a complete tar ({error})")
        return
    if count != shard.samples:
        yield Problem(shard.name, "count", f"{count:,} samples instead of {shard.samples:,}")
