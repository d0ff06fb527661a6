"""The shards of a manifest as arrays: about 120 bytes each, and shared by the processes of a node if there are many."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from pipeline.data.shards.node_cache import Arrays, open_stored, shared

Int64 = NDArray[np.int64]
_BLOCK = 1 << 14


@dataclass(frozen=True)
class Shard:
    """One tar file. `name` is a path relative to the manifest's folder, a URL, or a `pipe:` command."""

    name: str
    samples: int
    bytes: int
    sha256: str
    offset: int


class ShardTable(Sequence[Shard]):
    """An immutable sequence of shards, stored as columns.

    Args:
        arrays: `samples` and `bytes`, int64 [m]; `offsets`, int64 [m], the id of each shard's first sample; `names` and
            `hashes`, UTF-8 text uint8 [*] with `names_ends` and `hashes_ends`, int64 [m], where each string ends.
        facts: `digest` and `content_digest`, if they are known.
        folder: where the arrays are stored, if they are.
    """

    def __init__(
        self, arrays: Mapping[str, NDArray[Any]], *, facts: Mapping[str, Any] | None = None, folder: Path | None = None
    ) -> None:
        self._arrays, self._facts, self._folder = dict(arrays), dict(facts or {}), folder

    @property
    def samples(self) -> Int64:
        """Samples of each shard, [m]."""
        return self._arrays["samples"]

    @property
    def bytes(self) -> Int64:
        """Size of each shard, [m]."""
        return self._arrays["bytes"]

    @property
    def offsets(self) -> Int64:
        """Id of each shard's first sample, [m]."""
        return self._arrays["offsets"]

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
        return not (self._arrays["names"] == ord(":")).any()

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: int) -> Shard: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Shard, ...]: ...
    def __getitem__(self, index: int | slice) -> Shard | tuple[Shard, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        i = range(len(self))[index]
        return next(self._slice(i, i + 1))

    def __iter__(self) -> Iterator[Shard]:
        for first in range(0, len(self), _BLOCK):
            yield from self._slice(first, min(len(self), first + _BLOCK))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardTable):
            return NotImplemented
        return all(np.array_equal(values, other._arrays[name]) for name, values in self._arrays.items())

    def __repr__(self) -> str:
        return f"ShardTable({len(self)} shards)"

    def __reduce__(self) -> Any:
        """Sent to another process of this node, a stored table is opened there rather than copied."""
        if self._folder is not None and self._folder.exists():
            return _open, (self._folder,)
        return ShardTable, (self._arrays,)

    def _slice(self, first: int, last: int) -> Iterator[Shard]:
        columns = (self.samples, self.bytes, self.offsets)
        samples, sizes, offsets = (column[first:last].tolist() for column in columns)
        names, hashes = (self._texts(column, first, last) for column in ("names", "hashes"))
        return map(Shard, names, samples, sizes, hashes, offsets)

    def _texts(self, column: str, first: int, last: int) -> Iterator[str]:
        ends = self._arrays[f"{column}_ends"]
        start = int(ends[first - 1]) if first else 0
        stops = (ends[first:last] - start).tolist()
        text = self._arrays[column][start : start + (stops[-1] if stops else 0)].tobytes()
        return (text[a:b].decode() for a, b in itertools.pairwise([0, *stops]))

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
        self._text = {"names": bytearray(), "hashes": bytearray()}
        self._ends = {"names": array("q"), "hashes": array("q")}
        for row in rows:
            self.add(*row)

    def add(self, name: str, samples: int, size: int, sha256: str) -> None:
        """Append a shard."""
        self._samples.append(samples)
        self._bytes.append(size)
        for column, text in (("names", name), ("hashes", sha256)):
            self._text[column] += text.encode()
            self._ends[column].append(len(self._text[column]))

    def build(self) -> ShardTable:
        """The table, in this process's memory; nothing can be added after that."""
        samples = np.frombuffer(self._samples, dtype=np.int64)
        return ShardTable(
            {
                "samples": samples,
                "bytes": np.frombuffer(self._bytes, dtype=np.int64),
                "offsets": np.cumsum(samples) - samples,
                **{column: np.frombuffer(text, dtype=np.uint8) for column, text in self._text.items()},
                **{f"{column}_ends": np.frombuffer(ends, dtype=np.int64) for column, ends in self._ends.items()},
            }
        )


def shared_table(
    topic: str, version: str, make: Callable[[], tuple[ShardTable, Mapping[str, Any]]]
) -> tuple[ShardTable, Any]:
    """A table that the processes of this node share, and some facts about it; `make` runs in one of them.

    Args:
        topic: what the table is about, see `node_cache.shared`.
        version: identifies its contents.
        make: the table and the facts, plain values.
    """

    def arrays() -> Arrays:
        table, facts = make()
        digests = {"digest": table.digest, "content_digest": table.content_digest}
        return Arrays(table._arrays, {**digests, "about": facts})

    stored = shared(topic, version, arrays)
    return ShardTable(stored.arrays, facts=stored.facts, folder=stored.folder), stored.facts["about"]


def _open(folder: Path) -> ShardTable:
    stored = open_stored(folder)
    return ShardTable(stored.arrays, facts=stored.facts, folder=folder)
