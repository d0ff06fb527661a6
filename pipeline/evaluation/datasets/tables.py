"""Rows of a task as a `datasets.Dataset`, and the images in them.

Images stay the bytes that were stored, and are decoded like every other image of the evaluation: `datasets` itself
would apply the EXIF rotation, which the benchmark does not.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.evaluation.datasets.cells import as_list
from pipeline.evaluation.datasets.task_data import TaskError, plain, reading
from pipeline.pictures.pixels import read_file

Members = Mapping[str, tuple[Path, str]]
"""Archive and member of every image in zip archives, by its names."""
_HELD = object()
"""Instead of an image's name: its bytes are in the cell."""
_COMPARED = 64
"""Rows of a copy, with their images, that are compared at a time."""


class Picture(NamedTuple):
    """An image of a table."""

    row: int
    position: int | None
    """In the row's list of images; None when the row has one image."""
    source: Path | tuple[Path, str] | None
    """Its file, or archive and member; None when its bytes are in the cell."""


class Table:
    """Rows whose images are bytes in their cells, or named by them.

    Args:
        dataset: A `datasets.Dataset`.
        folder: Where paths in its cells start.
        layout: What it was read from, for results.
        files: The files that determine it, without the images that it only names.
        members: The images in zip archives; None where those that it names are files.
        originals: The parquet files of which the data set is a copy in the cache of `datasets`.
        names: What its rows are called in messages, and the number of the first.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        folder: Path,
        layout: str,
        files: Sequence[Path],
        members: Members | None = None,
        originals: Sequence[Path] = (),
        names: tuple[Path, int] | None = None,
    ) -> None:
        self.folder, self.layout, self.files, self._members = folder, layout, tuple(files), members
        self.columns, self._originals = tuple(dataset.column_names), tuple(originals)
        self.name, self._first = names or (folder, 0)
        self._dataset, self._views = dataset, dict[str, Any]()

    @property
    def is_csv(self) -> bool:
        return self.layout.startswith("csv")

    def row_name(self, row: int) -> str:
        """Where a row is, for messages."""
        return f"row {row + self._first} of {self.name}"

    def class_names(self, column: str) -> tuple[str, ...]:
        """The names that are stored for a label column; empty when there are none."""
        return tuple(getattr(self._dataset.features[column], "names", ()) or ())

    def values(self, column: str) -> list[Any]:
        """A column without images, as plain values."""
        return list(self._read(column, slice(None)).to_pylist())

    def pictures(self, column: str, *, counts: Sequence[int] | None = None) -> list[Picture]:
        """The images of all rows, of which each must have as many as `counts` says, by default one."""
        import pyarrow as pa
        import pyarrow.compute as pc

        are_lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        rows: list[Any] = []
        """A cell of each row, or a list of them."""
        for chunk in self._read(column, slice(None)).chunks:
            if any(test(chunk.type) for test in are_lists):
                cells = iter(_contents(chunk.flatten()))
                rows += [list(islice(cells, length or 0)) for length in pc.list_value_length(chunk).to_pylist()]
            else:
                rows += _contents(chunk)
        pictures = []
        for row, cell in enumerate(rows):
            names = as_list(cell, where=self.row_name(row)) if isinstance(cell, str) else cell
            names = names if isinstance(names, list) else [names]
            wanted = counts[row] if counts else 1
            if len(names) != wanted:
                raise TaskError(
                    f"{self.row_name(row)} has {len(names)} images in the column {column}, and {wanted} are expected."
                )
            for k, name in enumerate(names):
                position = k if isinstance(cell, list) or wanted > 1 else None
                pictures.append(Picture(row, position, self._source(name, row, column)))
        return pictures

    def _source(self, name: Any, row: int, column: str) -> Path | tuple[Path, str] | None:
        if name is _HELD:
            return None
        if not isinstance(name, str) or not name.strip():
            raise TaskError(f"{self.row_name(row)} holds no image, and names none, in the column {column}.")
        if self._members is None:
            return locate(name, self.folder)
        keys = (name, Path(name).name, Path(name).stem)
        member = next((self._members[key] for key in keys if key in self._members), None)
        if member is None:
            raise TaskError(f"The image {name!r} of {self.row_name(row)} is in none of its archives: data is missing.")
        return member

    def image(self, column: str, picture: Picture) -> bytes:
        """The encoded image in a cell."""
        cell = self._read(column, slice(picture.row, picture.row + 1))[0]
        value = (cell if picture.position is None else cell.values[picture.position]).as_py()
        return value["bytes"] if isinstance(value, Mapping) else value

    def _read(self, column: str, rows: slice) -> Any:
        try:
            if column not in self._views:
                view = self._dataset.with_format("arrow", columns=[column])
                self._check_copy(column, view)
                self._views[column] = view
            cells = self._views[column][rows].column(0)
            cells.validate(full=True)  # values of a damaged file that is mapped into memory could point anywhere
            return cells
        except TaskError:
            raise
        except Exception as error:  # a damaged file can raise any of a dozen exception types
            raise TaskError(f"{self.files[0]} is damaged ({plain(error)}): fetch the data set again.") from error

    def _check_copy(self, column: str, view: Any) -> None:
        """Compare a column with the parquet files, whose digests the result records, before it is used."""
        import pyarrow as pa
        import pyarrow.parquet as pq
        from datasets import Features
        from datasets.table import table_cast

        schema, row = Features({column: view.features[column]}).arrow_schema, 0
        for path in self._originals:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=_COMPARED, columns=[column]):
                    stored = table_cast(pa.Table.from_batches([batch]), schema).column(0)
                    if not _are_equal(view[row : row + len(batch)].column(0), stored):
                        copy = Path(view.cache_files[0]["filename"]).parent
                        raise TaskError(f"{copy} is no true copy of {path}: delete that folder, and evaluate again.")
                    row += len(batch)


def _are_equal(first: Any, second: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_floating(first.type):  # NaN is not equal to itself
        return np.array_equal(first.to_numpy(), second.to_numpy(), equal_nan=True)
    return bool(first.equals(second))


def _contents(cells: Any) -> list[Any]:
    """What cells of images hold, as an arrow array: `_HELD` for bytes, else the name of the image, or something else.

    An image of `datasets` is a mapping of its bytes and its path, one of them null.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    stored = names = cells
    if pa.types.is_struct(cells.type):
        fields = {field.name: pc.struct_field(cells, field.name) for field in cells.type}
        stored, names = fields.get("bytes"), fields.get("path")
    if stored is None or not (pa.types.is_binary(stored.type) or pa.types.is_large_binary(stored.type)):
        held = [False] * len(cells)
    else:
        held = pc.is_valid(stored).to_pylist()
    texts = [None] * len(cells) if names is None or (names is stored and any(held)) else names.to_pylist()
    return [_HELD if is_held else text for is_held, text in zip(held, texts, strict=True)]


