"""A note of the image that a worker is decoding, so that an image that kills its worker can be identified."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from data_prep.dataset.fault_points import fault_point

_LENGTH = 4096


class DecodingNote:
    """A small file with the URL of the image being decoded; it survives a killed process.

    Args:
        path: The file.
        url_of: The URL that a body came from.
    """

    def __init__(self, path: Path, url_of: Callable[[bytes], str]) -> None:
        self._path, self._url_of = path, url_of

    def begin(self, body: bytes) -> None:
        """Note that this body is being decoded."""
        url = self._url_of(body)
        self._write(url.encode(errors="replace")[:_LENGTH].ljust(_LENGTH))
        fault_point("decode", url)

    def end(self) -> None:
        """Note that the image was decoded."""
        self._write(b" ")

    def _write(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk; the writer of samples notices it
            os.pwrite(self._file, text, 0)

    def __enter__(self) -> DecodingNote:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._file)
        self._path.unlink(missing_ok=True)


def noted_url(path: Path) -> str:
    """The URL in a note that a dead worker left; empty if it was not decoding."""
    try:
        text = path.read_bytes().decode(errors="replace")
    except OSError:
        return ""
    return "" if text.startswith(" ") else text.strip()
