"""Files that are written whole or not at all: under a temporary name first, then renamed into place."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: str | Path, *, durable: bool = False, unique: bool = True) -> Iterator[Path]:
    """A temporary path in the same folder; what is written there takes the place of `path` in one step at the end.

    Readers see the old file or the new one, never a part. When the block raises, the temporary file is removed and
    `path` is left as it was.

    Args:
        path: The file to create or replace. Its folder is created if needed.
        durable: Flush the contents to the disk before renaming, so that a power failure cannot leave an empty file.
        unique: Use a temporary name that no other process on any machine uses, so that several may replace the same
            file at once and the last one wins. False uses one fixed name, for large files with a single writer: a
            retry then overwrites what a killed process left behind.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp" if unique else f".{path.name}.tmp")
    try:
        yield temporary
        if durable:
            flush(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # a write to a full disk raises an error without a name
        raise


def write_text(path: str | Path, text: str, *, durable: bool = False) -> Path:
    """Create or replace a UTF-8 text file in one step (see `replacing`), and return its path."""
    path = Path(path)
    with replacing(path, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def write_json(path: str | Path, tree: Any, *, durable: bool = False) -> Path:
    """Create or replace an indented JSON file in one step (see `replacing`), and return its path."""
    return write_text(path, json.dumps(tree, indent=1) + "\n", durable=durable)


def sha256_of(path: str | Path) -> str:
    """The SHA-256 of a file's contents, as hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: str | Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
