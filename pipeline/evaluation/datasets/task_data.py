"""A task's data, opened: images as lazily read bytes in one canonical order, and everything that is not an image."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipeline.errors import UserError
from pipeline.pixels import eight_bits

IMAGE_SUFFIXES = ("webp", "png", "jpg", "jpeg")
LONGEST_MESSAGE = 600


class TaskError(UserError):
    """A task cannot be scored: its data is missing, partial, damaged or inconsistent, or a model fails on it."""


class ImageSource(Protocol):
    """Encoded images by index; picklable, and cheap to open again in another process."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes:
        """Read the encoded image.

        Raises:
            TaskError: It cannot be read.
        """

    def name(self, index: int) -> str:
        """Where the image is, for messages."""


@dataclass(frozen=True)
class Instance:
    """One WinoGAViL instance: positions of the candidate images, and which of them are associated with the cue."""

    cue: str
    candidates: tuple[int, ...]
    associated: tuple[bool, ...]


@dataclass(frozen=True)
class TaskData:
    """The data that a protocol needs for one task."""

    folder: Path
    layout: str
    images: ImageSource
    files: tuple[Path, ...]
    """The files that determine the data, in a fixed order; the data digest is made of their digests and `columns`."""
    columns: tuple[str, ...] = ()
    """The columns that a `tasks.yaml` chose: which image, and which label or caption. Other columns are other data."""
    blank_classes: int = 0
    """Blank lines of classnames.txt that were dropped."""
    labels: np.ndarray | None = None
    """[n] int64, for classification."""
    metadata: np.ndarray | None = None
    """[n, columns] int64, for classification tasks with groups."""
    classnames: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    captions: tuple[tuple[str, ...], ...] = ()
    """Per image, for retrieval."""
    instances: tuple[Instance, ...] = ()

    @property
    def samples(self) -> int:
        """What the benchmark counts: instances where there are any, images otherwise."""
        return len(self.instances) or len(self.images)

    @property
    def counts(self) -> dict[str, int]:
        """Counts, as a lock records them."""
        found = {
            "samples": self.samples,
            "images": len(self.images),
            "classes": len(self.classnames) + self.blank_classes,
            "captions": sum(map(len, self.captions)),
        }
        return {name: count for name, count in found.items() if count}


class MemoryImages:
    """Encoded images held in memory, for what is small or cannot be read by position."""

    def __init__(self, blobs: Sequence[bytes], names: Sequence[str]) -> None:
        self._blobs, self._names = list(blobs), list(names)

    def __len__(self) -> int:
        return len(self._blobs)

    def read(self, index: int) -> bytes:
        return self._blobs[index]

    def name(self, index: int) -> str:
        return self._names[index]


class FileImages:
    """Images that are files of their own."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, index: int) -> bytes:
        return read_bytes(self._paths[index])

    def name(self, index: int) -> str:
        return str(self._paths[index])


def decode(blob: bytes, *, name: str) -> Any:
    """Decode the image as the benchmark does: RGB by PIL, EXIF rotation ignored, alpha dropped.

    16-bit grey, which the benchmark does not have and PIL clips to white, is scaled to 8 bits, as in training.

    Raises:
        TaskError: PIL cannot decode all of the image; the message names it.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(blob)) as image:
            return eight_bits(image).convert("RGB")
    except Exception as error:  # PIL raises many exception types for damaged files
        raise TaskError(
            f"Corrupt image {name} ({len(blob):,} bytes): {plain(error)}. Fetch this file of the task again."
        ) from error


def read_lines(path: Path) -> tuple[str, ...]:
    """The stripped lines of a text file, including blank ones.

    Raises:
        TaskError: It cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a mark of three bytes first
        if "\0" in text:
            raise TaskError(f"{path} holds zero bytes: it was damaged. Fetch it again.")
        return tuple(line.strip() for line in text.splitlines())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or plain(error)
        raise TaskError(f"Cannot read {path}: {reason}. The task's folder is incomplete or damaged.") from error


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises:
        TaskError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise TaskError(f"Cannot read {path}: {error.strerror}. The task's data is incomplete.") from error


def plain(error: object, *, longest: int = LONGEST_MESSAGE) -> str:
    """A message in one line, without memory addresses (they change from run to run), cut where it is too long."""
    text = re.sub(r"<([\w.]+)(?: object)? at 0x[0-9a-fA-F]+>", r"<\1>", str(error))
    text = " ".join(re.sub(r"\bat 0x[0-9a-fA-F]+", "", text).split())
    return text if len(text) <= longest else f"{text[: longest - 40]} ... ({len(text):,} characters)"
