"""The images and captions that the page searches: from a folder of images, a folder of shards, or a text file."""

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

from pipeline.data.shards.storage import list_shards, open_records
from pipeline.data.shards.tar_reader import FORMAT_SUFFIXES, CaptionField, CorruptSample, DamagedTar
from pipeline.errors import UserError
from pipeline.evaluation.datasets.task_data import TaskError, read_lines
from pipeline.pictures import image_error
from pipeline.pictures.pixels import WHITE, Colour, read_file, read_rgb

SIDE = 384
"""Pixels of the longer side of the images that the page shows."""
LARGEST_PIXELS = 64_000_000
_WHY = {
    image_error.NOT_AN_IMAGE: "is not an image that can be read (PNG, JPEG, WebP and others)",
    image_error.TRUNCATED: "is damaged: it cannot be decoded to its end",
}


@dataclass
class Sample:
    """One image or caption, or both."""

    name: str
    image: bytes | None = None
    caption: str | None = None


@dataclass
class Dropped:
    """What could not be used, by reason, with the first example of each."""

    count: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What else was left out."""

    def add(self, reason: str, example: str) -> None:
        self.count[reason] += 1
        self.examples.setdefault(reason, example)

    def lines(self) -> list[str]:
        """One line per reason, and the notes."""
        counted = self.count.items()
        lines = [f"{count:,} skipped: {reason} (first: {self.examples[reason]})" for reason, count in counted]
        return lines + self.notes


def read_samples(source: Path, *, caption: CaptionField, limit: int, dropped: Dropped) -> Iterator[Sample]:
    """The first `limit` samples of a folder of images, a folder of webdataset shards, or a text file of captions.

    Raises:
        UserError: There is nothing of that kind.
    """
    if source.is_file():
        try:
            lines = [(number, line) for number, line in enumerate(read_lines(source), 1) if line]
        except TaskError as error:
            raise UserError(
                f"{source} is not a UTF-8 text file with a caption a line: give such a file, or a folder of images or "
                "shards."
            ) from error
        samples = iter([Sample(f"line {number}", caption=line) for number, line in lines])
        what = f"{len(lines):,} captions in {_shown(source)}"
    elif not source.is_dir():
        raise UserError(
            f"There is no {source}: give a folder of images or shards, or a text file with a caption a line."
        )
    else:
        paths = sorted(
            path
            for path in source.rglob("*")
            if path.suffix.lower().removeprefix(".") in FORMAT_SUFFIXES and not path.name.startswith(".")
        )
        shards = shards_in(source)
        if not paths and not shards:
            raise UserError(f"{source} holds no images ({', '.join(FORMAT_SUFFIXES)}) and no shards (*.tar).")
        if paths and shards:
            dropped.notes.append(f"{len(paths):,} images beside the shards of {_shown(source)} are not used.")
        samples = _from_shards(shards, caption, dropped) if shards else _from_files(paths, source, dropped)
        what = "samples of the shards" if shards else f"{len(paths):,} images in {_shown(source)}"
    yield from islice(samples, limit)
    if next(samples, None) is not None:
        first = f"{limit:,} {what}" if what.startswith("samples") else f"{limit:,} of the {what}"
        dropped.notes.append(f"Only the first {first} are used: --limit.")


def _from_files(paths: list[Path], root: Path, dropped: Dropped) -> Iterator[Sample]:
    for path in paths:
        try:
            yield Sample(_shown(path.relative_to(root)), image=read_file(path))
        except OSError as error:
            dropped.add("the file cannot be read", f"{_shown(path)}: {error.strerror}")


def _from_shards(shards: list[Path], caption: CaptionField, dropped: Dropped) -> Iterator[Sample]:
    for shard in shards:
        try:
            with open_records(str(shard), skip=0, caption_suffix=caption.suffix) as records:
                for row, record in enumerate(records):
                    name, text = f"{_shown(Path(shard.name))}, sample {row}", None
                    try:
                        text = caption.read(record)
                    except CorruptSample as error:
                        dropped.add(str(error), name)
                    yield Sample(name, image=record.image, caption=text)
        except (DamagedTar, OSError) as error:
            dropped.add("the shard is damaged", f"{_shown(shard)}: {error}")


def shards_in(folder: Path) -> list[Path]:
    """The shards below a folder, in order."""
    return [folder / name for name in list_shards(folder) if not Path(name).name.startswith(".")]


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
    except image_error.ImageError as error:
        if error.reason == image_error.TOO_MANY_PIXELS:
            limit = f"more than the {LARGEST_PIXELS:,} pixels allowed"
            size = re.sub(r".*\((\d+ pixels)\).*", r"\1", error.detail)  # Pillow's own limit has a text of its own
            raise UserError(f"{name} has {size}, {limit}: make it smaller.") from error
        raise UserError(f"{name} {_WHY.get(error.reason, f'cannot be read ({error})')}.") from error


def thumbnail(image: Any) -> bytes:
    """A JPEG of at most `SIDE` pixels."""
    small = image.copy()
    small.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=86)
    return buffer.getvalue()
