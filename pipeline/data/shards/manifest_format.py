"""The manifest of a folder of webdataset shards, which also gives every sample its integer id.

Ingestion writes it and training reads it; it is the one format that `data_prep` and `pipeline` share. Ids are
positions: sample k of a shard has id `shard.offset + k`, and ids run over `[0, n)` in the order of the shards.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shlex
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.shards.storage import index_path, is_index, is_local, save_index, scan_members
from pipeline.data.shards.tar_reader import DamagedTar, keys
from pipeline.errors import UserError
from pipeline.files import read_bounded, regular, replacing
from pipeline.run_files import RUN_CONFIG_NAME

Int64 = NDArray[np.int64]
MANIFEST_NAME = "manifest.json"
MOST_BYTES = 2**32
"""Of a manifest, whose shards take some 200 bytes each."""
JOURNAL = "manifest.partial.jsonl"
"""Of a scan for a manifest that was stopped."""
FORMAT, VERSION = "neuclip-manifest", 1
SHOWN = 3
REMOTE = frozenset({
    "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "hf", "hdfs", "webhdfs", "http", "https",
})  # fmt: skip
"""URL schemes that a manifest may name without the user's consent: they read from servers only."""


def is_outside(name: str) -> bool:
    """Whether a shard's name in a manifest is a file outside of the manifest's folder, or a URL that can be one.

    Such URLs are `file://`, chains such as `simplecache::`, and schemes other than those in `REMOTE`.
    """
    scheme, separator, _ = name.partition("://")
    if separator and "::" not in name:
        return scheme.lower() not in REMOTE
    path = os.path.normpath(name)
    return ":" in name or os.path.isabs(path) or path.split(os.sep)[0] == os.pardir


def refuse_commands(names: Iterable[str]) -> None:
    """Refuse shards that are the output of shell commands, which earlier versions ran."""
    if name := next((name for name in names if name.startswith("pipe:")), None):
        raise UserError(
            f"The shard {name!r} is a shell command, which is not run any more. Name shards by URLs: `neuclip manifest "
            "FOLDER --replace --shards 's3://bucket/{00000..00099}.tar'` (also gs://, https:// and others), or copy "
            "them to this machine."
        )


@dataclass(frozen=True)
class Shard:
    """One tar file. `name` is a path relative to the manifest's folder, or a URL."""

    name: str
    samples: int
    bytes: int
    sha256: str
    offset: int