class TableImages:
    """Some images of a table as an `ImageSource`."""

    def __init__(self, table: Table, column: str, pictures: Sequence[Picture]) -> None:
        if not pictures:
            raise TaskError(f"{table.name} holds no rows at all.")
        self._table, self._column, self._pictures = table, column, list(pictures)
        self._open: dict[Path, zipfile.ZipFile] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": {}}  # a loader worker must not share its parent's file positions

    def __len__(self) -> int:
        return len(self._pictures)

    def read(self, index: int) -> bytes:
        picture = self._pictures[index]
        if picture.source is None:
            return self._table.image(self._column, picture)
        if isinstance(picture.source, Path):
            with reading(picture.source):
                return read_file(picture.source)
        archive, member = picture.source
        try:
            if archive not in self._open:
                self._open[archive] = zipfile.ZipFile(archive)
            return self._open[archive].read(member)
        except Exception as error:  # a damaged archive raises a dozen types, zlib's and RuntimeError among them
            raise TaskError(f"{member} in {archive} is damaged ({plain(error)}): fetch it again.") from error

    def name(self, index: int) -> str:
        row, position, _ = self._pictures[index]
        inner = "" if position is None else f"[{position}]"
        return f"{self._column}{inner} of {self._table.row_name(row)}"

    def identity(self, index: int) -> object:
        """What rows with the same image have in common: its bytes, or the file that they name, also through links."""
        source = self._pictures[index].source
        if isinstance(source, Path):
            return os.path.realpath(source)
        return source or hashlib.sha256(self.read(index)).digest()


def files_of(pictures: Sequence[Picture]) -> tuple[Path, ...]:
    """The files of images that a table only names."""
    return tuple(dict.fromkeys(picture.source for picture in pictures if isinstance(picture.source, Path)))


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
