"""Checks of the files that `neuclip download` keeps with the shards: plan, records, meta files, manifest, sessions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.dataset.dataset_folder import Folder, ShardRecord, load_config, read_lines, read_meta
from data_prep.dataset.ingest_report import REPORT_NAME
from data_prep.dataset.journal import read_sessions
from data_prep.dataset.manifest_writer import expected_manifest
from data_prep.dataset.rules import changes, has_rules, rules_of
from data_prep.dataset.shard_plan import Plan, check_list, load_plan
from data_prep.settings.download_config import DownloadConfig
from pipeline.config import to_tree
from pipeline.data.shards.manifest_format import MANIFEST_NAME, Manifest
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
    for shard in folder.numbered("meta", ".commit"):
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
    if not tar.stem.isdigit():
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
        if json.dumps(stated.get(name), sort_keys=True) != json.dumps(value, sort_keys=True, default=dict):
            yield Problem(MANIFEST_NAME, name, "it does not match the plan and the shards' records")
    if manifest.digest != expected.digest:
        yield Problem(MANIFEST_NAME, "shards", "it lists other shards than the records")
    report = folder.root / REPORT_NAME
    if report.exists() and manifest.digest not in report.read_text(encoding="utf-8", errors="replace"):
        yield Problem(REPORT_NAME, "stale", "it describes other shards")
