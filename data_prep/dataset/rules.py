"""The settings that determine a shard's samples; all shards of a set must be made with the same ones."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from typing import Any

from data_prep.dataset.dataset_folder import ShardRecord
from data_prep.settings.download_config import DownloadConfig
from pipeline.config import to_tree

# Settings of how servers are requested, which may change between runs. (The user agent is not among them, because
# opt-outs may address it.)
_MANNERS = ("contact", "host_connections", "backoff", "max_backoff")
_TOOLS = ("img2dataset", "opencv-python-headless", "albumentations", "pyarrow")


def rules_of(config: DownloadConfig) -> dict[str, dict[str, Any]]:
    """The sections of the configuration that determine the samples, without settings that may change between runs."""
    guard = {name: value for name, value in to_tree(config.guard).items() if name not in _MANNERS}
    return {"image": to_tree(config.image), "guard": guard}


def digest_of(rules: Mapping[str, Any]) -> str:
    """A digest of the rules."""
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()[:16]


def has_rules(record: ShardRecord, rules: Mapping[str, Any]) -> bool:
    """Whether a shard was made with these rules; records and plans of versions before 0.2 do not say."""
    return not record.rules or record.rules == (digest_of(rules) if rules else "")


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Describe the differences between two trees of sections."""
    found = []
    for section in sorted({*old, *new}):
        before, after = old.get(section, {}), new.get(section, {})
        found += [
            f"{section}.{key} was {before.get(key)!r} and is now {after.get(key)!r}"
            for key in sorted({*before, *after})
            if before.get(key) != after.get(key)
        ]
    return found


def tool_versions() -> dict[str, str]:
    """Installed versions of the packages that determine a sample's bytes."""
    return {name: importlib.metadata.version(name) for name in _TOOLS}


def versions_used(records: Iterable[ShardRecord]) -> dict[str, str]:
    """The versions that the shards of a set were made with; several of one package are joined by commas."""
    used: dict[str, set[str]] = {name: set() for name in _TOOLS}
    for record in records:
        for name, version in record.tools.items():
            used.setdefault(name, set()).add(version)
    return {name: ", ".join(sorted(versions)) for name, versions in used.items() if versions}
