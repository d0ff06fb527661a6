"""Shards in any storage, a local path or a URL that fsspec supports, and the index by which their samples are read.

The index of a shard says where its members are, so that headers need not be parsed. It is in the folder `index` beside
the manifest, under the shard's SHA-256. `neuclip manifest`, `pairs` and `download` write it when they scan or make the
shard; a shard without one is parsed.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from pipeline import tars
from pipeline.data.shards.tar_reader import IMAGE_SUFFIXES, MemberPlace, TarRecord, read_records
from pipeline.errors import UserError
from pipeline.files import read_bounded, regular, replacing

BUFFER = 1 << 20
BLOCKS_KEPT = 3
"""Of four buffers each, that are in memory of a shard on a server: the last, the present and the next."""
SEEKING_PAYS = 100_000
"""Bytes of a sample from which on seeking over it is faster than reading it, on a disk that has not cached it."""
INDEX_FOLDER = "index"
LONGEST_SUFFIX = 8
MEMBERS = np.dtype([("sample", "<u4"), ("suffix", f"S{LONGEST_SUFFIX}"), ("offset", "<u8"), ("size", "<u4")])
"""A member: the number of its sample, its suffix (empty if that is longer), its first byte and its size."""
CHECKSUM_BYTES = 4
CONVERTED = 256
"""Samples whose places are made Python's numbers at a time."""


def list_shards(root: str | Path, suffixes: tuple[str, ...] = (".tar",)) -> list[str]:
    """The names of all files with one of these suffixes below a folder, sorted; UserError if one cannot be read.

    Links to folders are followed, and each is listed once. There are none if `root` is no folder.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"Cannot list {error.filename} ({error.strerror}), which may hold shards.") from error

    names, folders = list[str](), set[str]()
    for folder, below, files in os.walk(root, followlinks=True, onerror=refuse if os.path.isdir(root) else None):
        real = os.path.realpath(folder)
        if real in folders:  # a link to a parent folder, for instance
            below.clear()
            continue
        folders.add(real)
        below.sort()
        names += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(suffixes)]
    return sorted(names)


def is_local(url: str) -> bool:
    """Whether `url` is a path on this machine rather than a URL."""
    return "://" not in url


@contextmanager
def open_shard(url: str, *, start: int = 0) -> Iterator[io.BufferedReader]:
    """The shard as a binary stream from byte `start` on, which is closed at the end; OSError if it cannot be opened."""
    if is_local(url):
        with open(url, "rb", buffering=BUFFER, opener=regular) as file:
            file.seek(start)
            yield cast(io.BufferedReader, file)
        return
    import fsspec

    # `fsspec.open` would pass the block size to the file system's constructor, which S3's refuses. The next block is
    # read in a thread, while the caller decodes.
    filesystem, path = fsspec.core.url_to_fs(url)
    ahead = {"cache_type": "background", "cache_options": {"maxblocks": BLOCKS_KEPT}}
    with filesystem.open(path, "rb", block_size=4 * BUFFER, **ahead) as file:
        stream = cast(io.BufferedReader, io.BufferedReader(_Forward(file), BUFFER))
        if start:
            try:
                file.seek(start)
            except ValueError:  # a server that does not send ranges
                tars.skip(stream, start)
        yield stream


class _Forward(io.RawIOBase):
    """A stream that is read in order and cannot seek; `each` gets every piece that is read."""

    def __init__(self, file: BinaryIO, each: Callable[[bytes], None] = lambda piece: None) -> None:
        self._file, self._each = file, each

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._file.read(len(buffer))
        self._each(piece)
        buffer[: len(piece)] = piece
        return len(piece)


class StreamHash:
    """The SHA-256 and size of a shard, computed from the bytes that a reader takes from it through `over`.

    `check` is called before each piece is hashed; it may raise to end the reading.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self.bytes, self._check, self._sha256 = 0, check, hashlib.sha256()
        self._file: io.BufferedReader | None = None

    def over(self, file: BinaryIO) -> io.BufferedReader:
        """The same stream, hashed in large pieces; it cannot seek, so that no byte is left out."""
        self._file = io.BufferedReader(_Forward(file, self._add), BUFFER)
        return self._file

    def _add(self, piece: bytes) -> None:
        self._check()
        self._sha256.update(piece)
        self.bytes += len(piece)

    def finish(self) -> str | None:
        """Read the rest of the stream, and return the digest; None if the stream was not read from its start."""
        if self._file is None:
            return None
        while self._file.read(BUFFER):
            pass
        return self._sha256.hexdigest()


@contextmanager
def open_records(
    url: str,
    *,
    skip: int = 0,
    caption_suffix: str = "txt",
    sample_bytes: float = 0.0,
    stream_hash: StreamHash | None = None,
    index: NDArray[np.void] | None = None,
) -> Iterator[Iterator[TarRecord]]:
    """The samples of a shard, starting at number `skip`; OSError if it cannot be read, DamagedTar if it is damaged.

    With an index of `load_index`, reading starts at that sample, except to compute the hash of small samples.
    Otherwise all bytes before it are read once, in order.

    Args:
        url: The shard.
        skip: Samples that are skipped.
        caption_suffix: Of the member with the caption.
        sample_bytes: Mean size of a sample.
        stream_hash: Takes the bytes as they are read, unless some of them are not.
        index: Where the members are; None: the shard is parsed.
    """
    places, start = None if index is None else sample_places(index, caption_suffix), 0
    if places is not None and skip > 0 and (stream_hash is None or sample_bytes > SEEKING_PAYS):
        offsets = places[skip : skip + 1, ::2]
        start, stream_hash = min(offsets[offsets >= 0].tolist(), default=0), None
    with open_shard(url, start=start) as file:
        source = file if stream_hash is None else stream_hash.over(file)
        if places is None:
            yield read_records(source, skip=skip, caption_suffix=caption_suffix)
        else:
            yield _indexed_records(source, places[skip:], position=start)


