"""Rows of a task, in any supported layout. Images are returned as the bytes that were stored.

Images are decoded like every other image of the evaluation: `datasets` itself would apply the EXIF rotation, which the
benchmark does not.
"""

from __future__ import annotations

import ast
import csv
import json
import os
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.evaluation.datasets.task_data import IMAGE_SUFFIXES, TaskError, plain, read_bytes
from pipeline.files import other_encoding

Place = tuple[int, int | None]
"""Row, and position in the row's list of images (None when the row has one image)."""


class Table(ABC):
    """Rows of a task. Images are in its cells, unless a subclass says otherwise; the last cell stays in memory."""

    layout: str
    folder: Path
    """Where paths in its cells start."""
    files: tuple[Path, ...]
    columns: tuple[str, ...]
    _last: tuple[Any, Any] = (None, None)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_last": (None, None)}

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def values(self, column: str) -> list[Any]:
        """A column without images, as plain values."""

    @abstractmethod
    def files_of(self, column: str, place: Place) -> Iterable[Path]:
        """The files that an image is read from."""

    @abstractmethod
    def row_name(self, row: int) -> str:
        """Where a row is, for messages."""

    @abstractmethod
    def _value(self, column: str, row: int) -> Any:
        """Read a cell."""

    def image(self, column: str, place: Place) -> bytes:
        """An encoded image: a cell, or one of the list in it, is a struct of bytes and path, or bytes alone.

        Raises:
            TaskError: There is no image.
        """
        row, position = place
        value = self._cell(column, row)
        if position is not None:
            if value is None or position >= len(value):
                count = 0 if value is None else len(value)
                raise TaskError(f"{self.row_name(row)} has {count} images, fewer than it has candidates.")
            value = value[position]
        if isinstance(value, Mapping):
            if value.get("bytes") is None and value.get("path"):
                return read_bytes(locate(value["path"], self.folder))
            value = value.get("bytes")
        if not isinstance(value, bytes):
            raise TaskError(f"{self.row_name(row)} holds no image.")
        return value

    def image_name(self, column: str, place: Place) -> str:
        """The name by which the row refers to an image; empty where the table holds it."""
        return ""

    def images_in(self, column: str, row: int) -> int:
        """How many images a row has."""
        cell = self._cell(column, row)
        return len(cell) if isinstance(cell, list | tuple) else int(cell is not None)

    def image_files(self, column: str) -> tuple[Path, ...]:
        """The files of images that the table only names."""
        return ()

    def class_names(self, column: str) -> tuple[str, ...]:
        """The names that are stored for a label column; empty when there are none."""
        return ()

    def _cell(self, column: str, row: int) -> Any:
        if self._last[0] != (column, row):
            self._last = ((column, row), self._value(column, row))
        return self._last[1]


class TableImages:
    """Some images of a table as an `ImageSource`."""

    def __init__(self, table: Table, column: str, places: Sequence[Place]) -> None:
        self._table, self._column, self._places = table, column, list(places)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> bytes:
        return self._table.image(self._column, self._places[index])

    def name(self, index: int) -> str:
        row, position = self._places[index]
        inner = "" if position is None else f"[{position}]"
        return f"{self._column}{inner} of {self._table.row_name(row)}"

    def file_name(self, index: int) -> str:
        """The name of the image's file in a table that only names it; empty elsewhere."""
        return os.path.normpath(name) if (name := self._table.image_name(self._column, self._places[index])) else ""

    def files_of(self, index: int) -> Iterable[Path]:
        return self._table.files_of(self._column, self._places[index])


def as_list(value: Any, *, where: str) -> list[str]:
    """A list of texts that may itself be stored as text (JSON or Python), or one text on its own.

    Raises:
        TaskError: The text begins like a list (not as `[new] mug`), but is none, or an item is no text; `where` says
            which row it is.
    """
    if value is None:
        return []
    if isinstance(value, list | tuple | np.ndarray):
        return [as_text(item, where=where) for item in value]
    text = as_text(value, where=where)
    if not text.strip().startswith("[") or ("]" in text and not text.strip().endswith("]")):
        return [text]
    found = None
    for parse in (ast.literal_eval, json.loads):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: thousands of brackets
            found = parse(text.strip())
    if found is None:
        raise TaskError(f"{where}: {text.strip()[:60]!r} should be a list, but is neither JSON nor Python.")
    return [as_text(item, where=where) for item in found]


def as_text(value: Any, *, where: str) -> str:
    """A cell that must be text, also as UTF-8 in a column of bytes; empty where it is missing.

    Raises:
        TaskError: It is something else, whose characters would be scored as if a person had written them.
    """
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise TaskError(f"{where} holds text that is not UTF-8 ({error}).") from error
    if value is not None and not isinstance(value, str):
        raise TaskError(f"{where} holds {value!r:.60}, which is not text.")
    return value or ""


def locate(path: str, folder: Path) -> Path:
    """The file of an image that a table names by its path.

    `datasets` caches absolute paths below `downloads/` of its cache. When the cache has been moved or copied, the file
    is looked for below the `downloads/` beside or above the table.
    """
    given = folder / path
    if given.is_file():
        return given
    parts = Path(path).parts
    if "downloads" in parts:
        below = Path(*parts[parts.index("downloads") :])
        for parent in (folder, *folder.absolute().parents):
            if (parent / below).is_file():
                return parent / below
    return given


Needs = Sequence[tuple[str, ...]]
"""Columns that a CSV must have, each with its possible names."""


