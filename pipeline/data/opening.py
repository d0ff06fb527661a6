"""Opening a shard where it lies: a local path, a `pipe:` command, or any URL that fsspec knows (s3, gs, https, ...)."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

BUFFER = 1 << 20


@contextmanager
def open_shard(url: str) -> Iterator[BinaryIO]:
    """The shard as a binary stream, closed on leaving; a `pipe:` command's failure counts as a failure to read.

    Raises: OSError when it cannot be opened or its command fails.
    """
    if url.startswith("pipe:"):
        with _pipe(url.removeprefix("pipe:")) as stream:
            yield stream
    elif "://" in url:
        import fsspec

        with fsspec.open(url, "rb", block_size=4 * BUFFER) as file:
            yield cast(BinaryIO, file)
    else:
        with open(url, "rb", buffering=BUFFER) as file:
            yield file


class _Checked:
    """A command's output that raises at its end when the command failed, so that an error never looks like a short
    tar."""

    def __init__(self, process: subprocess.Popen[bytes], errors: BinaryIO, command: str) -> None:
        self._process, self._errors, self._command = process, errors, command

    def seekable(self) -> bool:
        return False

    def read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size and (status := self._process.wait()):
            self._errors.seek(0)
            said = self._errors.read()[-500:].decode("utf-8", "replace").strip()
            raise OSError(f"the command {self._command!r} ended with status {status}: {said}")
        return data


@contextmanager
def _pipe(command: str) -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, stderr=errors, bufsize=BUFFER)
        try:
            yield cast(BinaryIO, _Checked(process, errors, command))
        finally:
            if process.stdout is not None:
                process.stdout.close()
            if process.poll() is None:
                process.kill()
            process.wait()
