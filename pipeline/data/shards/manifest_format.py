"""The manifest of a folder of webdataset shards, which also gives every sample its integer id.

Ingestion writes it and training reads it; it is the one format that `data_prep` and `pipeline` share. Ids are
positions: sample k of a shard has id `shard.offset + k`, and ids run over `[0, n)` in the order of the shards.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.data.shards.other_forms import advice
from pipeline.errors import UserError
from pipeline.files import write_json

MANIFEST_NAME = "manifest.json"
FORMAT = "neuclip-manifest"
VERSION = 1
# The image formats that PIL may open. Shards hold untrusted bytes, and PIL supports more formats, one of which (EPS)
# would run Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


@dataclass(frozen=True)
class Shard:
    """One tar file. `name` is a path relative to the manifest's folder, a URL, or a `pipe:` command."""

    name: str
    samples: int
    bytes: int
    sha256: str
    offset: int


@dataclass(frozen=True)
class Manifest:
    """Shards in id order, and their provenance."""

    shards: tuple[Shard, ...]
    root: str = "."
    """The folder that relative names refer to."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """URLs that gave no sample, by reason."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Free-form provenance (source, revision, seed, tool versions) that no code depends on."""

    @functools.cached_property
    def n(self) -> int:
        """Number of samples."""
        return sum(shard.samples for shard in self.shards)

    @functools.cached_property
    def offsets(self) -> list[int]:
        return [shard.offset for shard in self.shards]

    @property
    def attempted(self) -> int:
        """Number of URLs that ingestion tried: samples and failures."""
        return self.n + sum(self.failures.values())

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the shard list: manifests with equal digests give the same ids to the same samples."""
        lines = "\n".join(f"{s.name} {s.samples} {s.sha256}" for s in self.shards)
        return hashlib.sha256(lines.encode()).hexdigest()

    def locate(self, sample_id: int) -> tuple[Shard, int]:
        """The shard of a sample and the sample's position in it.

        Raises:
            IndexError: `sample_id` is outside [0, n).
        """
        if not 0 <= sample_id < self.n:
            raise IndexError(f"sample id {sample_id} is outside [0, {self.n})")
        shard = self.shards[bisect.bisect_right(self.offsets, sample_id) - 1]
        return shard, sample_id - shard.offset

    def url(self, shard: Shard) -> str:
        """Where to read a shard: a path below `root`, or the name itself if that is a URL or `pipe:` command."""
        return shard_url(self.root, shard.name)

    def save(self, folder: str | Path) -> Path:
        """Write `manifest.json` atomically; `root` is not stored, so that the folder can be moved."""
        tree = {
            "format": FORMAT,
            "version": VERSION,
            "samples": self.n,
            "attempted": self.attempted,
            "digest": self.digest,
            "failures": dict(sorted(self.failures.items(), key=lambda item: (-item[1], item[0]))),
            "facts": dict(self.facts),
            "shards": [asdict(shard) for shard in self.shards],
        }
        return write_json(Path(folder) / MANIFEST_NAME, tree)


def shard_url(root: str | Path, name: str) -> str:
    """Where to read the shard with this name in a manifest whose folder is `root`."""
    return name if ":" in name else os.path.join(root, name)


def make_manifest(
    entries: Sequence[tuple[str, int, int, str]],
    *,
    root: str | Path = ".",
    failures: Mapping[str, int] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Manifest:
    """A manifest from `(name, samples, bytes, sha256)` rows in order; `load_manifest` refuses empty shards."""
    shards, offset = [], 0
    for name, samples, size, sha256 in entries:
        shards.append(Shard(name=name, samples=samples, bytes=size, sha256=sha256, offset=offset))
        offset += samples
    return Manifest(shards=tuple(shards), root=str(root), failures=failures or {}, facts=facts or {})


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
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"There is no manifest at {path}. {advice(path)}") from error
    except ValueError as error:
        raise UserError(f"{path} is not a manifest. {advice(path)}") from error
    if path.name != MANIFEST_NAME and (not isinstance(tree, dict) or "format" not in tree):
        raise UserError(f"{path} is not a manifest. {advice(path)}")
    if not isinstance(tree, dict):
        raise UserError(f"The manifest {path} is damaged: it holds a {type(tree).__name__}, not a mapping.")
    if tree.get("format") != FORMAT or tree.get("version") != VERSION:
        raise UserError(
            f"{path} has format {tree.get('format')!r}, version {tree.get('version')!r}; "
            f"this program reads {FORMAT!r}, version {VERSION}."
        )
    try:
        rows = [(s["name"], s["samples"], s["bytes"], s["sha256"]) for s in tree["shards"]]
        manifest = make_manifest(rows, root=path.parent, failures=tree["failures"], facts=tree["facts"])
        _check(manifest, tree, path)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"The manifest {path} is damaged: it lacks {error}. `neuclip manifest` writes a new one."
        ) from error
    return manifest


def _check(manifest: Manifest, tree: Mapping[str, Any], path: Path) -> None:
    empty = [shard.name for shard in manifest.shards if shard.samples < 1]
    if empty or not manifest.shards:
        raise UserError(f"{path} lists {len(manifest.shards)} shards, of which {len(empty)} are empty ({empty[:3]}).")
    stored = [s["offset"] for s in tree["shards"]]
    if stored != manifest.offsets or tree["samples"] != manifest.n or tree["digest"] != manifest.digest:
        raise UserError(
            f"{path} contradicts itself (counts, offsets or digest): it was edited or truncated. Write it again."
        )
