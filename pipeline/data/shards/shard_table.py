"""The shards of a manifest as arrays: about 150 bytes each."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.shards.storage import is_outside

Int64 = NDArray[np.int64]
LONGEST_NAME = 4096
_BLOCK = 1 << 14


@dataclass(frozen=True)
class Shard:
    """One tar file. `name` is a path relative to the manifest's folder, or a URL."""

    name: str
    samples: int
    bytes: int
    sha256: str
    offset: int


class ShardTable:
    """An immutable sequence of shards.

    Args:
        columns: The fields of `Shard` as arrays [m]: numbers as int64, text as UTF-8 of a fixed width (`S`).
    """

    def __init__(self, columns: Mapping[str, NDArray[Any]]) -> None:
        self._columns = columns

    @property
    def samples(self) -> Int64:
        """Samples of each shard, [m]."""
        return self._columns["samples"]

    @property
    def bytes(self) -> Int64:
        """Size of each shard, [m]."""
        return self._columns["bytes"]

    @property
    def offsets(self) -> Int64:
        """Id of each shard's first sample, [m]."""
        return self._columns["offset"]

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of names, samples and hashes, in order."""
        return self._digest(lambda shard: f"{shard.name} {shard.samples} {shard.sha256}")

    @functools.cached_property
    def content_digest(self) -> str:
        """SHA-256 of samples and hashes, in order: shards may be moved without changing it."""
        return self._digest(lambda shard: f"{shard.samples} {shard.sha256 or shard.name}")

    @property
    def all_relative(self) -> bool:
        """Whether every name is a path relative to the manifest's folder, rather than a URL."""
        return not (np.char.find(self._columns["name"], b":") >= 0).any()

    @functools.cached_property
    def outside(self) -> list[str]:
        """Names of the shards that need the user's consent, see `is_outside`."""
        names = self._columns["name"]
        odd = (np.char.find(names, b":") >= 0) | (np.char.find(names, b"..") >= 0) | np.char.startswith(names, b"/")
        return [name for name in map(bytes.decode, names[odd].tolist()) if is_outside(name)]

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
        return all(np.array_equal(values, other._columns[name]) for name, values in self._columns.items())

    def _slice(self, first: int, last: int) -> Iterator[Shard]:
        fields = (self._columns[field][first:last].tolist() for field in Shard.__dataclass_fields__)
        for name, samples, size, sha256, offset in zip(*fields, strict=True):
            yield Shard(name.decode(), samples, size, sha256.decode(), offset)

    def _digest(self, line: Callable[[Shard], str]) -> str:
        hashed, separator = hashlib.sha256(), ""
        for shard in self:
            hashed.update((separator + line(shard)).encode())
            separator = "\n"
        return hashed.hexdigest()


def shard_table(rows: Iterable[tuple[str, int, int, str]]) -> ShardTable:
    """The table of `(name, samples, bytes, sha256)` rows in order.

    Raises:
        TypeError: A value is of a wrong kind.
        OverflowError: A number has more than 64 bits.
        ValueError: A text is too long.
    """
    rows = list(rows)
    names, digests = [row[0] for row in rows], [row[3] for row in rows]
    counts, sizes = [row[1] for row in rows], [row[2] for row in rows]
    samples = np.frombuffer(array("q", counts), dtype=np.int64)
    return ShardTable({
        "name": _texts(names, "name"),
        "samples": samples,
        "bytes": np.frombuffer(array("q", sizes), dtype=np.int64),
        "sha256": _texts(digests, "sha256"),
        "offset": np.cumsum(samples) - samples,
    })  # fmt: skip


def _texts(values: list[str], column: str) -> NDArray[np.bytes_]:
    texts = [value.encode() for value in values]
    if too_long := [value for value, text in zip(values, texts, strict=True) if len(text) > LONGEST_NAME]:
        raise ValueError(f"the {column} {too_long[0][:60]!r}... has more than {LONGEST_NAME:,} bytes")
    return np.array(texts, dtype=np.bytes_)