def _indexed_records(file: BinaryIO, places: NDArray[np.int64], *, position: int) -> Iterator[TarRecord]:
    """The samples at these `sample_places`, read in order from an open file, which is at `position`."""
    for first in range(0, len(places), CONVERTED):
        for image_at, image_size, caption_at, caption_size in places[first : first + CONVERTED].tolist():
            parts: dict[str, bytes] = {}
            for at, size, name in sorted([(image_at, image_size, "image"), (caption_at, caption_size, "caption")]):
                if at >= 0:
                    tars.skip(file, at - position)
                    parts[name] = tars.read_exactly(file, size)
                    position = at + size
            yield TarRecord(image=parts.get("image"), caption=parts.get("caption"))


def sample_places(members: NDArray[np.void], caption_suffix: str) -> NDArray[np.int64] | None:
    """First byte and size of each sample's image and caption, int64 [n, 4], -1 where there is none.

    They are those that `read_records` returns. None if the index does not hold such suffixes.
    """
    if len(caption_suffix.encode()) > LONGEST_SUFFIX:
        return None
    sample, suffix = members["sample"].astype(np.int64), members["suffix"]
    places = np.full((int(sample[-1]) + 1, 4), -1, dtype=np.int64)
    images = np.flatnonzero(np.isin(suffix, [name.encode() for name in IMAGE_SUFFIXES]))[::-1]  # the first image counts
    captions = np.flatnonzero(suffix == caption_suffix.encode())  # and the last caption
    for column, chosen in ((0, images), (2, captions)):
        places[sample[chosen], column] = members["offset"][chosen]
        places[sample[chosen], column + 1] = members["size"][chosen]
    return places


def index_path(folder: str | Path, sha256: str) -> Path:
    """Where the index of the shard with this SHA-256 is, given the folder of its manifest."""
    return Path(folder) / INDEX_FOLDER / f"{sha256}.members"


def is_index(name: str) -> bool:
    """Whether a file in the index's folder is an index, or what a killed process has left of one."""
    return re.fullmatch(r"[0-9a-f]{64}\.members|\.[0-9a-f]{64}\.members\.[0-9a-f]{32}\.tmp", name) is not None


def scan_members(tar: Path) -> NDArray[np.void]:
    """The members of a shard, `MEMBERS` [m], from its headers; DamagedTar if it is not a complete tar."""
    places: list[MemberPlace] = []
    with open(tar, "rb", opener=regular) as file:
        for _ in read_records(file, skip=sys.maxsize, index=places):
            pass
    return as_members(places)


def as_members(places: Sequence[MemberPlace]) -> NDArray[np.void]:
    """`MEMBERS` [m] of what `read_records` has collected."""
    most = np.iinfo(np.uint32).max  # larger than any payload that is read
    rows = [(n, s if len(s) <= LONGEST_SUFFIX else b"", offset, min(size, most)) for n, s, offset, size in places]
    return np.array(rows, dtype=MEMBERS)


def save_index(folder: str | Path, members: NDArray[np.void], *, sha256: str) -> None:
    """Write the index of a shard: a CRC-32 of the shard's SHA-256 and the members, and the members in order.

    Where it cannot be written, there is none.
    """
    data = members.tobytes()
    with suppress(OSError), replacing(index_path(folder, sha256)) as temporary:
        temporary.write_bytes(_checksum(data, sha256) + data)


def _checksum(data: bytes, sha256: str) -> bytes:
    """The first bytes of an index, which tell another shard's under a wrong name."""
    return zlib.crc32(data, zlib.crc32(sha256.encode())).to_bytes(CHECKSUM_BYTES, "little")


def load_index(folder: str | Path, *, sha256: str, samples: int) -> NDArray[np.void] | None:
    """The members of a shard, `MEMBERS` [m]; None if there is no whole index of so many samples."""
    if not is_index(f"{sha256}.members"):  # the manifest may be a stranger's
        return None
    try:
        data = read_bounded(index_path(folder, sha256))
        members = np.frombuffer(data, MEMBERS, offset=CHECKSUM_BYTES)
    except (OSError, ValueError):
        return None
    if not len(members) or data[:CHECKSUM_BYTES] != _checksum(data[CHECKSUM_BYTES:], sha256):
        return None
    steps = np.diff(members["sample"].astype(np.int64), prepend=-1, append=samples)
    is_whole = steps[0] == steps[-1] == 1 and bool(np.isin(steps, (0, 1)).all())
    offsets = members["offset"].astype(np.int64)
    ends = np.append(0, offsets + members["size"])
    in_order = bool((offsets > ends[:-1]).all())  # as in every tar, whoever wrote the index
    return members if is_whole and in_order else None
