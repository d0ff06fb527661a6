"""`neuclip verify`: check that a data set matches its manifest, and the files that `neuclip download` keeps with it."""

from __future__ import annotations

import json
import random
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import Folder, ShardRecord, load_config, read_lines, read_meta
from data_prep.dataset.ingest_report import REPORT_NAME
from data_prep.dataset.manifest_writer import (
    changes,
    check_local,
    expected_manifest,
    has_rules,
    local_manifest,
    manifest_of_records,
    rules_of,
)
from data_prep.dataset.salvage import check_converted
from data_prep.dataset.sessions import read_sessions
from data_prep.dataset.shard_commit import difference
from data_prep.dataset.shard_plan import Plan, check_list, load_plan
from data_prep.settings.download_config import DownloadConfig
from pipeline.config import to_tree
from pipeline.data.shards.manifest_format import MANIFEST_NAME, Manifest, Shard, load_manifest
from pipeline.data.shards.rgb_image import rgb_image
from pipeline.data.shards.tar_reader import CorruptSample
from pipeline.errors import UserError
from pipeline.files import sha256_of

_SHARD_COLUMNS = ["row", "status", "reason"]


@dataclass(frozen=True)
class Problem:
    """One problem with one file of a data set; `shard` is its path below the folder."""

    shard: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.shard}: {self.kind}: {self.detail}"


def check_bookkeeping(folder: Folder, manifest: Manifest | None) -> Iterator[Problem]:
    """Problems of the files besides the shards."""
    if folder.pending_removal.exists():
        yield Problem(folder.pending_removal.name, "unfinished", "a removal was interrupted")
    for shard in folder.numbered(".commit"):
        yield Problem(f"meta/{folder.commit(shard).name}", "unfinished", "publishing was interrupted")
    for path in (folder.removed, folder.quarantine):
        try:
            read_lines(path)
        except UserError as error:
            yield Problem(path.name, "damaged", str(error))
    _, damaged = read_sessions(folder)
    if damaged:
        yield Problem(folder.sessions.name, "damaged", f"{damaged:,} lines cannot be read")
    plan, is_listed = None, False
    try:
        plan = load_plan(folder)
        check_list(folder, plan)
        is_listed = True
    except UserError as error:
        yield Problem("plan/plan.json", "damaged", str(error))
    if plan is not None:
        yield from _check_config(folder, plan)
    found = list(_check_shards(folder, plan))
    yield from found
    if plan is not None and is_listed and not found and manifest is not None:
        yield from _check_manifest(folder, plan, manifest)


def changed_settings(plan: Plan, config: DownloadConfig) -> list[str]:
    """How settings that determine the samples differ from those that the plan was made with."""
    made = {name: plan.settings[name] for name in ("source", "subset")}
    given = {"source": to_tree(config.source), "subset": to_tree(config.subset)}
    return changes(made, given) + (changes(plan.rules, rules_of(config)) if plan.rules else [])


def readable_rows(folder: Folder, tar: Path) -> dict[str, dict[str, Any]]:
    """The rows of the meta file that belongs to a tar, by key; empty if it cannot be read (reported elsewhere)."""
    if not tar.stem.isdecimal():
        return {}
    try:
        return {row["key"]: row for row in read_meta(folder, int(tar.stem)).to_pylist()}
    except (UserError, KeyError, UnicodeDecodeError):
        return {}


def _check_config(folder: Folder, plan: Plan) -> Iterator[Problem]:
    """Problems of the settings' file, which `neuclip download` writes again."""
    if not folder.config.exists():
        yield Problem(folder.config.name, "missing", "the same `neuclip download` writes it again")
        return
    try:
        different = changed_settings(plan, load_config(folder.root))
    except UserError as error:
        yield Problem(folder.config.name, "damaged", f"{error} The same `neuclip download` writes it again.")
        return
    if different:
        detail = f"{'; '.join(different)}. The same `neuclip download` as before writes it again."
        yield Problem(folder.config.name, "contradicts", detail)


