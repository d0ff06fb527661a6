"""Rows of a task, in any supported layout. Images are returned as the bytes that were stored.

Images are decoded like every other image of the evaluation: `datasets` itself would apply the EXIF rotation, which the
benchmark does not.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pipeline.evaluation.datasets.task_data import TaskError, read_bytes

Place = tuple[int, int | None]
"""Row, and position in the row's list of images (None when the row has one image)."""


class Table(Protocol):
    layout: str
    files: tuple[Path, ...]
    columns: tuple[str, ...]

    def __len__(self) -> int: ...

    def values(self, column: str) -> list[Any]:
        """A column without images, as plain values."""

    def image(self, column: str, place: Place) -> bytes:
        """An encoded image."""

    def image_files(self, column: str) -> tuple[Path, ...]:
        """The files of images that the table only names."""

    def row_name(self, row: int) -> str:
        """Where a row is, for messages."""


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


def as_list(value: Any, *, where: str) -> list[str]:
    """A list that may be stored as text (JSON or Python), or one value on its own.

    Raises:
        TaskError: The text begins like a list, but is none; `where` says which row it is.
    """
    if value is None:
        return []
    if not isinstance(value, str):
        return ["" if item is None else str(item) for item in value]
    text = value.strip()
    if not text.startswith("["):
        return [value]
    try:
        found = json.loads(text)
    except ValueError:
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise TaskError(f"{where}: {text[:60]!r} should be a list, but is neither JSON nor Python.") from None
    return ["" if item is None else str(item) for item in found]


def image_bytes(value: Any, place: Place, *, table: Table, folder: Path) -> bytes:
    """The bytes of a stored image, which is a struct of bytes and path, or bytes alone.

    Raises:
        TaskError: There is no image.
    """
    if place[1] is not None:
        if value is None or place[1] >= len(value):
            count = 0 if value is None else len(value)
            raise TaskError(f"{table.row_name(place[0])} has {count} images, fewer than it has candidates.")
        value = value[place[1]]
    if isinstance(value, Mapping):
        if value.get("bytes") is None and value.get("path"):
            return read_bytes(locate(value["path"], folder))
        value = value.get("bytes")
    if not isinstance(value, bytes):
        raise TaskError(f"{table.row_name(place[0])} holds no image.")
    return value


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
