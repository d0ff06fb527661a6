"""The manifest of a finished data set: the contents and the origin of its shards."""

from __future__ import annotations

import contextlib
from typing import Any

from data_prep.dataset.dataset_folder import Folder, ShardRecord, tar_name, total_failures
from data_prep.dataset.rules import has_rules, versions_used
from data_prep.dataset.shard_plan import Plan
from data_prep.reasons import ALLOW_HINT, REFUSED_ADDRESS
from pipeline.data.shards.manifest_format import Manifest, make_manifest
from pipeline.errors import UserError


def write_manifest(folder: Folder, plan: Plan) -> Manifest:
    """Write the manifest of a finished set into its folder.

    Raises:
        UserError: Shards are missing, damaged or made with other settings, or no URL gave a sample.
    """
    manifest = expected_manifest(folder, plan)
    manifest.save(folder.root)
    return manifest


def expected_manifest(folder: Folder, plan: Plan) -> Manifest:
    """Build the manifest from the plan and the records.

    Raises:
        UserError: As for `write_manifest`.
    """
    finished = folder.finished()
    missing = sorted(set(range(plan.shards)) - set(finished))
    if missing:
        raise UserError(
            f"{len(missing):,} of {plan.shards:,} shards of {folder.root} are not finished, the first is "
            f"{missing[0]}: run the same `neuclip download` again first."
        )
    records = [folder.read_record(shard) for shard in finished]
    _check_alike(records, folder, plan)
    failures = total_failures(records)
    rows = _listed(records)
    if not rows:
        named = ", ".join(f"{reason}: {count:,}" for reason, count in failures.most_common())
        hint = f" Note that {ALLOW_HINT}." if failures[REFUSED_ADDRESS] else ""
        raise UserError(f"None of {plan.rows:,} URLs gave a sample ({named}): there is nothing to train on.{hint}")
    return make_manifest(rows, root=folder.root, failures=dict(failures), facts=_facts(plan, records))


def manifest_of_records(folder: Folder) -> Manifest:
    """The shards that have a readable record, as a manifest without provenance; there may be none."""
    records = []
    for shard in folder.finished():
        with contextlib.suppress(UserError):
            records.append(folder.read_record(shard))
    return make_manifest(_listed(records), root=folder.root)


def _listed(records: list[ShardRecord]) -> list[tuple[str, int, int, str]]:
    return [(tar_name(r.shard), r.samples, r.bytes, r.sha256) for r in records if r.samples]


def _check_alike(records: list[ShardRecord], folder: Folder, plan: Plan) -> None:
    foreign = [record.shard for record in records if record.plan != plan.digest]
    if foreign:
        raise UserError(
            f"Shards {foreign[:5]} in {folder.root} were made from another URL list: move their files away from "
            f"shards/ and meta/, and run the same `neuclip download` again. {folder.repair_hint}"
        )
    other = [record.shard for record in records if not has_rules(record, plan.rules)]
    if other:
        raise UserError(
            f"Shards {other[:5]} in {folder.root} were made with other image or guard settings than the rest. "
            f"{folder.repair_hint}"
        )


def _facts(plan: Plan, records: list[ShardRecord]) -> dict[str, Any]:
    """The origin of the shards, without dates, durations or machine names: the same inputs give the same manifest."""
    source = {k: v for k, v in plan.settings["source"].items() if v not in (None, [], {})}
    return {
        "source": source,
        "source_rows": plan.seen,
        **({"source_rows_skipped": plan.skipped} if plan.skipped else {}),
        **({"source_sha256": {name: file["sha256"] for name, file in plan.files.items()}} if plan.files else {}),
        "subset": plan.settings["subset"],
        "urls": plan.rows,
        "urls_digest": plan.digest,
        **plan.rules,
        "tools": versions_used(records),
    }