class ShardTable:
    """An immutable sequence of shards, in columns, which take less memory than objects.

    It is made of `(name, samples, bytes, sha256)` of each shard, in order. Values of a wrong kind or size raise
    TypeError or OverflowError.
    """

    def __init__(self, rows: Iterable[tuple[str, int, int, str]]) -> None:
        names, samples, sizes, digests = list(zip(*rows, strict=True)) or [()] * 4
        if not all(isinstance(text, str) and "\0" not in text for text in (*names, *digests)):
            raise TypeError("a name or hash of a shard is no text, or holds a zero byte")
        self._names, self._digests = names, digests
        self.samples: Int64 = np.frombuffer(array("q", samples), np.int64)
        """Samples of each shard, [m]."""
        self.bytes: Int64 = np.frombuffer(array("q", sizes), np.int64)
        """Size of each shard, [m]."""
        self.offsets: Int64 = np.cumsum(self.samples) - self.samples
        """Id of each shard's first sample, [m]."""

    @functools.cached_property
    def content_digest(self) -> str:
        """SHA-256 of samples and hashes, in order: shards may be moved without changing it."""
        return _digest(f"{shard.samples} {shard.sha256 or shard.name}" for shard in self)

    @functools.cached_property
    def outside(self) -> list[str]:
        """Names of the shards that need the user's consent, see `is_outside`."""
        return [name for name in self._names if is_outside(name)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Shard:
        numbers = int(self.samples[index]), int(self.bytes[index])
        return Shard(self._names[index], *numbers, self._digests[index], int(self.offsets[index]))

    def __iter__(self) -> Iterator[Shard]:
        return map(self.__getitem__, range(len(self)))


def _digest(lines: Iterable[str]) -> str:
    hashed, separator = hashlib.sha256(), ""
    for line in lines:
        hashed.update((separator + line).encode())
        separator = "\n"
    return hashed.hexdigest()


@dataclass(frozen=True)
class Manifest:
    """Shards in id order, and their provenance."""

    shards: ShardTable
    root: str = "."
    """The folder that relative names refer to."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """URLs that gave no sample, by reason."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Free-form provenance (source, revision, seed, tool versions) that no code depends on."""

    @functools.cached_property
    def n(self) -> int:
        """Number of samples."""
        return int(self.shards.samples.sum())

    @functools.cached_property
    def bytes(self) -> int:
        """Size of all shards."""
        return int(self.shards.bytes.sum())

    @property
    def attempted(self) -> int:
        """What ingestion tried, samples and failures; see `counted`."""
        return self.n + sum(self.failures.values())

    @property
    def counted(self) -> str:
        """What `attempted` counts: URLs (of `neuclip download`), rows (`pairs`) or samples (`manifest`)."""
        if "urls" in self.facts:
            return "URLs"
        return "rows" if self.facts.get("made by") == "neuclip pairs" else "samples"

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the shard list: manifests with equal digests give the same ids to the same samples."""
        return _digest(f"{shard.name} {shard.samples} {shard.sha256}" for shard in self.shards)

    def shard_of(self, sample_id: int) -> Shard:
        """The shard of a sample."""
        return self.shards[int(np.searchsorted(self.shards.offsets, sample_id, side="right")) - 1]

    def url(self, shard: Shard) -> str:
        """Where to read a shard: a path below `root`, or the name itself if that is a URL."""
        return shard_url(self.root, shard.name)

    def save(self, folder: str | Path) -> Path:
        """Write `manifest.json` atomically, and the indexes of shards that have none.

        `root` is not stored, so that the folder can be moved.
        """
        path = Path(folder) / MANIFEST_NAME
        with replacing(path, durable=True) as temporary:
            self.write_to(temporary)
        replace(self, root=str(folder)).update_indexes()
        return path

    def update_indexes(self) -> None:
        """Write the indexes of local shards that have none, and delete those of other shards.

        A shard that is missing or damaged gets none: whatever reads it reports that. In a linked folder nothing is
        deleted: it may be that of other shards.
        """
        folder = index_path(self.root, "").parent
        present: set[str] = set()
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            present = {entry.name for entry in entries if is_index(entry.name) and entry.is_file(follow_symlinks=False)}
        for shard in self.shards:
            name, url = f"{shard.sha256}.members", self.url(shard)
            if name not in present and is_index(name) and is_local(url):
                with contextlib.suppress(DamagedTar, OSError):
                    save_index(self.root, scan_members(Path(url)), sha256=shard.sha256)
            present.discard(name)
        for name in present if not folder.is_symlink() else ():
            with contextlib.suppress(OSError):
                (folder / name).unlink()

    def write_to(self, path: Path) -> None:
        """Write the manifest alone to this path."""
        header = {
            "format": FORMAT,
            "version": VERSION,
            "samples": self.n,
            "attempted": self.attempted,
            "digest": self.digest,
            "failures": dict(sorted(self.failures.items(), key=lambda item: (-item[1], item[0]))),
            "facts": dict(self.facts),
        }
        with path.open("w", encoding="utf-8") as file:
            json.dump({**header, "shards": [asdict(shard) for shard in self.shards]}, file, indent=1)
            file.write("\n")


def shard_url(root: str | Path, name: str) -> str:
    """Where to read the shard with this name in a manifest whose folder is `root`."""
    return name if ":" in name else os.path.join(root, name)


def make_manifest(
    entries: Iterable[tuple[str, int, int, str]],
    *,
    root: str | Path = ".",
    failures: Mapping[str, int] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Manifest:
    """A manifest from `(name, samples, bytes, sha256)` rows in order; `load_manifest` refuses empty shards."""
    return Manifest(ShardTable(entries), str(root), failures or {}, facts or {})


def load_manifest(path: str | Path, *, allow_outside: bool = False) -> Manifest:
    """Read and check a manifest, given its path or its folder.

    `allow_outside` is whether its shards may be files outside of its folder, see `is_outside`. A manifest comes from
    whoever made the data, so only the user may say so.

    Raises:
        UserError: It is missing, of another format or version, contradicts itself, or has shards in places that are
            not allowed.
    """
    if "://" in str(path):
        raise UserError(
            f"{path} is a URL, but a manifest must be a local file. Its shards may be anywhere: `neuclip manifest "
            "FOLDER --shards 's3://bucket/{00000..00099}.tar'`."
        )
    path = Path(path, MANIFEST_NAME) if Path(path).is_dir() else Path(path)
    try:
        manifest = _read(path)
    except OSError as error:
        if path.exists():
            raise UserError(f"The manifest {path} cannot be read: {error.strerror}.") from error
        raise UserError(f"There is no manifest at {path}. {advice(path)}") from error
    refuse_commands(outside := manifest.shards.outside)
    if outside and not allow_outside:
        raise UserError(
            f"{path} lists {len(outside):,} shards outside of its folder, such as "
            f"{', '.join(map(repr, outside[:SHOWN]))}, and could read any file of yours so. If you wrote this "
            "manifest or trust whoever did, set data.allow_outside=true (--allow-outside in `neuclip score`, `doctor` "
            "and `verify`)."
        )
    return manifest


def advice(path: Path) -> str:
    """Which command makes training data of a folder or file, or in place of a manifest that is missing or damaged."""
    folder = path.parent if path.name == MANIFEST_NAME else path
    quoted = shlex.quote(str(folder))
    if path.name == MANIFEST_NAME and path.is_file():
        return "The same `neuclip download` writes it again, or `neuclip manifest --replace` does."
    if (folder / "download.yaml").is_file():
        return "The download is not finished: run the same `neuclip download` again, which continues."
    if path.suffix == ".tar" and path.is_file():
        return f"It is a shard: give its folder, after `neuclip manifest {shlex.quote(str(path.parent))}`."
    if (folder / RUN_CONFIG_NAME).is_file():
        return f"It is the folder of a run: `neuclip doctor {quoted}` checks a run. Give the folder of its data."
    if any(name.suffix == ".tar" for name in islice(folder.rglob("*"), 10_000)):  # it may have millions of files
        return (
            f"`neuclip manifest {quoted}` writes one for the webdataset shards there, and they stay as they are; "
            f"`neuclip pairs {quoted} --output FOLDER` makes new shards of them."
        )
    text, source = ("", quoted) if folder.exists() else ("There is no such file or folder. ", "SOURCE")
    return (
        f"{text}`neuclip pairs {source} --output FOLDER` makes shards of image-text pairs, `neuclip download` of a "
        "table of URLs; then train with data.sources=FOLDER."
    )


def _read(path: Path) -> Manifest:
    try:
        tree = json.loads(read_bounded(path, most=MOST_BYTES).decode())
        if (tree["format"], tree["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {tree['format']!r}, version {tree['version']!r}, not {FORMAT!r}, {VERSION}")
        rows = tree["shards"]
        table = ShardTable((row["name"], row["samples"], row["bytes"], row["sha256"]) for row in rows)
        manifest = Manifest(table, str(path.parent), tree["failures"], tree["facts"])
        if not len(table) or table.samples.min() < 1:
            raise ValueError(f"it lists {len(table)} shards, of which {(table.samples < 1).sum()} are empty")
        offsets_fit = table.offsets.tolist() == [row["offset"] for row in rows]
        if not offsets_fit or tree["samples"] != manifest.n or tree["digest"] != manifest.digest:
            raise ValueError("its counts, offsets and digest contradict each other: it was edited or truncated")
        return manifest
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} is not a manifest, or is damaged ({why}). {advice(path)}") from error


def check_keys(manifest: Manifest, shards: Iterable[Shard]) -> None:
    """Raise a UserError if a key names several samples of a shard; remote and damaged shards are passed over."""
    for shard in shards:
        seen = set[str]()
        with contextlib.suppress(DamagedTar, OSError), open(manifest.url(shard), "rb", opener=regular) as file:
            for key in keys(file):
                if key in seen:
                    raise UserError(
                        f"{shard.name} has several samples with the key {key!r}, so that a list of keys cannot say "
                        "which of them to remove. Write the shard with a key of its own for each sample; nothing was "
                        "changed."
                    )
                seen.add(key)
