"""The shards of a manifest as arrays: about 150 bytes each, and shared by the processes of a node if there are many.

One process computes and stores shared arrays, all of them memory-map the files. These are in the system's folder for
temporary files (`TMPDIR`), below a folder that only this user can read. They are a cache: whatever is missing is
computed again, and if nothing can be stored there, every process keeps its own copy in memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.shards.storage import COMMAND, OUTSIDE, kind_of_place
from pipeline.files import new_folder

FACTS = "facts.json"
KEPT_VERSIONS, KEPT_SECONDS = 2, 7 * 24 * 3600
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrays:
    """Named arrays with a few plain facts about them."""

    arrays: Mapping[str, NDArray[Any]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    """Where they are stored; None if they are in this process's memory only."""

    def __reduce__(self) -> Any:
        """Sent to another process of this node, stored arrays are opened there rather than copied."""
        if self.folder is not None and self.folder.exists():
            return open_stored, (self.folder,)
        return Arrays, (dict(self.arrays), dict(self.facts))


def shared(topic: str, version: str, make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `make` computes, computed by the first process of this node that needs them.

    Args:
        topic: What the arrays are; a file name. Only the newest two versions of a topic are kept, and a topic that no
            process has used for a week is deleted.
        version: Identifies their contents; a file name.
        make: Computes them.
    """
    try:
        folder = _own_folder() / topic / version
        if not folder.exists():
            with _locked(folder.with_name(version + ".lock")):
                if not folder.exists():  # another process may have stored them meanwhile
                    _store(folder, make())
                    _delete_old(folder.parent)
        return open_stored(folder)
    except OSError as error:
        log.warning("Arrays cannot be shared among this node's processes, which costs memory: %s", error)
        return make()


def open_stored(folder: Path) -> Arrays:
    """Memory-map stored arrays.

    Raises:
        OSError: They are not there, or cannot be read.
    """
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    arrays = {path.stem: np.load(path, mmap_mode="r").view(np.ndarray) for path in folder.glob("*.npy")}
    os.utime(folder.parent)
    return Arrays(arrays, facts, folder)


def _own_folder() -> Path:
    """The cache's folder. Others must not be able to write to it: what is in it is not checked again.

    Raises:
        OSError: The folder cannot be made, or belongs to another user.
    """
    folder = Path(tempfile.gettempdir()) / f"neuclip-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{folder} is not a folder that only this user can write to")
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock among the processes of this node; it is released when this process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _store(folder: Path, made: Arrays) -> None:
    """Write the arrays into a temporary folder and rename it into place.

    Raises:
        OSError: There is no space, for example.
    """
    with new_folder(folder) as temporary:
        for name, array in made.arrays.items():
            np.save(temporary / f"{name}.npy", array)
        (temporary / FACTS).write_text(json.dumps(dict(made.facts)), encoding="utf-8")


def _delete_old(topic: Path) -> None:
    """Delete older versions, and topics that are not in use. Processes that have mapped their files can go on."""
    versions = sorted((path for path in topic.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    topics = [path for path in topic.parent.iterdir() if time.time() - path.stat().st_mtime > KEPT_SECONDS]
    for path in versions[:-KEPT_VERSIONS] + topics:
        shutil.rmtree(path, ignore_errors=True)


Int64 = NDArray[np.int64]
LONGEST_NAME = 4096
_BLOCK = 1 << 14
_SHOWN = 3


@dataclass(frozen=True)
class Shard:
    """One tar file. `name` is a path relative to the manifest's folder, a URL, or a `pipe:` command."""

    name: str
    samples: int
    bytes: int
    sha256: str
    offset: int


class ShardTable:
    """An immutable sequence of shards, stored as columns.

    Args:
        stored: The fields of `Shard` as arrays [m]: numbers as int64, text as UTF-8 of a fixed width (`S`). Its facts
            may hold `digest`, `content_digest` and `places`.
    """

    def __init__(self, stored: Arrays) -> None:
        self.stored, self._facts = stored, dict(stored.facts)

    @property
    def samples(self) -> Int64:
        """Samples of each shard, [m]."""
        return self.stored.arrays["samples"]

    @property
    def bytes(self) -> Int64:
        """Size of each shard, [m]."""
        return self.stored.arrays["bytes"]

    @property
    def offsets(self) -> Int64:
        """Id of each shard's first sample, [m]."""
        return self.stored.arrays["offset"]

    @property
    def digest(self) -> str:
        """SHA-256 of names, samples and hashes, in order."""
        return self._digest("digest", lambda s: f"{s.name} {s.samples} {s.sha256}")

    @property
    def content_digest(self) -> str:
        """SHA-256 of samples and hashes, in order: shards may be moved without changing it."""
        return self._digest("content_digest", lambda s: f"{s.samples} {s.sha256 or s.name}")

    @property
    def all_relative(self) -> bool:
        """Whether every name is a path relative to the manifest's folder, rather than a URL or a `pipe:` command."""
        return not (np.char.find(self.stored.arrays["name"], b":") >= 0).any()

    @property
    def places(self) -> Mapping[str, tuple[int, list[str]]]:
        """Number and first names of the shards that need the user's consent, by `kind_of_place`."""
        if "places" not in self._facts:
            names = self.stored.arrays["name"]
            odd = (np.char.find(names, b":") >= 0) | (np.char.find(names, b"..") >= 0) | np.char.startswith(names, b"/")
            found: dict[str, tuple[int, list[str]]] = {COMMAND: (0, []), OUTSIDE: (0, [])}
            for name in names[odd]:
                if kind := kind_of_place(name.decode()):
                    count, first = found[kind]
                    found[kind] = count + 1, [*first, name.decode()][:_SHOWN]
            self._facts["places"] = found
        return dict(self._facts["places"])

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Shard:
        i = range(len(self))[index]
        return next(self._slice(i, i + 1))

    def __iter__(self) -> Iterator[Shard]:
        for first in range(0, len(self), _BLOCK):
            yield from self._slice(first, first + _BLOCK)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardTable):
            return NotImplemented
        return all(np.array_equal(values, other.stored.arrays[name]) for name, values in self.stored.arrays.items())

    def _slice(self, first: int, last: int) -> Iterator[Shard]:
        fields = (self.stored.arrays[field][first:last].tolist() for field in Shard.__dataclass_fields__)
        for name, samples, size, sha256, offset in zip(*fields, strict=True):
            yield Shard(name.decode(), samples, size, sha256.decode(), offset)

    def _digest(self, name: str, line: Callable[[Shard], str]) -> str:
        if name not in self._facts:
            hashed, separator = hashlib.sha256(), ""
            for shard in self:
                hashed.update((separator + line(shard)).encode())
                separator = "\n"
            self._facts[name] = hashed.hexdigest()
        return str(self._facts[name])