class CsvTable(Table):
    """A CSV, and images found by path, file name or bare stem in zip archives, or by path in a folder."""

    def __init__(self, path: Path, *, archives: Sequence[Path] = (), images: Path | None = None) -> None:
        self.layout = "csv+zip" if images is None else "csv+files"
        self._frame = read_csv(path)
        self.columns = tuple(self._frame.columns)
        self._members, self._images = _zip_members(archives), images
        self.folder, self.files = path.parent, (path, *archives)
        self._open: dict[tuple[int, Path], zipfile.ZipFile] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_open": {}}

    def __len__(self) -> int:
        return len(self._frame)

    def values(self, column: str) -> list[Any]:
        return list(self._frame[column])

    def image(self, column: str, place: Place) -> bytes:
        return self._named(self.image_name(column, place), place[0])

    def images_in(self, column: str, row: int) -> int:
        return len(as_list(self._cell(column, row), where=self.row_name(row)))

    def files_of(self, column: str, place: Place) -> Iterable[Path]:
        return self.files if self._images is None else (self._images / self.image_name(column, place),)

    def image_name(self, column: str, place: Place) -> str:
        names = as_list(self._cell(column, place[0]), where=self.row_name(place[0]))
        position = place[1] or 0
        if position >= len(names) or not names[position].strip():
            raise TaskError(f"{self.row_name(place[0])} names no image in the column {column}.")
        return names[position]

    def image_files(self, column: str) -> tuple[Path, ...]:
        if self._images is None:
            return ()
        names = (as_list(value, where=self.row_name(row)) for row, value in enumerate(self._frame[column]))
        return tuple(dict.fromkeys(self._images / name for own in names for name in own))

    def row_name(self, row: int) -> str:
        return f"row {row + 1} of {self.files[0]}"

    def _value(self, column: str, row: int) -> Any:
        return self._frame[column].iloc[row]

    def _named(self, name: str, row: int) -> bytes:
        if self._images is not None:
            path = self._images / name
            if not path.is_file():
                raise TaskError(f"{self.row_name(row)} names the image {path}, which does not exist.")
            return read_bytes(path)
        keys = (name, Path(name).name, Path(name).stem)
        member = next((self._members[key] for key in keys if key in self._members), None)
        if member is None:
            raise TaskError(f"The image {name!r} of {self.row_name(row)} is in none of its archives: data is missing.")
        archive, path_inside = member
        opened = (os.getpid(), archive)  # a forked loader worker must not share its parent's file position
        if opened not in self._open:
            self._open[opened] = zipfile.ZipFile(archive)
        try:
            return self._open[opened].read(path_inside)
        except Exception as error:  # a damaged archive raises a dozen types, zlib's and RuntimeError among them
            raise TaskError(f"{path_inside} in {archive} is damaged ({plain(error)}): fetch it again.") from error


def read_csv(path: Path) -> Any:
    """Read a CSV as a pandas frame of text.

    Raises:
        TaskError: It cannot be read.
    """
    import pandas as pd

    try:
        content = path.read_bytes()
        if wrong := other_encoding(content[:4]):
            raise TaskError(f"{path} {wrong}")
        if b"\0" in content:
            raise TaskError(f"{path} holds zero bytes: it was damaged, or is not UTF-8. Fetch it again, or convert it.")
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = next(csv.reader(file), [])
        twice = next((name for name in header if header.count(name) > 1), None)
        if twice is not None:
            raise TaskError(f"{path} has two columns {twice!r}: which one counts? Rename one.")
        with warnings.catch_warnings():  # rows longer than the header would lose their last cells with a warning only
            warnings.simplefilter("error", pd.errors.ParserWarning)
            return pd.read_csv(path, dtype=str, keep_default_na=False, index_col=False)
    except TaskError:
        raise
    except pd.errors.ParserWarning as error:
        raise TaskError(f"{path}: rows have more cells than the header: quote cells that contain commas.") from error
    except (OSError, ValueError, UnicodeError, csv.Error) as error:  # pandas' own exceptions are ValueErrors
        raise TaskError(f"{path} is not a readable CSV ({plain(error)}).") from error


def find_csv(folder: Path, *, needs: Needs) -> CsvTable:
    """Find the only CSV below `folder` that has the columns in `needs`, and open it with all zip archives.

    Raises:
        TaskError: There is no such CSV, or there are several.
    """
    paths = sorted(path for path in folder.rglob("*.csv") if not path.name.startswith("."))
    columns = {path: set(read_csv(path).columns) for path in paths}
    fitting = [path for path in paths if all(set(names) & columns[path] for names in needs)]
    if len(fitting) != 1:
        wanted = ", ".join(" or ".join(names) for names in needs)
        raise TaskError(
            f"{folder}: exactly one CSV with the columns {wanted} is expected, but "
            f"{len(fitting)} of {', '.join(path.name for path in paths)} have them."
        )
    return CsvTable(fitting[0], archives=sorted(folder.rglob("*.zip")))


def _zip_members(archives: Sequence[Path]) -> dict[str, tuple[Path, str]]:
    """File name and bare stem -> where an image is."""
    members: dict[str, tuple[Path, str]] = {}
    for archive in archives:
        try:
            names = zipfile.ZipFile(archive).namelist()
        except Exception as error:
            raise TaskError(f"{archive} is damaged or cut short ({plain(error)}): fetch it again.") from error
        for name in names:
            path = Path(name)
            if path.suffix.lower().removeprefix(".") in IMAGE_SUFFIXES and not path.name.startswith("._"):
                members[path.name] = members[path.stem] = (archive, name)
    return members
