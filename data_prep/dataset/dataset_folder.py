"""The folder of one data set: where each file is, and the record that marks a shard as finished.

manifest.json           what training reads
report.html datasheet.md
shards/00000.tar        the samples
meta/00000.parquet      one row per URL of that shard: what became of it
meta/00000.json         the shard's record; a shard without one is not finished
meta/00000.commit       a record that is about to take its place, see shard_commit.py
plan/                   the URL list after subsetting, one row group per shard, and plan.json
download.yaml           the settings, resolved
sessions.jsonl          when and where each run worked: dates are here, not in the manifest
removed.txt             uids, URLs, hashes or keys to keep out, for good
removal.pending         a removal has begun and is not finished
quarantine.txt          URLs whose image killed a worker twice
staging/                unfinished work; may be deleted when nothing runs
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from data_prep.settings.download_config import DownloadConfig
from pipeline.config import parse, read_yaml
from pipeline.data.shards.manifest_format import Manifest, load_manifest
from pipeline.errors import UserError
from pipeline.files import write_json


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard: `rows = samples + sum(failures)`. A shard without samples has no tar and no SHA-256."""

    shard: int
    plan: str
    """Digest of the URL list that it belongs to."""
    rows: int
    samples: int
    bytes: int
    sha256: str
    failures: Mapping[str, int]
    meta_sha256: str = ""
    """SHA-256 of the meta file; empty in records of versions before 0.2."""
    rules: str = ""
    """Digest of the settings that decide over its samples, see rules.py; empty before 0.2."""
    tools: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that made its images."""

    def tree(self) -> dict[str, Any]:
        """As plain values, failures in the order of their names."""
        return {**asdict(self), "failures": dict(sorted(self.failures.items()))}


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

    @property
    def pending_removal(self) -> Path:
        return self.root / "removal.pending"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine.txt"

    def tar(self, shard: int) -> Path:
        return self.root / tar_name(shard)

    def meta(self, shard: int) -> Path:
        return self.root / "meta" / f"{shard:05d}.parquet"

    def record(self, shard: int) -> Path:
        return self.root / "meta" / f"{shard:05d}.json"

    def plan_part(self, part: int) -> Path:
        return self.plan / f"part-{part:05d}.parquet"

    def commit(self, shard: int) -> Path:
        return self.root / "meta" / f"{shard:05d}.commit"

    def staged_tar(self, shard: int) -> Path:
        return self.root / f"{tar_name(shard)}.new"

    def staged_meta(self, shard: int) -> Path:
        return self.root / "meta" / f"{shard:05d}.parquet.new"

    def make(self) -> None:
        for path in (self.root / "shards", self.root / "meta", self.plan, self.staging):
            path.mkdir(parents=True, exist_ok=True)

    def numbered(self, where: str, suffix: str) -> list[int]:
        """The shards that have a file with this suffix in a folder, in order."""
        names = (path.name for path in (self.root / where).glob(f"*{suffix}"))
        return sorted(int(stem) for name in names if (stem := name.removesuffix(suffix)).isdigit())

    def finished(self) -> list[int]:
        """The shards that have a record, in order."""
        return self.numbered("meta", ".json")

    def read_record(self, shard: int) -> ShardRecord:
        """The record of a shard.

        Raises:
            FileNotFoundError: There is none.
            UserError: It is damaged.
        """
        path = self.record(shard)
        text = path.read_bytes()
        try:
            record = ShardRecord(**json.loads(text))
            if record.rows != record.samples + sum(record.failures.values()):
                raise ValueError("its numbers do not add up")
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({error}). {self.mend}") from error
        return record

    def write_record(self, record: ShardRecord) -> None:
        """Write a record in one step."""
        write_json(self.record(record.shard), record.tree())

    @property
    def mend(self) -> str:
        """What to do about damaged files, for messages."""
        return f"`neuclip verify {self.root} --rebuild` mends it."

    def withdraw(self, shard: int) -> None:
        """Take a shard back, record first, so that it is fetched again."""
        for path in (self.commit(shard), self.record(shard), self.tar(shard), self.meta(shard)):
            path.unlink(missing_ok=True)

    def removed_names(self) -> frozenset[str]:
        """The uids, URLs, hashes and keys to keep out."""
        return read_lines(self.removed)

    def quarantined(self) -> frozenset[str]:
        """URLs that are no longer requested because their image killed a worker twice."""
        return read_lines(self.quarantine)


def read_lines(path: Path) -> frozenset[str]:
    """The lines of a text file without blanks around them; none where there is no file.

    Raises:
        UserError: It is not text.
    """
    if not path.exists():
        return frozenset()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a UTF-8 text file with one name a line ({error}).") from error
    return frozenset(line.strip() for line in lines if line.strip())


def read_meta(folder: Folder, shard: int, columns: list[str] | None = None) -> Any:
    """The meta file of a shard as a pyarrow Table; of `columns`, those that it has.

    Raises:
        UserError: It is missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder.meta(shard)
    try:
        with pq.ParquetFile(path) as file:
            present = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
            return file.read(columns=present)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} is missing or damaged ({error}). {folder.mend}") from error


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
    """The manifest of a folder on this machine. Raises: UserError when it, or any of its shards, is elsewhere."""
    if "://" in str(root):
        raise UserError(f"{root} is not a folder on this machine: copy the data set here, or mount it, and check that.")
    manifest = load_manifest(root)
    check_local(manifest)
    return manifest


def check_local(manifest: Manifest) -> None:
    """Raises: UserError when any of a manifest's shards is elsewhere than on this machine."""
    remote = [shard.name for shard in manifest.shards if ":" in shard.name]  # a URL or `pipe:`
    if remote:
        raise UserError(
            f"{len(remote):,} of {len(manifest.shards):,} shards of {manifest.root} are elsewhere, such as "
            f"{remote[0]!r}; only local folders are checked. Copy the data set here, or check it where it was made."
        )


def names_of(row: Mapping[str, Any]) -> set[str]:
    """The names by which a row of the plan can be kept out before it is fetched: URL, uid and key."""
    return {name for name in (row["url"], row.get("uid"), key_of(row["row"])) if name}


def total_failures(records: list[ShardRecord]) -> Counter[str]:
    """Failures by reason over all records."""
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.failures)
    return total
