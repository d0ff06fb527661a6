"""The manifest of a finished data set, and the settings that all of its shards must have been made with."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from data_prep.dataset.dataset_folder import Folder, ShardRecord, tar_name, total_failures
from data_prep.dataset.shard_plan import Plan
from data_prep.download_config import DownloadConfig
from data_prep.reasons import HINTS
from pipeline.config import to_tree
from pipeline.data.shards.manifest_format import Manifest, load_manifest, make_manifest
from pipeline.errors import UserError

# Settings of how servers are requested, which may change between runs. (The user agent is not among them, because
# opt-outs may address it.)
_MANNERS = ("contact", "host_connections", "backoff")
# Settings that have left, with the values that apply: records of shards have a digest with them.
_BUILT_IN: dict[str, dict[str, Any]] = {
    "image": {"resize_only_if_bigger": True},
    "guard": {"schemes": ["http", "https"], "max_redirects": 5},
}
TOOLS = ("img2dataset", "opencv-python-headless", "albumentations", "pyarrow")
"""The packages that determine a sample's bytes."""


def rules_of(config: DownloadConfig) -> dict[str, dict[str, Any]]:
    """The sections of the configuration that determine the samples, without settings that may change between runs."""
    guard = {name: value for name, value in to_tree(config.guard).items() if name not in _MANNERS}
    image = to_tree(config.image)
    if image["background"] == "white":  # that of earlier versions, whose plans and records do not name it
        del image["background"]
    return {"image": image | _BUILT_IN["image"], "guard": guard | _BUILT_IN["guard"]}


def expected_manifest(folder: Folder, plan: Plan) -> Manifest:
    """The manifest of a finished download, from the plan and the records.

    Raises:
        UserError: Shards are missing, damaged or made with other settings, or no URL gave a sample.
    """
    finished = folder.finished()
    missing = sorted(set(range(plan.shards)) - set(finished))
    if missing:
        raise UserError(
            f"{len(missing):,} of {plan.shards:,} shards of {folder.root} are not finished, the first is "
            f"{missing[0]}: run the same `neuclip download` again first."
        )
    records = [folder.read_record(shard) for shard in finished]
    origin = (plan.digest, plan.rules_digest)
    if other := [record.shard for record in records if (record.plan, record.rules) != origin]:
        raise UserError(
            f"Shards {other[:5]} in {folder.root} were made from another URL list, or with other image or guard "
            f"settings. {folder.repair_hint}"
        )
    failures = total_failures(records)
    rows = entries_of(records)
    if not rows:
        named = ", ".join(f"{reason}: {count:,}" for reason, count in failures.most_common())
        hints = "".join(f" Note: {hint}." for reason, hint in HINTS.items() if failures[reason])
        raise UserError(f"None of {plan.rows:,} URLs gave a sample ({named}): there is nothing to train on.{hints}")
    return make_manifest(rows, root=folder.root, failures=dict(failures), facts=_facts(plan, records))


def manifest_of_records(folder: Folder) -> Manifest:
    """The shards that have a readable record, as a manifest without provenance; there may be none."""
    records = []
    for shard in folder.finished():
        with contextlib.suppress(UserError):
            records.append(folder.read_record(shard))
    return make_manifest(entries_of(records), root=folder.root)


def entries_of(records: list[ShardRecord]) -> list[tuple[str, int, int, str]]:
    """The shards that have samples, as a manifest lists them: name, samples, bytes and SHA-256."""
    return [(tar_name(r.shard), r.samples, r.bytes, r.sha256) for r in records if r.samples]


def _facts(plan: Plan, records: list[ShardRecord]) -> dict[str, Any]:
    """The origin of the shards, without dates, durations or machine names: the same inputs give the same manifest."""
    source = {k: v for k, v in plan.settings["source"].items() if v not in (None, [], {})}
    transparent = sum(record.transparent for record in records)
    names = dict.fromkeys([*TOOLS, *sorted({name for record in records for name in record.tools})])
    versions = {name: sorted({record.tools[name] for record in records if name in record.tools}) for name in names}
    return {
        "source": source,
        "source_rows": plan.seen,
        **({"source_rows_skipped": plan.skipped} if plan.skipped else {}),
        **({"source_sha256": {name: file["sha256"] for name, file in plan.files.items()}} if plan.files else {}),
        "subset": plan.settings["subset"],
        "urls": plan.rows,
        "urls_digest": plan.digest,
        **plan.rules,
        "tools": {name: ", ".join(used) for name, used in versions.items() if used},
        **({"counts": {"transparent": transparent}} if transparent else {}),
    }


def local_manifest(root: str | Path, *, allow_outside: bool = False) -> Manifest:
    """Load the manifest of a local folder; `allow_outside` as for `load_manifest`.

    Raises:
        UserError: The folder or any of its shards is not on this machine.
    """
    if "://" in str(root):
        raise UserError(f"{root} is not a folder on this machine: copy the data set here, or mount it, and check that.")
    manifest = load_manifest(root, allow_outside=allow_outside)
    remote = [shard.name for shard in manifest.shards if ":" in shard.name]
    if remote:
        raise UserError(
            f"{len(remote):,} of {len(manifest.shards):,} shards of {root} are elsewhere, such as {remote[0]!r}; only "
            "local folders are checked. Copy the data set here, or check it where it was made."
        )
    return manifest
