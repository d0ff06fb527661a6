"""A task's data, opened: images as lazily read bytes in one canonical order, and everything that is not an image.

What is recorded with a suite's data is in `suite.json` (counts and digests) and `evalsets.json` (what was fetched).
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import UserError
from pipeline.files import other_encoding, read_bounded, sha256_of, text_lines, unlisted
from pipeline.pictures import ImageError
from pipeline.pictures.pixels import Colour, read_file, read_rgb

IMAGE_SUFFIXES = ("webp", "png", "jpg", "jpeg")
LONGEST_MESSAGE = 600
FACTS_NAME = "suite.json"
COUNTS = ("samples", "images", "classes", "captions")
"""What is counted in a task's data."""
ACCEPT = "If the change is wanted, evaluate with relock=true, or into another --output."
"""In messages about data that is not what it was when it was first evaluated."""


class TaskError(UserError):
    """A task cannot be scored: its data is missing, partial, damaged or inconsistent, or a model fails on it."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise a `TaskError` for a file that cannot be read."""
    try:
        yield
    except OSError as error:
        where = path if isinstance(error.filename, int) else error.filename or path
        raise TaskError(f"Cannot read {where}: {error.strerror}. The task's data is incomplete.") from error


class StoredImages:
    """Encoded images by index; picklable, and cheap to open again in another process.

    Args:
        pictures: Where each image is: its file; a file and the first byte and size in it; a zip archive and a member;
            or a `Table`, a column, a row and the position in the row's list. And what it is called in messages.
    """

    def __init__(self, pictures: Sequence[tuple[Any, str]]) -> None:
        self._pictures = pictures
        self._open: dict[Path, Any] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": {}}  # a loader worker must not share its parent's file positions

    def __len__(self) -> int:
        return len(self._pictures)

    def name(self, index: int) -> str:
        """Where the image is, for messages."""
        return self._pictures[index][1]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are an image."""
        return tuple(dict.fromkeys(place for place, _ in self._pictures if isinstance(place, Path)))

    def part(self, indices: Iterable[int]) -> StoredImages:
        """Some of the images."""
        return StoredImages([self._pictures[index] for index in indices])

    def identity(self, index: int) -> object:
        """What equal images have in common: their bytes in a table, or their file, also through links."""
        place = self._pictures[index][0]
        if isinstance(place, Path):
            return os.path.realpath(place)
        return place if isinstance(place[0], Path) else hashlib.sha256(self.read(index)).digest()

    def read(self, index: int) -> bytes:
        """Read the encoded image, or raise a `TaskError`."""
        if isinstance(place := self._pictures[index][0], Path):
            with reading(place):
                return read_file(place)
        path, *part = place
        if not isinstance(path, Path):
            return bytes(path.image(*part))
        if len(part) == 1:
            try:
                self._open[path] = self._open.get(path) or zipfile.ZipFile(path)
                return bytes(self._open[path].read(*part))
            except Exception as error:  # a damaged archive raises a dozen types, zlib's and RuntimeError among them
                raise TaskError(f"{part[0]} in {path} is damaged ({plain(error)}): fetch it again.") from error
        first, size = part
        with reading(path):
            self._open[path] = self._open.get(path) or path.open("rb")
            blob = os.pread(self._open[path].fileno(), size, first)
        if len(blob) != size:
            raise TaskError(f"{self.name(index)}: {len(blob)} of {size} bytes could be read. The shard is cut short.")
        return blob


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
    images: StoredImages
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
    prompts: tuple[tuple[str, ...], ...] = ()
    """Per class, instead of `templates`."""
    captions: tuple[tuple[str, ...], ...] = ()
    """Per image, for retrieval."""
    instances: tuple[Instance, ...] = ()
    on_background: bool = False
    """Transparent pictures are put on the model's background; the official tasks take the colours under the alpha."""
    facts: Mapping[Path, tuple[int, ...]] = field(default_factory=dict)
    """Size, dates and inode of the files before they were read."""

    @property
    def samples(self) -> int:
        """What the benchmark counts: instances where there are any, images otherwise."""
        return len(self.instances) or len(self.images)

    @property
    def counts(self) -> dict[str, int]:
        """What is counted, by the names in `COUNTS`; what there is none of is left out."""
        classes, captions = len(self.classnames) + self.blank_classes, sum(map(len, self.captions))
        numbers = (self.samples, len(self.images), classes, captions)
        return {name: count for name, count in zip(COUNTS, numbers, strict=True) if count}

    def check_unchanged(self) -> None:
        """Compare the files with what they were like: the bytes that are decoded must be those that were hashed."""
        for path in self.files:
            with reading(path):
                changed = self.facts.get(path) != file_facts(path)
            if changed:
                raise TaskError(
                    f"{path} was changed while it was evaluated, so a score would be over mixed data. Evaluate again "
                    "when the data is complete."
                )