def _check_shards(folder: Folder, plan: Plan | None) -> Iterator[Problem]:
    """Problems of records and meta files; without a plan, of those that exist."""
    finished = dict.fromkeys(folder.finished())  # a set in order
    for shard in finished if plan is None else range(plan.shards):
        name = f"meta/{folder.record(shard).name}"
        if shard not in finished:
            yield Problem(name, "missing", "its shard is not finished")
            continue
        try:
            record = folder.read_record(shard)
        except UserError as error:
            yield Problem(name, "damaged", str(error))
            continue
        if plan is not None and (record.plan != plan.digest or not has_rules(record, plan.rules)):
            yield Problem(name, "contradicts", "it was made from another URL list, or with other settings")
        problem = _check_meta(folder, plan, record)
        if problem:
            yield Problem(f"meta/{folder.meta(shard).name}", "damaged", problem)


def _check_meta(folder: Folder, plan: Plan | None, record: ShardRecord) -> str:
    """Problems of a shard's meta file, compared with its record and the plan."""
    try:
        rows = read_meta(folder, record.shard, _SHARD_COLUMNS).to_pylist()
        digest = sha256_of(folder.meta(record.shard))
    except (UserError, OSError, UnicodeDecodeError) as error:
        return str(error)
    if record.meta_sha256 and digest != record.meta_sha256:
        return f"its SHA-256 is {digest[:16]}... instead of {record.meta_sha256[:16]}..."
    failures = Counter(row["reason"] for row in rows if row["reason"])
    expected = record.rows if plan is None else plan.rows_of(record.shard)
    if len(rows) != expected or failures != Counter(record.failures):
        return "it does not agree with the shard's record"
    return ""


def _check_manifest(folder: Folder, plan: Plan, manifest: Manifest) -> Iterator[Problem]:
    """Compare the manifest and the report with the plan and the records."""
    try:
        expected = expected_manifest(folder, plan)
    except UserError as error:
        yield Problem(MANIFEST_NAME, "contradicts", str(error))
        return
    stated = json.loads((folder.root / MANIFEST_NAME).read_bytes())
    # Compared as JSON, which has lists in place of tuples.
    for name, value in (("failures", expected.failures), ("facts", expected.facts), ("attempted", expected.attempted)):
        if name == "facts" and not plan.rules:  # of a version before 0.2: the plan does not say all of them
            continue
        if json.dumps(stated.get(name), sort_keys=True) != json.dumps(value, sort_keys=True, default=dict):
            yield Problem(MANIFEST_NAME, name, "it does not match the plan and the shards' records")
    if manifest.digest != expected.digest:
        yield Problem(MANIFEST_NAME, "shards", "it lists other shards than the records")
    report = folder.root / REPORT_NAME
    if report.exists() and manifest.digest not in report.read_text(encoding="utf-8", errors="replace"):
        yield Problem(REPORT_NAME, "stale", "it describes other shards")


@dataclass(frozen=True)
class Verdict:
    """What `verify` found. `manifest` is None if it can be neither read nor restored from the records."""

    problems: list[Problem]
    manifest: Manifest | None


def verify(root: str | Path, *, decode: int = 16) -> list[Problem]:
    """Find the problems of a data set; see `inspect`."""
    return inspect(root, decode=decode).problems


def inspect(root: str | Path, *, decode: int = 16, allow_outside: bool = False) -> Verdict:
    """Check every shard of a manifest: presence, size, SHA-256, that it is a complete tar of the expected samples, and
    that `decode` of its images decode.

    In a folder made by `neuclip download`, the other files are checked as well, and each image and caption is compared
    with its record from fetching. If the manifest cannot be read, the shards are compared with their records.
    `allow_outside` is that of `load_manifest`.

    Raises:
        UserError: There is no manifest, or it cannot be read and the folder was not made by `neuclip download`; or
            shards are not on this machine.
    """
    folder = Folder(Path(root))
    is_own = "://" not in str(root) and folder.is_download
    problems: list[Problem] = []
    manifest: Manifest | None
    try:
        manifest = stated = load_manifest(root) if is_own else local_manifest(root, allow_outside=allow_outside)
    except UserError as error:
        is_there = (folder.root / MANIFEST_NAME).exists()
        if not is_own or not (is_there or _is_finished(folder)):
            raise
        problems.append(Problem(MANIFEST_NAME, "damaged" if is_there else "missing", str(error)))
        manifest, stated = None, manifest_of_records(folder)
        with suppress(UserError):  # reported among the problems
            manifest = expected_manifest(folder, load_plan(folder))
    check_local(stated)
    if is_own:
        problems.extend(check_bookkeeping(folder, None if problems else manifest))
    for shard in stated.shards:
        found = list(_check_shard(stated, shard, folder if is_own else None, decode=decode))
        problems.extend(found or (_check_converted(folder, stated, shard) if folder.is_converted else ()))
    listed = {shard.name for shard in stated.shards}
    tars = sorted(str(path.relative_to(stated.root)) for path in Path(stated.root).rglob("*.tar"))
    problems.extend(Problem(name, "not listed", "it is not in the manifest") for name in tars if name not in listed)
    return Verdict(problems, manifest)


