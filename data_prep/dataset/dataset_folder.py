"""The folder of one data set: where each file lies, and the record that says a shard is finished.

manifest.json           what training reads
report.html datasheet.md
shards/00000.tar        published by rename when whole
meta/00000.parquet      one row per URL of that shard: what became of it
meta/00000.json         the shard's record; written last, so that it means "finished"
plan/                   the URL list after subsetting, one row group per shard, and plan.json
download.yaml           the settings, resolved
sessions.jsonl          when and where each run worked: dates live here, not in the manifest
removed.txt             uids, URLs, hashes or keys to keep out, for good
staging/                unfinished work; may be deleted when nothing runs
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from data_prep.settings.download_config import DownloadConfig
from pipeline.config import parse, read_yaml
from pipeline.data.shards.manifest_format import Manifest, load_manifest
from pipeline.errors import UserError
from pipeline.files import write_json


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard. `rows = samples + sum(failures)`; a shard without samples has no tar and no SHA-256."""

    shard: int
    plan: str
    rows: int
    samples: int
    bytes: int
    sha256: str
    failures: Mapping[str, int]

    @property
    def success(self) -> float:
        return self.samples / self.rows if self.rows else 1.0


@dataclass(frozen=True)
class Folder:
    """Paths below one data set's folder; each of several workers has a staging folder of its own."""

    root: Path
    worker: int = 0

    @property
    def plan(self) -> Path:
        return self.root / "plan"

    @property
    def staging(self) -> Path:
        return self.locks / f"worker-{self.worker}"

    @property
    def locks(self) -> Path:
        return self.root / "staging"

    @property
    def config(self) -> Path:
        return self.root / "download.yaml"

    @property
    def sessions(self) -> Path:
        return self.root / "sessions.jsonl"

    @property
    def removed(self) -> Path:
        return self.root / "removed.txt"

    def tar(self, shard: int) -> Path:
        return self.root / tar_name(shard)

    def meta(self, shard: int) -> Path:
        return self.root / "meta" / f"{shard:05d}.parquet"

    def record(self, shard: int) -> Path:
        return self.root / "meta" / f"{shard:05d}.json"

    def make(self) -> None:
        for path in (self.root / "shards", self.root / "meta", self.plan, self.staging):
            path.mkdir(parents=True, exist_ok=True)

    def finished(self) -> list[int]:
        """The shards that have a record, in order."""
        return sorted(int(path.stem) for path in (self.root / "meta").glob("*.json"))

    def read_record(self, shard: int) -> ShardRecord:
        return ShardRecord(**json.loads(self.record(shard).read_text(encoding="utf-8")))

    def write_record(self, record: ShardRecord) -> None:
        failures = dict(sorted(record.failures.items()))
        write_json(self.record(record.shard), {**asdict(record), "failures": failures})

    def withdraw(self, shard: int) -> None:
        """Take a shard back, record first, so that it is fetched again."""
        for path in (self.record(shard), self.tar(shard), self.meta(shard)):
            path.unlink(missing_ok=True)

    def removed_names(self) -> frozenset[str]:
        """The uids, URLs, hashes and keys to keep out."""
        if not self.removed.exists():
            return frozenset()
        lines = self.removed.read_text(encoding="utf-8").splitlines()
        return frozenset(line.strip() for line in lines if line.strip())


def load_config(root: str | Path) -> DownloadConfig:
    """The settings that a data set was made with. Raises: UserError when it was not made by `neuclip download`."""
    folder = Folder(Path(root).absolute())
    if not folder.config.exists():
        raise UserError(f"{root} has no {folder.config.name}: it was not made by `neuclip download`.")
    return replace(parse(DownloadConfig, read_yaml(folder.config)), output=str(folder.root))


def tar_name(shard: int) -> str:
    """A shard's name in the manifest."""
    return f"shards/{shard:05d}.tar"


def key_of(row: int) -> str:
    """A sample's key: its row in the plan, so that keys are unique and stay through retries."""
    return f"{row:010d}"


def local_manifest(root: str | Path) -> Manifest:
    """The manifest of a folder on this machine. Raises: UserError when it, or any of its shards, lies elsewhere."""
    if "://" in str(root):
        raise UserError(f"{root} is not a folder on this machine: copy the data set here, or mount it, and check that.")
    manifest = load_manifest(root)
    remote = [shard.name for shard in manifest.shards if ":" in shard.name]  # a URL or `pipe:`
    if remote:
        raise UserError(
            f"{len(remote):,} of {len(manifest.shards):,} shards of {manifest.root} lie elsewhere, such as "
            f"{remote[0]!r}; only local folders are checked. Copy the data set here, or check it where it was made."
        )
    return manifest


def names_of(row: Mapping[str, Any]) -> set[str]:
    """The names by which a row of the plan can be kept out before it is fetched: URL, uid and key."""
    return {name for name in (row["url"], row.get("uid"), key_of(row["row"])) if name}


def total_failures(records: list[ShardRecord]) -> Counter[str]:
    """Failures by reason over all records."""
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.failures)
    return total