def file_facts(path: Path) -> tuple[int, ...]:
    """What changes with every change of a file's content, whoever sets its modification time.

    Raises:
        TaskError: It is a pipe or a device.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise TaskError(f"{path} is no file: reading a pipe or a device would not end.")
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def decode(blob: bytes, *, name: str, background: Colour | None = None) -> Any:
    """Decode the image as the benchmark does: RGB by PIL, EXIF rotation ignored, alpha dropped without a `background`.

    16-bit grey, which the benchmark does not have and PIL clips to white, is scaled to 8 bits, as in training.
    """
    try:
        return read_rgb(blob, background=background)
    except ImageError as error:
        raise TaskError(
            f"Corrupt image {name} ({len(blob):,} bytes): {plain(error)}. Fetch this file of the task again."
        ) from error


def read_text(path: Path) -> str:
    """A text file in UTF-8, with or without the mark of three bytes that some editors write first."""
    with reading(path):
        try:
            content = read_bounded(path)
            if wrong := other_encoding(content[:4]) or ("holds zero bytes" if b"\0" in content else ""):
                raise ValueError(f"it {wrong}")
            return content.decode("utf-8-sig")
        except ValueError as error:
            what = "is damaged, must be converted to UTF-8, or is another file than a task has"
            raise TaskError(f"{path} {what}: {error}.") from error


def read_lines(path: Path) -> tuple[str, ...]:
    """The stripped lines of a text file, including blank ones."""
    return tuple(line.strip() for line in text_lines(read_text(path)))


def files_below(folder: Path, suffix: str = "") -> list[Path]:
    """The files of a folder and its folders, linked ones included, in the order of their names; hidden ones are not.

    What is neither file nor folder, such as a link to nothing, is among them.
    """
    files, entered, root = [], set(), os.path.realpath(folder)
    for top, folders, names in os.walk(folder, followlinks=True, onerror=unlisted):
        real = os.path.realpath(top)
        if real != root and os.path.commonpath([real, root]) == real:
            raise TaskError(f"{top} is a link to {real}, which contains it: remove the link.")
        if real in entered:
            folders[:] = names[:] = []
        entered.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(top, name) for name in names if name.endswith(suffix) and not name.startswith(".")]
    return sorted(files)


def check_inside(files: Iterable[Path], places: Sequence[Path]) -> None:
    """Check that all files are below one of the folders `places`, wherever links lead.

    Tables and archives may come from strangers: those that name, or link to, other files of the user would have them
    read, and shown among a report's examples.
    """
    roots, inside = [os.path.realpath(place) for place in places], dict[str, bool]()

    def is_inside(path: str) -> bool:
        return any(os.path.commonpath([root, path]) == root for root in roots)

    for path in files:
        folder = os.path.dirname(path)
        if folder not in inside:  # the links of a folder of many images are followed once
            inside[folder] = is_inside(os.path.realpath(folder))
        if not (is_inside(os.path.realpath(path)) if path.is_symlink() else inside[folder]):
            raise TaskError(
                f"{path} is outside of {places[0]}, or a link that leads out of it ({os.path.realpath(path)}): whoever "
                "made this data could have any file of yours read so. If you made it, or trust whoever did, set "
                "allow_outside=true (evaluation.allow_outside=true in `neuclip train` and `watch`)."
            )


def plain(error: object, *, longest: int = LONGEST_MESSAGE) -> str:
    """A message in one line, without memory addresses (they change from run to run), cut where it is too long."""
    text = re.sub(r"<([\w.]+)(?: object)? at 0x[0-9a-fA-F]+>", r"<\1>", str(error))
    text = " ".join(re.sub(r"\bat 0x[0-9a-fA-F]+", "", text).split())
    return text if len(text) <= longest else f"{text[: longest - 40]} ... ({len(text):,} characters)"


def check_digests(key: str, files: Mapping[str, str], expected: Mapping[str, str], *, folder: Path | None) -> None:
    """Compare the digests of a task's files, by name, with those that were recorded with the data.

    A recorded file that is not among those that were read must be in `folder`.
    """
    wrong = [name for name in expected if name in files and files[name] != expected[name]]
    wrong += [name for name in expected if name not in files and not (folder and (folder / name).is_file())]
    if wrong:
        raise TaskError(
            f"{key}: {len(wrong)} of {len(expected)} files are missing or have another SHA-256 than was recorded with "
            f"the data ({', '.join(wrong[:3])}). They are damaged or of another version: fetch them again."
        )


def file_digests(files: Iterable[Path], folder: Path) -> dict[str, str]:
    """Compute the SHA-256 of files, by their names relative to `folder`, with `..` for files elsewhere."""
    digests = {}
    for path in files:
        with reading(path):
            name = Path(os.path.relpath(path.absolute(), folder.absolute())).as_posix()
            digests[name] = sha256_of(path)
    return digests
