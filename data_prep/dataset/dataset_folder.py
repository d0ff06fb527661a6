"""The folder of one data set: where each file is, and the record that marks a shard as finished.

manifest.json           what training reads
report.html             the page
shards/00000.tar        the samples
index/                  where the members of each shard are, by its SHA-256
meta/00000.parquet      one row per URL of that shard, with its outcome
meta/00000.json         the shard's record; a shard without one is not finished
meta/00000.commit       present while the files of a shard are replaced, see commit.py
plan/                   the URL list after subsetting, one row group per shard, and plan.json
download.yaml           the settings, resolved
removed.txt             uids, URLs, hashes or keys that are excluded permanently
removal.pending         present while a removal replaces files, see commit.py
staging/                unfinished work; may be deleted when no process is running
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pydantic

from data_prep.download_config import HASH_KINDS
from pipeline.errors import UserError
from pipeline.files import NotAFile, read_bounded, regular, sha256_of, text_lines

REPORT_NAME = "report.html"

_HEX = re.compile(r"(?:[0-9a-fA-F]{32}|[0-9a-fA-F]{64}|[0-9a-fA-F]{128})")


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard: `rows = samples + sum(failures)`. A shard without samples has no tar and no SHA-256."""

    shard: int
    plan: str
    """Digest of the URL list that the shard belongs to."""
    rows: int
    samples: int
    bytes: int
    sha256: str
    failures: Mapping[str, int]
    meta_sha256: str = ""
    """SHA-256 of the meta file; empty in data sets that earlier versions of `neuclip pairs` made."""
    rules: str = ""
    """Digest of the settings that determine its samples, see `rules_of`; empty for `neuclip pairs`."""
    tools: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that encoded its images."""
    transparent: int = 0
    """Images that had transparent pixels when they were downloaded."""

    def text(self) -> str:
        """The record as stored, with failures sorted by name."""
        return stored_text({**asdict(self), "failures": dict(sorted(self.failures.items()))})


_RECORD = pydantic.TypeAdapter(ShardRecord)


def stored_text(tree: Mapping[str, Any]) -> str:
    """The text of a JSON file with this content."""
    return json.dumps(tree, indent=1) + "\n"


class Folder:
    """Paths in the folder of one data set; each worker has its own staging folder."""

    def __init__(self, root: Path, worker: int = 0) -> None:
        self.root, self.worker = root, worker
        self.plan = root / "plan"
        self.locks = root / "staging"
        self.staging = self.locks / f"worker-{worker}"
        self.config = root / "download.yaml"
        self.removed = root / "removed.txt"
        self.pending_removal = root / "removal.pending"
        self._contents = root / "shards", root / "meta", self.plan

    @property
    def is_download(self) -> bool:
        """Whether `neuclip download` made the folder."""
        return self.config.exists() or (self.plan / "plan.json").exists()

    @property
    def is_converted(self) -> bool:
        """Whether `neuclip pairs` made the folder, or a recipe that works like it."""
        return (self.plan / "pairs.json").exists()

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

    def files(self, shard: int) -> tuple[Path, Path, Path]:
        """The record, the tar and the meta file of a shard."""
        return self.record(shard), self.tar(shard), self.meta(shard)

    def number_of(self, name: str) -> int | None:
        """The shard that a file with this name below the folder belongs to."""
        stem = Path(name).stem
        number = int(stem) if stem.isdecimal() else -1
        return number if number >= 0 and self.root / name in self.files(number) else None

    def make(self) -> None:
        for path in (*self._contents, self.staging):
            path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the folder. If the block refuses its input before it has written a file, what is new is removed."""
        new = [path for path in (*self._contents, self.locks, self.root) if not path.exists()]
        self.make()
        try:
            yield
        except UserError:
            if not any(any(path.glob("*")) for path in self._contents):
                for path in new:
                    if path == self.locks:
                        shutil.rmtree(path, ignore_errors=True)
                    with suppress(OSError):  # one in which somebody has put a file stays
                        path.rmdir()
            raise

    def numbered(self, suffix: str) -> list[int]:
        """The shards that have a file with this suffix in `meta/`, in order."""
        names = (path.name for path in (self.root / "meta").glob(f"*{suffix}"))
        return sorted(int(stem) for name in names if (stem := name.removesuffix(suffix)).isdecimal())

    def finished(self) -> list[int]:
        """The shards that have a record, in order."""
        return self.numbered(".json")

    def read_record(self, shard: int) -> ShardRecord:
        """Read the record of a shard.

        Raises:
            UserError: The record is missing or damaged.
        """
        path = self.record(shard)
        try:
            record = _RECORD.validate_json(read_bounded(path), strict=True)
            if record.shard != shard or record.rows != record.samples + sum(record.failures.values()):
                raise ValueError("its numbers do not add up, or it is that of another shard")
        except (FileNotFoundError, NotAFile, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}). {self.repair_hint}") from error
        return record

    def check_tars(self, shards: Iterable[int]) -> None:
        """Compare the tars of finished shards with their records, without reading them.

        Raises:
            UserError: One is missing or of another size, or a record is damaged.
        """
        for record in map(self.read_record, shards):
            path = self.tar(record.shard)
            size = path.stat().st_size if path.is_file() else None
            if record.samples and size != record.bytes:
                what = "is missing" if size is None else f"has {size:,} bytes instead of {record.bytes:,}"
                raise UserError(f"{path} {what}: {self.repair_hint}")

    @property
    def repair_hint(self) -> str:
        """Advice on how to repair damaged files, for messages."""
        if self.is_download or self.is_converted:
            return (
                f"`neuclip verify {shlex.quote(str(self.root))} --delete-damaged` deletes what is damaged; the same "
                f"`neuclip {'download' if self.is_download else 'pairs'}` then makes it again."
            )
        return "Copy it again from its source; if its contents change, run `neuclip manifest --replace`."

    def removed_names(self) -> frozenset[str]:
        """The uids, URLs, hashes and keys to exclude; errors as for `read_lines`."""
        # A link to a disk that is not there is no empty list.
        return read_lines(self.removed, opener=regular) if os.path.lexists(self.removed) else frozenset()


