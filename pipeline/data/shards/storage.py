"""Open shards in any storage: a local path, or a URL that fsspec supports (s3, gs, https, ...)."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from pipeline import tars
from pipeline.data.shards.shard_index import first_byte, indexed_records, sample_places
from pipeline.data.shards.tar_reader import TarRecord, read_records
from pipeline.errors import UserError

BUFFER = 1 << 20
BLOCKS_KEPT = 3
"""Of four buffers each, that are in memory of a shard on a server: the last, the present and the next."""
SEEKING_PAYS = 100_000
"""Bytes of a sample from which on seeking over it is faster than reading it, on a disk that has not cached it."""
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
    """The samples of a shard, starting at number `skip`.

    With an index, reading starts at that sample, except to compute the hash of small samples. Otherwise all bytes
    before it are read once, in order.

    Args:
        url: The shard.
        skip: Samples that are skipped.
        caption_suffix: Of the member with the caption.
        sample_bytes: Mean size of a sample.
        stream_hash: Takes the bytes as they are read, unless some of them are not.
        index: Of `load_index`.

    Raises:
        OSError: The shard cannot be read.
        DamagedTar: The tar is truncated or damaged.
    """
    places = None if index is None else sample_places(index, caption_suffix)
    if places is None:
        with open_shard(url) as file:
            source = file if stream_hash is None else stream_hash.over(file)
            yield read_records(source, skip=skip, caption_suffix=caption_suffix)
        return
    wanted = places[skip:]
    seeks = skip > 0 and (stream_hash is None or sample_bytes > SEEKING_PAYS)
    start = first_byte(wanted) if seeks else 0
    with open_shard(url, start=start) as file:
        source = file if stream_hash is None or seeks else stream_hash.over(file)
        yield indexed_records(source, wanted, position=start)


class StreamHash(io.RawIOBase):
    """The SHA-256 and size of a shard, computed from the bytes that a reader takes from it through `over`.

    `check` is called before each piece is hashed; it may raise to end the reading.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self.bytes = 0
        self._check = check
        self._sha256 = hashlib.sha256()
        self._source: io.BufferedReader | None = None
        self._file: io.BufferedReader | None = None

    def over(self, file: io.BufferedReader) -> io.BufferedReader:
        """The same stream, hashed in large pieces; it cannot seek, so that no byte is left out."""
        self._source = file
        self._file = io.BufferedReader(self, BUFFER)
        return self._file

    def finish(self) -> str | None:
        """Read the rest of the stream, and return the digest; None if the stream was not read from its start."""
        if self._file is None:
            return None
        while self._file.read(BUFFER):
            pass
        return self._sha256.hexdigest()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        assert self._source is not None  # it is read through `over`
        count = self._source.readinto(buffer)
        self._check()
        self._sha256.update(memoryview(buffer)[:count])
        self.bytes += count
        return count


def list_shards(root: str | Path, suffixes: tuple[str, ...] = (".tar",)) -> list[str]:
    """The names of all files with one of these suffixes below a folder, sorted.

    Links to folders are followed, and each is listed once. There are none if `root` is no folder.

    Raises:
        UserError: A folder cannot be read.
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
    """The shard as a binary stream from byte `start` on, which is closed at the end.

    Raises:
        OSError: The shard cannot be opened.
    """
    if "://" in url:
        import fsspec

        # `fsspec.open` would pass the block size to the file system's constructor, which S3's refuses. The next block
        # is read in a thread, while the caller decodes.
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
    else:
        with open(url, "rb", buffering=BUFFER) as file:
            file.seek(start)
            yield cast(io.BufferedReader, file)


class _Forward(io.RawIOBase):
    """A remote file that is read in order."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
