"""The manifest of a finished data set: what its shards hold and where they came from."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from data_prep.dataset.dataset_folder import Folder, tar_name, total_failures
from data_prep.dataset.shard_plan import Plan
from data_prep.reasons import ALLOW_HINT, REFUSED_ADDRESS
from data_prep.settings.download_config import DownloadConfig
from pipeline.config import to_tree
from pipeline.data.shards.manifest_format import Manifest, make_manifest
from pipeline.errors import UserError

# Packages whose versions decide over the bytes of a shard; recorded in the manifest.
_TOOLS = ("img2dataset", "opencv-python-headless", "albumentations", "pyarrow")


def write_manifest(config: DownloadConfig, folder: Folder, plan: Plan) -> Manifest:
    """The manifest of all finished shards, written into the folder.

    Raises: UserError when no URL gave a sample, or a record belongs to another URL list.
    """
    records = [folder.read_record(shard) for shard in folder.finished()]
    foreign = [record.shard for record in records if record.plan != plan.digest]
    if foreign:
        raise UserError(f"Shards {foreign[:5]} in {folder.root} were made from another URL list: remove them.")
    failures = total_failures(records)
    rows = [(tar_name(r.shard), r.samples, r.bytes, r.sha256) for r in records if r.samples]
    if not rows:
        named = ", ".join(f"{reason}: {count:,}" for reason, count in failures.most_common())
        hint = f" Note that {ALLOW_HINT}." if failures[REFUSED_ADDRESS] else ""
        raise UserError(f"None of {plan.rows:,} URLs gave a sample ({named}): there is nothing to train on.{hint}")
    manifest = make_manifest(rows, root=folder.root, failures=dict(failures), facts=_facts(config, plan))
    manifest.save(folder.root)
    return manifest


def _facts(config: DownloadConfig, plan: Plan) -> dict[str, Any]:
    """What the shards came from. No dates, durations or machine names: the same inputs give the same manifest."""
    source = {k: v for k, v in to_tree(config.source).items() if v not in (None, [], {})}
    return {
        "source": source,
        "source_rows": plan.seen,
        **({"source_rows_skipped": plan.skipped} if plan.skipped else {}),
        "subset": to_tree(config.subset),
        "urls": plan.rows,
        "urls_digest": plan.digest,
        "image": to_tree(config.image),
        "guard": to_tree(config.guard),
        "tools": {name: importlib.metadata.version(name) for name in _TOOLS},
    }