class ShardTableBuilder:
    """Collects shards in order."""

    def __init__(self, rows: Iterable[tuple[str, int, int, str]] = ()) -> None:
        self._samples, self._bytes = array("q"), array("q")
        self._texts: dict[str, list[bytes]] = {"name": [], "sha256": []}
        self._blocks: dict[str, list[NDArray[np.bytes_]]] = {"name": [], "sha256": []}
        for row in rows:
            self.add(*row)

    def add(self, name: str, samples: int, size: int, sha256: str) -> None:
        """Append a shard.

        Raises:
            ValueError: A text is too long.
        """
        self._samples.append(samples)
        self._bytes.append(size)
        for column, value in (("name", name), ("sha256", sha256)):
            self._texts[column].append(text := value.encode())
            if len(text) > LONGEST_NAME:
                raise ValueError(f"the {column} {value[:60]!r}... has more than {LONGEST_NAME:,} bytes")
            if len(self._texts[column]) == _BLOCK:
                self._pack(column)

    def build(self) -> ShardTable:
        """The table, in this process's memory; nothing can be added after that."""
        samples = np.frombuffer(self._samples, dtype=np.int64)
        columns = {"samples": samples, "bytes": np.frombuffer(self._bytes, dtype=np.int64)}
        for column in self._texts:
            self._pack(column)
            columns[column] = np.concatenate(self._blocks.pop(column))
        return ShardTable(Arrays({**columns, "offset": np.cumsum(samples) - samples}))

    def _pack(self, column: str) -> None:
        self._blocks[column].append(np.array(self._texts[column], dtype=np.bytes_))
        self._texts[column] = []


def shared_table(
    topic: str, version: str, make: Callable[[], tuple[ShardTable, Mapping[str, Any]]]
) -> tuple[ShardTable, Any]:
    """A table that the processes of this node share, and plain facts about it: what `make` returns in one of them.

    `topic` and `version` are those of `shared`.
    """

    def arrays() -> Arrays:
        table, facts = make()
        known = {"digest": table.digest, "content_digest": table.content_digest, "places": table.places}
        return Arrays(table.stored.arrays, {**known, "about": facts})

    stored = shared(topic, version, arrays)
    return ShardTable(stored), stored.facts["about"]