def read_lines(path: Path, *, opener: Callable[[str, int], int] | None = None) -> frozenset[str]:
    """Read the stripped, non-empty lines of a text file, hashes in lower case; `opener` is that of `open`.

    Raises:
        UserError: The file is not UTF-8 text, a link to nothing, or refused by the opener.
    """
    try:
        with open(path, encoding="utf-8-sig", opener=opener) as file:  # some editors write a mark of three bytes first
            lines = text_lines(file.read())
    except (FileNotFoundError, NotAFile, ValueError) as error:
        raise UserError(f"{path} is not a UTF-8 text file with one name a line ({error}).") from error
    return frozenset(as_stored(lines))


def as_stored(names: Iterable[str]) -> set[str]:
    """Names of samples as they are compared: without outer spaces, hashes and hexadecimal uids in lower case."""
    return {name.lower() if _HEX.fullmatch(name) else name for name in map(str.strip, names) if name}


def read_meta(folder: Folder, shard: int, columns: list[str] | None = None) -> Any:
    """Read the meta file of a shard, or those of the `columns` that it has, as a pyarrow Table.

    Raises:
        UserError: The file is missing or damaged, or another shard's.
    """
    path = folder.meta(shard)
    try:
        recorded = folder.read_record(shard).meta_sha256
        if recorded and (digest := sha256_of(path)) != recorded:
            raise OSError(f"SHA-256 {digest[:16]}... instead of {recorded[:16]}...")
        with open(path, "rb", opener=regular) as opened:
            file = pq.ParquetFile(opened, page_checksum_verification=True)
            present = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
            return file.read(columns=present)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} is missing or differs from its record ({error}). {folder.repair_hint}") from error


def tar_name(shard: int) -> str:
    """A shard's name in the manifest."""
    return f"shards/{shard:05d}.tar"


def key_of(row: int) -> str:
    """A sample's key, derived from its row in the plan: unique, and stable across retries."""
    return f"{row:010d}"


def names_of(row: Mapping[str, Any]) -> set[str]:
    """The names (URL, uid, key, hashes) under which a row can be removed."""
    names = (row["url"], row.get("uid"), key_of(row["row"]), *(row.get(kind) for kind in HASH_KINDS))
    return as_stored(filter(None, names))


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings in `new` that `old` has another value for, in words."""
    return [f"{key} was {old.get(key)!r} and is now {value!r}" for key, value in new.items() if old.get(key) != value]


def total_failures(records: list[ShardRecord]) -> Counter[str]:
    """Failures by reason over all records."""
    return sum((Counter(record.failures) for record in records), Counter[str]())
