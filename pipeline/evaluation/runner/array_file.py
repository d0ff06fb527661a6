"""One array per file with a checksum at its end, for caches: a damaged file is the same as none."""

from __future__ import annotations

import io
import tokenize
import zlib
from pathlib import Path

import numpy as np

from pipeline.files import replacing

CHECKSUM_BYTES = 4


def load_array(path: Path) -> np.ndarray | None:
    """The array in a file written by `store_array`; None when the file is missing, incomplete or damaged."""
    try:
        with path.open("rb") as file:
            array: np.ndarray = np.load(file, allow_pickle=False)
            checksum = file.read(CHECKSUM_BYTES)
    except (OSError, ValueError, EOFError, MemoryError, SyntaxError, tokenize.TokenError):
        # A damaged header may state any shape, or be no Python literal.
        return None
    return array if checksum == _checksum(array) else None


def store_array(path: Path, array: np.ndarray) -> None:
    """Write an array; a file of that name is complete or not there.

    Raises:
        OSError: The disk refuses it.
    """
    buffer = io.BytesIO()  # numpy's own error on a full disk does not say that the disk is full
    np.save(buffer, array, allow_pickle=False)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(buffer.getbuffer())
        file.write(_checksum(array))


def _checksum(array: np.ndarray) -> bytes:
    facts = f"{array.dtype.str} {array.shape}".encode()
    return zlib.crc32(array.tobytes(), zlib.crc32(facts)).to_bytes(CHECKSUM_BYTES, "big")