def _is_finished(folder: Folder) -> bool:
    """Whether all shards have a record."""
    try:
        return len(folder.finished()) == load_plan(folder).shards
    except UserError:
        return False


def _check_shard(manifest: Manifest, shard: Shard, own: Folder | None, *, decode: int) -> Iterator[Problem]:
    path = Path(manifest.url(shard))
    if not path.exists():
        yield Problem(shard.name, "missing", "there is no such file")
        return
    if not path.is_file():
        yield Problem(shard.name, "no file", "there is a folder in its place")
        return
    size = path.stat().st_size
    if size != shard.bytes:
        yield Problem(shard.name, "size", f"{size:,} bytes instead of {shard.bytes:,}")
    digest, rows = sha256_of(path), dict[str, dict[str, Any]]()
    if digest != shard.sha256:
        yield Problem(shard.name, "sha256", f"{digest[:16]}... instead of {shard.sha256[:16]}...")
        decode = 0
    elif own:  # the bytes are those that were published, so only the published content can still be wrong
        rows = readable_rows(own, path)
        yield from _check_record(own, shard)
    yield from _check_samples(path, shard, rows, decode=decode)


def _check_record(folder: Folder, shard: Shard) -> Iterator[Problem]:
    """Compare the record of a shard, if it is readable, with the manifest, which states the digest of its tar."""
    number = Path(shard.name).stem
    with suppress(UserError, FileNotFoundError, ValueError):
        record = folder.read_record(int(number))
        if (record.samples, record.bytes, record.sha256) != (shard.samples, shard.bytes, shard.sha256):
            yield Problem(f"meta/{number}.json", "contradicts", "it describes another tar than this one")


def _check_converted(folder: Folder, manifest: Manifest, shard: Shard) -> Iterator[Problem]:
    try:
        check_converted(folder, shard.name, {key for key, _ in islice(canonical_tar.samples(manifest.url(shard)), 1)})
    except UserError as error:
        yield Problem(f"meta/{Path(shard.name).stem}.parquet", "damaged", str(error))


def _check_samples(
    path: Path, shard: Shard, rows: Mapping[str, Mapping[str, Any]], *, decode: int
) -> Iterator[Problem]:
    """Compare each sample with its row in the meta file, decode a few with PIL, and check the count."""
    chosen = set(random.Random(f"0/{shard.name}").sample(range(shard.samples), min(decode, shard.samples)))
    count = 0
    try:
        for count, (key, parts) in enumerate(canonical_tar.samples(path), start=1):
            if rows:
                yield from _compare(shard.name, key, parts, rows.get(key))
            if count - 1 in chosen:
                yield from _undecodable(shard.name, key, parts)
    except (tarfile.TarError, EOFError, ValueError) as error:
        yield Problem(shard.name, "damaged", f"it is not a complete tar ({error})")
        return
    if count != shard.samples:
        yield Problem(shard.name, "count", f"{count:,} samples instead of {shard.samples:,}")


def _compare(name: str, key: str, parts: Mapping[str, bytes], row: Mapping[str, Any] | None) -> Iterator[Problem]:
    if row is None or row["status"] != "success":
        yield Problem(name, "sample", f"{key} is not a sample according to its meta file")
        return
    if not {"txt", "json"} < set(parts) or len(parts) != 3:
        yield Problem(name, "sample", f"{key} consists of {', '.join(parts)} instead of an image, txt and json")
    found = (difference(row, suffix, payload) for suffix, payload in parts.items())
    yield from (Problem(name, "sample", f"{key}: {problem}") for problem in found if problem)


def _undecodable(name: str, key: str, parts: Mapping[str, bytes]) -> Iterator[Problem]:
    picture = canonical_tar.picture(parts)
    if not picture:
        yield Problem(name, "incomplete", f"sample {key} has no image, only {', '.join(parts) or 'empty members'}")
        return
    try:
        rgb_image(picture)
    except CorruptSample as error:
        yield Problem(name, "undecodable", f"sample {key} ({error})")
