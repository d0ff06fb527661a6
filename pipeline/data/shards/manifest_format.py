"""The manifest of a folder of webdataset shards, which also gives every sample its integer id.

Ingestion writes it and training reads it; it is the one format that `data_prep` and `pipeline` share. Ids are
positions: sample k of a shard has id `shard.offset + k`, and ids run over `[0, n)` in the order of the shards.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.shards.json_stream import read_object, write_object
from pipeline.data.shards.other_forms import advice
from pipeline.data.shards.shard_table import Shard as Shard
from pipeline.data.shards.shard_table import ShardTable, ShardTableBuilder, shared_table
from pipeline.errors import UserError
from pipeline.files import replacing

Int64 = NDArray[np.int64]

MANIFEST_NAME = "manifest.json"
FORMAT = "neuclip-manifest"
VERSION = 1
SHARED_BYTES = 1 << 18
"""A manifest of this size, about 1,400 shards, is parsed once per node; its processes share the result."""
# The image formats that PIL may open. Shards hold untrusted bytes, and PIL supports more formats, one of which (EPS)
# would run Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


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
    def offsets(self) -> Int64:
        """Id of each shard's first sample."""
        return self.shards.offsets

    @property
    def attempted(self) -> int:
        """What ingestion tried, samples and failures; see `counted`."""
        return self.n + sum(self.failures.values())

    @property
    def counted(self) -> str:
        """What `attempted` counts: URLs (`neuclip download`), rows (`neuclip pairs`), or samples of shards that were
        there before."""
        if "urls" in self.facts:
            return "URLs"
        return "rows" if self.facts.get("made by") == "neuclip pairs" else "samples"

    @property
    def digest(self) -> str:
        """SHA-256 of the shard list: manifests with equal digests give the same ids to the same samples."""
        return self.shards.digest

    def locate(self, sample_id: int) -> tuple[Shard, int]:
        """The shard of a sample and the sample's position in it.

        Raises:
            IndexError: `sample_id` is outside [0, n).
        """
        if not 0 <= sample_id < self.n:
            raise IndexError(f"sample id {sample_id} is outside [0, {self.n})")
        shard = self.shards[int(np.searchsorted(self.offsets, sample_id, side="right")) - 1]
        return shard, sample_id - shard.offset

    def url(self, shard: Shard) -> str:
        """Where to read a shard: a path below `root`, or the name itself if that is a URL or `pipe:` command."""
        return shard_url(self.root, shard.name)

    def save(self, folder: str | Path) -> Path:
        """Write `manifest.json` atomically; `root` is not stored, so that the folder can be moved."""
        path = Path(folder) / MANIFEST_NAME
        header = {
            "format": FORMAT,
            "version": VERSION,
            "samples": self.n,
            "attempted": self.attempted,
            "digest": self.digest,
            "failures": dict(sorted(self.failures.items(), key=lambda item: (-item[1], item[0]))),
            "facts": dict(self.facts),
        }
        with replacing(path, durable=True) as temporary, temporary.open("w", encoding="utf-8") as file:
            write_object(file, header, items_of="shards", items=(asdict(shard) for shard in self.shards))
        return path


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
    table = ShardTableBuilder(entries).build()
    return Manifest(shards=table, root=str(root), failures=failures or {}, facts=facts or {})


def load_manifest(path: str | Path) -> Manifest:
    """Read and check a manifest, given its path or its folder.

    Raises:
        UserError: it is missing, of another format or version, or contradicts itself.
    """
    if "://" in str(path):
        raise UserError(
            f"{path} is a URL, but a manifest must be a local file. Its shards may be anywhere: `neuclip manifest "
            "FOLDER --shards 's3://bucket/{00000..00099}.tar'`."
        )
    path = Path(path)
    if path.is_dir():
        path = path / MANIFEST_NAME
    try:
        status = path.stat()
        if status.st_size < SHARED_BYTES:
            table, about = _read(path)
        else:
            topic = "manifest-" + hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:16]
            table, about = shared_table(topic, f"{status.st_size}-{status.st_mtime_ns}", lambda: _read(path))
    except OSError as error:
        raise UserError(f"There is no manifest at {path}. {advice(path)}") from error
    return Manifest(shards=table, root=str(path.parent), failures=about["failures"], facts=about["facts"])


def _read(path: Path) -> tuple[ShardTable, dict[str, Any]]:
    """Parse and check a manifest; a large one never is in memory as a whole.

    Returns:
        The shards, and the mappings `failures` and `facts`.
    """
    builder, tree, consistent = ShardTableBuilder(), dict[str, Any](), True
    total = 0
    try:
        with path.open(encoding="utf-8") as file:
            for key, value in read_object(file, items_of="shards"):
                if key != "shards":
                    tree[key] = value
                    continue
                if not total:
                    _check_format({"format": FORMAT, "version": VERSION, **tree}, path)
                builder.add(value["name"], value["samples"], value["bytes"], value["sha256"])
                consistent &= value["offset"] == total and value["samples"] > 0
                total += value["samples"]
        _check_format(tree, path)
        table = builder.build()
        if not len(table) or min(table.samples) < 1:
            empty = [shard.name for shard in table if shard.samples < 1]
            raise UserError(f"{path} lists {len(table)} shards, of which {len(empty)} are empty ({empty[:3]}).")
        if not consistent or tree["samples"] != total or tree["digest"] != table.digest:
            raise UserError(
                f"{path} contradicts itself (counts, offsets or digest): it was edited or truncated. Write it again."
            )
        return table, {"failures": tree["failures"], "facts": tree["facts"]}
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path} is not a manifest ({error}). {advice(path)}") from error
    except (KeyError, TypeError) as error:
        raise UserError(
            f"The manifest {path} is damaged: it lacks {error}. `neuclip manifest` writes a new one."
        ) from error


def _check_format(tree: Mapping[str, Any], path: Path) -> None:
    if "format" not in tree and path.name != MANIFEST_NAME:
        raise UserError(f"{path} is not a manifest. {advice(path)}")
    if tree.get("format") != FORMAT or tree.get("version") != VERSION:
        raise UserError(
            f"{path} has format {tree.get('format')!r}, version {tree.get('version')!r}; "
            f"this program reads {FORMAT!r}, version {VERSION}."
        )
