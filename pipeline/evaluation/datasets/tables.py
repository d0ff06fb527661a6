"""Rows of a task, and the images in them: of a data set of `datasets`, or of parquet files where they are.

Images stay the bytes that were stored, and are decoded like every other image of the evaluation: `datasets` itself
would apply the EXIF rotation, which the benchmark does not.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.evaluation.datasets.task_data import StoredImages, TaskError, plain

Members = Mapping[str, tuple[Path, str]]
"""Archive and member of every image in zip archives, by its names."""
Cells = Callable[[str, int], Iterator[tuple[int, Any]]]
"""Column and row -> from this row or an earlier one on, a few cells at a time: number of the first, arrow array."""
TOGETHER = 64
"""Cells, with their images, that are read at a time."""


def dataset_cells(dataset: Any, column: str, first: int) -> Iterator[tuple[int, Any]]:
    """`Cells` of a `datasets.Dataset`."""
    view = dataset.with_format("arrow", columns=[column])
    for start in range(first, len(view), TOGETHER):
        yield start, view[start : start + TOGETHER].column(0)  # not joined before its offsets are validated


def parquet_cells(files: Sequence[Path], column: str, first: int) -> Iterator[tuple[int, Any]]:
    """`Cells` of parquet files; row groups before `first` are not read."""
    import pyarrow.parquet as pq

    start = 0
    for path in files:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if start + rows > first:
                    at = start
                    for batch in file.iter_batches(TOGETHER, row_groups=[group], columns=[column]):
                        yield at, batch.column(0)
                        at += len(batch)
                    if at != start + rows:
                        raise ValueError(f"{at - start} of the {rows} rows of row group {group} can be read")
                start += rows


class Table:
    """Rows whose images are bytes in their cells, or named by them.

    Args:
        cells: What reads a column.
        features: Its columns, of which those of labels may have `names`.
        folder: Where paths in its cells start.
        layout: What it was read from, for results.
        files: The files that determine it, without the images that it only names.
        members: The images in zip archives; None where those that it names are files.
        names: What its rows are called in messages, and the number of the first.
    """

    def __init__(
        self,
        cells: Cells,
        features: Mapping[str, Any],
        *,
        folder: Path,
        layout: str,
        files: Sequence[Path],
        members: Members | None = None,
        names: tuple[Path, int] | None = None,
    ) -> None:
        self.folder, self.layout, self.files, self._members = folder, layout, tuple(files), members
        self.columns, self.name, self._first = tuple(features), *(names or (folder, 0))
        self._cells, self._features = cells, features
        self._open: tuple[str, int, Any, Iterator[tuple[int, Any]]] | None = None
        """The column whose images are being read: its name, the first row and the cells at hand, and the rest."""

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": None}

    @property
    def is_csv(self) -> bool:
        return self.layout.startswith("csv")

    def row_name(self, row: int) -> str:
        """Where a row is, for messages."""
        return f"row {row + self._first} of {self.name}"

    def class_names(self, column: str) -> tuple[str, ...]:
        """The names that are stored for a label column; empty when there are none."""
        return tuple(getattr(self._features[column], "names", ()) or ())

    def values(self, column: str) -> Iterator[Any]:
        """A column as plain values."""
        for _, cells in self._read(column):
            yield from cells.to_pylist()

    def pictures(self, column: str, *, counts: Sequence[int] | None = None) -> StoredImages:
        """The images of all rows, of which each must have as many as `counts` says, by default one."""
        pictures = []
        for row, cell in enumerate(self.values(column)):
            items = as_list(cell, where=self.row_name(row)) if isinstance(cell, str) else cell
            items = items if isinstance(items, list) else [items]
            wanted = counts[row] if counts else 1
            if len(items) != wanted:
                raise TaskError(
                    f"{self.row_name(row)} has {len(items)} images in the column {column}, and {wanted} are expected."
                )
            for k, item in enumerate(items):
                position = k if isinstance(cell, list) or wanted > 1 else None
                place = self._file(item, row, column) or (self, column, row, position)
                name = column if position is None else f"{column}[{position}]"
                pictures.append((place, f"{name} of {self.row_name(row)}"))
        if not pictures:
            raise TaskError(f"{self.name} holds no rows at all.")
        return StoredImages(pictures)

    def _file(self, name: Any, row: int, column: str) -> Path | tuple[Path, str] | None:
        """The file, or archive and member, of an image, None where its cell has its bytes. A cell holds bytes, a name,
        or a mapping of bytes and path, one of them null.
        """
        if isinstance(name.get("bytes") if isinstance(name, Mapping) else name, bytes):
            return None
        if isinstance(name, Mapping):
            name = name.get("path")
        if not isinstance(name, str) or not name.strip():
            raise TaskError(f"{self.row_name(row)} holds no image, and names none, in the column {column}.")
        if self._members is None:
            return locate(name, self.folder)
        keys = (name, Path(name).name, Path(name).stem)
        member = next((self._members[key] for key in keys if key in self._members), None)
        if member is None:
            raise TaskError(f"The image {name!r} of {self.row_name(row)} is in none of its archives: data is missing.")
        return member

    def image(self, column: str, row: int, position: int | None) -> bytes:
        """The encoded image in a cell; fast where rows are read in order."""
        if self._open is None or self._open[0] != column or row < self._open[1]:
            rest = self._read(column, row)
            self._open = column, *next(rest), rest
        _, start, cells, rest = self._open
        while row >= start + len(cells):
            start, cells = next(rest)
        self._open = column, start, cells, rest
        cell = cells[row - start]
        value = (cell if position is None else cell.values[position]).as_py()
        return value["bytes"] if isinstance(value, Mapping) else value

    def _read(self, column: str, first: int = 0) -> Iterator[tuple[int, Any]]:
        try:
            for start, cells in self._cells(column, first):
                cells.validate(full=True)  # values of a damaged file that is mapped into memory could point anywhere
                yield start, cells
        except Exception as error:  # a damaged file can raise any of a dozen exception types
            raise TaskError(f"{self.files[0]} is damaged ({plain(error)}): fetch the data set again.") from error


def locate(path: str, folder: Path) -> Path:
    """The file of an image that a table names by its path.

    `datasets` caches absolute paths below `downloads/` of its cache. As the cache may have been moved or copied, the
    file is looked for below the `downloads/` beside or above the table first.
    """
    parts = Path(path).parts
    if "downloads" in parts:
        below = Path(*parts[parts.index("downloads") :])
        for parent in (folder, *folder.absolute().parents):
            if (parent / below).is_file():
                return parent / below
    return folder / path


def as_text(value: Any, *, where: str) -> str:
    """A cell that must be text, also as UTF-8 in a column of bytes; empty where it is missing."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise TaskError(f"{where} holds text that is not UTF-8 ({error}).") from error
    if value is not None and not isinstance(value, str):
        raise TaskError(f"{where} holds {value!r:.60}, which is not text.")
    return value or ""


def as_list(value: Any, *, where: str) -> list[str]:
    """A list of texts that may itself be stored as text (JSON or Python), or one text on its own."""
    if value is None:
        return []
    if isinstance(value, list | tuple | np.ndarray):
        return [as_text(item, where=where) for item in value]
    text = as_text(value, where=where)
    if not text.strip().startswith("[") or ("]" in text and not text.strip().endswith("]")):
        return [text]
    items = parsed_list(text)
    if items is None:
        raise TaskError(f"{where}: {text.strip()[:60]!r} should be a list, but is neither JSON nor Python.")
    return [as_text(item, where=where) for item in items]


def parsed_list(text: str) -> list[Any] | None:
    """The list that a text is in JSON or Python; None when it is none."""
    for parse in (ast.literal_eval, json.loads):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: thousands of brackets
            if isinstance(items := parse(text.strip()), list):
                return items
    return None
