"""Open shards in any storage: a local path, a `pipe:` command, or a URL that fsspec supports (s3, gs, https, ...)."""

from __future__ import annotations

import hashlib
import io
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, cast

from pipeline.data.shards.tar_reader import TarRecord, read_records, record_offset
from pipeline.errors import UserError

BUFFER, HEADER_BUFFER = 1 << 20, 1 << 12
PIECES_AHEAD = 4
"""Of BUFFER bytes, that are read ahead from a server."""
SEEKING_PAYS = 100_000
"""Bytes of a sample from which on seeking over it is faster than reading it, on a disk that has not cached it."""
REMOTE = frozenset({
    "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "hf", "hdfs", "webhdfs", "http", "https",
})  # fmt: skip
"""URL schemes that a manifest may name without the user's consent: they read from servers only."""
COMMAND, OUTSIDE = "command", "outside"


def kind_of_place(name: str) -> str:
    """What a shard's name in a manifest makes this machine do.

    Returns:
        `COMMAND`: run a shell command. `OUTSIDE`: read a file outside of the manifest's folder, or a URL that can
        (`file://`, chains such as `simplecache::`, and schemes other than those in `REMOTE`). "": read a file in that
        folder, or from a server.
    """
    if name.startswith("pipe:"):
        return COMMAND
    scheme, separator, _ = name.partition("://")
    if separator and "::" not in name:
        return "" if scheme.lower() in REMOTE else OUTSIDE
    path = os.path.normpath(name)
    return OUTSIDE if ":" in name or os.path.isabs(path) or path.split(os.sep)[0] == os.pardir else ""


@contextmanager
def open_records(
    url: str,
    *,
    skip: int,
    caption_suffix: str = "txt",
    sample_bytes: float = 0.0,
    stream_hash: StreamHash | None = None,
) -> Iterator[Iterator[TarRecord]]:
    """The samples of a shard, starting at number `skip`.

    All bytes before that sample are read once, in order, which is what disks, object stores and pipes do best. From a
    server they are read ahead in a thread, while the caller decodes. If samples are large, only the headers of the
    skipped members of a local file are read.

    Args:
        url: The shard.
        skip: Samples that are skipped.
        caption_suffix: Of the member with the caption.
        sample_bytes: Mean size of a sample.
        stream_hash: Takes the bytes as they are read, unless some of them are not.

    Raises:
        OSError: The shard cannot be read.
        DamagedTar: The tar is truncated or damaged.
    """
    if skip and is_local(url) and sample_bytes > SEEKING_PAYS:
        with open(url, "rb", buffering=HEADER_BUFFER) as headers:
            offset = record_offset(headers, skip)
        with open_shard(url) as file:
            file.seek(offset)
            yield read_records(file, caption_suffix=caption_suffix)
    else:
        with open_shard(url) as file, _ReadAhead(file) if "://" in url else nullcontext(file) as stream:
            source = stream if stream_hash is None else stream_hash.over(stream)
            yield read_records(source, skip=skip, caption_suffix=caption_suffix)


class _ReadAhead(io.RawIOBase):
    """A stream from its current place on, of which a thread reads the next pieces before they are asked for."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left, self._stopped = file, memoryview(b""), False
        self._pieces: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        self._room = threading.Semaphore(PIECES_AHEAD)
        self._thread = threading.Thread(target=self._fetch, name="read ahead", daemon=True)
        self._thread.start()

    def __enter__(self) -> BinaryIO:  # type: ignore[override]
        return cast(BinaryIO, io.BufferedReader(self, BUFFER))

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._room.release()
        self._thread.join()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            piece = self._pieces.get()
            if isinstance(piece, Exception) or not piece:
                self._pieces.put(piece)  # the end stays the end
            if isinstance(piece, Exception):
                raise piece
            self._left = memoryview(piece)
            self._room.release()
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count

    def _fetch(self) -> None:
        piece: bytes | Exception = b"-"
        while piece and not isinstance(piece, Exception):
            self._room.acquire()
            if self._stopped:
                return
            try:
                piece = self._file.read(BUFFER)
            except Exception as error:
                piece = error
            self._pieces.put(piece)


class StreamHash(io.RawIOBase):
    """The SHA-256 and size of a shard, computed from the bytes that a reader takes from it through `over`.

    `check` is called before each piece is hashed; it may raise to end the reading.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self.bytes = 0
        self._check = check
        self._sha256 = hashlib.sha256()
        self._source: BinaryIO | None = None
        self._file: BinaryIO | None = None

    def over(self, file: BinaryIO) -> BinaryIO:
        """The same stream, hashed in large pieces; it cannot seek, so that no byte is left out."""
        self._source = file
        self._file = cast(BinaryIO, io.BufferedReader(self, BUFFER))
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
        if isinstance(self._source, io.BufferedReader):  # a local file: no copy in between
            count = self._source.readinto(buffer)
        else:
            data = self._source.read(len(buffer))
            count = len(data)
            buffer[:count] = data
        self._check()
        self._sha256.update(memoryview(buffer)[:count])
        self.bytes += count
        return count


def list_shards(root: str | Path) -> list[str]:
    """The names of all .tar files below a folder, sorted; links to folders are followed, and each is listed once.

    There are none if `root` is no folder.

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
        names += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".tar")]
    return sorted(names)


def is_local(url: str) -> bool:
    """Whether `url` is a path on this machine rather than a URL or a `pipe:` command."""
    return "://" not in url and not url.startswith("pipe:")


@contextmanager
def open_shard(url: str) -> Iterator[BinaryIO]:
    """The shard as a binary stream that is closed at the end.

    Raises:
        OSError: The shard cannot be opened, or its `pipe:` command fails.
    """
    if url.startswith("pipe:"):
        with _pipe(url.removeprefix("pipe:")) as stream:
            yield stream
    elif "://" in url:
        import fsspec

        # `fsspec.open` would pass the block size to the file system's constructor, which S3's refuses.
        filesystem, path = fsspec.core.url_to_fs(url)
        with filesystem.open(path, "rb", block_size=4 * BUFFER) as file:
            yield cast(BinaryIO, file)
    else:
        with open(url, "rb", buffering=BUFFER) as file:
            yield file


class _CommandOutput:
    """Output of a command. A failed command raises at the end, so that it is not mistaken for a short tar."""

    def __init__(self, process: subprocess.Popen[bytes], errors: BinaryIO, command: str) -> None:
        self._process = process
        self._errors = errors
        self._command = command

    def seekable(self) -> bool:
        return False

    def read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size and (status := self._process.wait()):
            self._errors.seek(0)
            message = self._errors.read()[-500:].decode("utf-8", "replace").strip()
            raise OSError(f"the command {self._command!r} ended with status {status}: {message}")
        return data


@contextmanager
def _pipe(command: str) -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, stderr=errors, bufsize=BUFFER)
        try:
            yield cast(BinaryIO, _CommandOutput(process, errors, command))
        finally:
            if process.stdout is not None:
                process.stdout.close()
            if process.poll() is None:
                process.kill()
            process.wait()
