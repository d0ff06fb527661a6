"""A task's data, opened: images as lazily read bytes in one canonical order, and everything that is not an image."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipeline.errors import UserError

IMAGE_SUFFIXES = ("webp", "png", "jpg", "jpeg")


class TaskError(UserError):
    """A task cannot be scored: its data is missing, partial, damaged or contradicts itself, or a model fails on it."""


class ImageSource(Protocol):
    """Encoded images by index; picklable, and cheap to open again in another process."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes:
        """The encoded image. Raises: TaskError when it cannot be read."""

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
    """What a protocol needs of one task.

    files: everything that determines the data, in a fixed order; their digests make the data digest.
    blank_classes: blank lines of classnames.txt that were dropped.
    labels: [n] int64 and metadata: [n, columns] int64, for classification. captions: per image, for retrieval.
    """

    folder: Path
    layout: str
    images: ImageSource
    files: tuple[Path, ...]
    blank_classes: int = 0
    labels: np.ndarray | None = None
    metadata: np.ndarray | None = None
    classnames: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    captions: tuple[tuple[str, ...], ...] = ()
    instances: tuple[Instance, ...] = ()

    @property
    def samples(self) -> int:
        """What the benchmark counts: instances where there are any, images otherwise."""
        return len(self.instances) or len(self.images)


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


def decode(blob: bytes, *, name: str) -> Any:
    """The image as the benchmark sees it: RGB by PIL, EXIF rotation ignored, alpha dropped.

    Raises: TaskError naming the image when PIL cannot decode all of it.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(blob)) as image:
            return image.convert("RGB")
    except Exception as error:  # PIL raises many kinds for damaged files
        raise TaskError(
            f"Corrupt image {name} ({len(blob):,} bytes): {error}. Fetch this file of the task again."
        ) from error


def read_lines(path: Path) -> tuple[str, ...]:
    """The stripped lines of a text file; a blank line is a line. Raises: TaskError when there is no such file."""
    try:
        return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"Cannot read {path}: {error}. The task's folder is incomplete.") from error
