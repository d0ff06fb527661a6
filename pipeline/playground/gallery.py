"""The images that the page searches: of a folder of images, or of webdataset shards."""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline import pictures
from pipeline.data.shards.storage import list_shards, open_records
from pipeline.data.shards.tar_reader import DamagedTar
from pipeline.errors import UserError
from pipeline.pictures.pixels import WHITE, Colour, read_file, read_rgb

SIDE = 384
"""Pixels of the longer side of the images that the page shows."""
LARGEST_PIXELS = 64_000_000
_WHY = {
    pictures.NOT_AN_IMAGE: "is not an image that can be read (PNG, JPEG, WebP and others)",
    pictures.TRUNCATED: "is damaged: it cannot be decoded to its end",
}


@dataclass
class Dropped:
    """What could not be used, by reason, with the first example of each."""

    count: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, example: str, *, count: int = 1) -> None:
        self.count[reason] += count
        self.examples.setdefault(reason, example)

    def lines(self) -> list[str]:
        """One line per reason."""
        return [f"{n:,} skipped: {reason} (first: {self.examples[reason]})" for reason, n in self.count.items()]


def read_images(folder: Path, *, limit: int, dropped: Dropped) -> Iterator[tuple[str, bytes]]:
    """The names and encoded images of the first `limit` samples in a folder of images, or of shards.

    Raises:
        UserError: There is nothing of that kind.
    """
    paths = [folder / name for name in list_shards(folder, ("",)) if not Path(name).name.startswith(".")]
    shards = [path for path in paths if path.suffix == ".tar"]
    images = [path for path in paths if path.suffix.lower().removeprefix(".") in pictures.FORMAT_SUFFIXES]
    if not shards and not images:
        formats = ", ".join(pictures.FORMAT_SUFFIXES)
        raise UserError(f"--images {folder}: there are no images in such a folder ({formats}) and no shards (*.tar).")
    if shards and images:
        dropped.add("images beside shards are not read", _shown(images[0]), count=len(images))
    samples = _from_shards(shards, dropped) if shards else _from_files(images, folder, dropped)
    for name, image in islice(samples, limit):
        if image is None:
            dropped.add("image is missing", name)
        else:
            yield name, image


def _from_files(paths: list[Path], root: Path, dropped: Dropped) -> Iterator[tuple[str, bytes]]:
    for path in paths:
        try:
            yield _shown(path.relative_to(root)), read_file(path)
        except OSError as error:
            dropped.add("the file cannot be read", f"{_shown(path)}: {error.strerror}")


def _from_shards(shards: list[Path], dropped: Dropped) -> Iterator[tuple[str, bytes | None]]:
    for shard in shards:
        try:
            with open_records(str(shard)) as records:
                for row, record in enumerate(records):
                    yield f"{_shown(Path(shard.name))}, sample {row}", record.image
        except (DamagedTar, OSError) as error:
            dropped.add("the shard is damaged", f"{_shown(shard)}: {error}")


def _shown(path: Path) -> str:
    """A path as text; bytes that are no UTF-8 become replacement characters."""
    return os.fsencode(path).decode(errors="replace")


def open_image(body: bytes, *, name: str, background: Colour = WHITE) -> Any:
    """The image in RGB, turned as its EXIF data asks.

    Raises:
        UserError: It is not an image, damaged, or has too many pixels.
    """
    try:
        return read_rgb(body, max_pixels=LARGEST_PIXELS, background=background, turned=True)
    except pictures.ImageError as error:
        if error.reason == pictures.TOO_MANY_PIXELS:
            limit = f"more than the {LARGEST_PIXELS:,} pixels allowed"
            size = re.sub(r".*\((\d+ pixels)\).*", r"\1", error.detail)  # Pillow's own limit has a text of its own
            raise UserError(f"{name} has {size}, {limit}: make it smaller.") from error
        raise UserError(f"{name} {_WHY.get(error.reason, f'cannot be read ({error})')}.") from error


def thumbnail(image: Any) -> bytes:
    """A JPEG of at most `SIDE` pixels."""
    image.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=86)
    return buffer.getvalue()
