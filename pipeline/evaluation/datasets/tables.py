"""Rows of a task as a `datasets.Dataset`, and the images in them.

Images stay the bytes that were stored, and are decoded like every other image of the evaluation: `datasets` itself
would apply the EXIF rotation, which the benchmark does not.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.evaluation.datasets.cells import as_list
from pipeline.evaluation.datasets.task_data import IMAGE_SUFFIXES, TaskError, plain, read_bytes
from pipeline.files import text_lines

Place = tuple[int, int | None]
"""Row, and position in the row's list of images (None when the row has one image)."""
_COMPARED = 64
"""Rows of a copy, with their images, that are compared at a time."""


class Table:
    """Rows whose images are bytes in their cells, or named by them; the last cell stays in memory.

    Args:
        dataset: A `datasets.Dataset`.
        folder: Where paths in its cells start.
        layout: What it was read from, for results.
        files: The files that determine it, without the images that it only names.
        archives: The zip archives that hold the images that it names; None where they are files.
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
        archives: Archives | None = None,
        originals: Sequence[Path] = (),
        names: tuple[Path, int] | None = None,
    ) -> None:
        self.folder, self.layout, self.files, self._archives = folder, layout, tuple(files), archives
        self.columns, self._originals = tuple(dataset.column_names), tuple(originals)
        self._names = names or (folder, 0)
        self._dataset, self._views = dataset, dict[str, Any]()
        self._last: tuple[Any, Any] = (None, None)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_last": (None, None)}

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def is_csv(self) -> bool:
        return self.layout.startswith("csv")

    def row_name(self, row: int) -> str:
        """Where a row is, for messages."""
        return f"row {row + self._names[1]} of {self._names[0]}"

    def class_names(self, column: str) -> tuple[str, ...]:
        """The names that are stored for a label column; empty when there are none."""
        return tuple(getattr(self._dataset.features[column], "names", ()) or ())

    def values(self, column: str) -> list[Any]:
        """A column without images, as plain values."""
        return list(self._read(column, slice(None)).to_pylist())

    def images_in(self, column: str, row: int) -> list[Any]:
        """The images of a row, each as bytes or as its name."""
        if self._last[0] != (column, row):
            cell = self._read(column, slice(row, row + 1))[0].as_py()
            if isinstance(cell, str):
                cell = as_list(cell, where=self.row_name(row))
            cells = cell if isinstance(cell, list) else [cell]
            self._last = ((column, row), [_bytes_or_name(item) for item in cells])
        return list(self._last[1])

    def image(self, column: str, place: Place) -> bytes:
        """An encoded image.

        Raises:
            TaskError: There is none, or its file cannot be read.
        """
        image, where = self._image(column, place), self.row_name(place[0])
        if isinstance(image, bytes):
            return image
        if self._archives is not None:
            return self._archives.read(image, where=where)
        try:
            return read_bytes(locate(image, self.folder))
        except TaskError as error:
            raise TaskError(f"{where} names the image {image}. {error}") from error

    def identity(self, column: str, place: Place) -> object:
        """What rows with the same image have in common: its bytes, or the file that they name, also through links."""
        image = self._image(column, place)
        if isinstance(image, bytes):
            return hashlib.sha256(image).digest()
        return os.path.realpath(locate(image, self.folder)) if self._archives is None else os.path.normpath(image)

    def _image(self, column: str, place: Place) -> bytes | str:
        row, position = place
        images = self.images_in(column, row)
        if position is not None and position >= len(images):
            raise TaskError(f"{self.row_name(row)} has {len(images)} images, fewer than it has candidates.")
        image = images[position or 0] if images else None
        if not isinstance(image, bytes) and not (isinstance(image, str) and image.strip()):
            raise TaskError(f"{self.row_name(row)} holds no image, and names none, in the column {column}.")
        return image

    def check_quotes(self, column: str) -> None:
        """Look for rows of a CSV inside of a cell, whose lines then name images as the column `column` does.

        Raises:
            TaskError: There are some: a quote is not closed.
        """
        place = self.columns.index(column)
        for name in self.columns:
            for row, cell in enumerate(self.values(name)):
                for line in text_lines(cell)[1:] if "\n" in cell or "\r" in cell else ():
                    fields = line.split(",")
                    named = [fields[k] for k in (place, place - len(self.columns)) if -len(fields) <= k < len(fields)]
                    if any(os.path.isfile(self.folder / image.strip(' "')) for image in named):
                        what = f"a quote is not closed, which would swallow the line {line[:60]!r}"
                        raise TaskError(f"{self.row_name(row)}: {what}. Close it, or double the quotes inside values.")

    def image_files(self, column: str) -> tuple[Path, ...]:
        """The files of images that the table only names."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self._archives is not None:
            return ()
        files: dict[str, None] = {}
        for chunk in self._read(column, slice(None)).chunks:
            values = chunk.flatten() if pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type) else chunk
            if pa.types.is_struct(values.type) and values.type.get_field_index("path") >= 0:
                values = pc.filter(pc.struct_field(values, "path"), pc.is_null(pc.struct_field(values, "bytes")))
            if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
                names = (as_list(value, where=str(self.folder)) for value in values.to_pylist())
                files.update(dict.fromkeys(name for own in names for name in own if name))
        return tuple(dict.fromkeys(locate(name, self.folder) for name in files))

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
        """Compare a column with the parquet files, whose digests the result records, before it is used.

        Raises:
            TaskError: They differ.
        """
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


def _bytes_or_name(image: Any) -> Any:
    """An image of `datasets` is a mapping of its bytes and its path, one of them None."""
    if isinstance(image, Mapping):
        return image.get("path") if image.get("bytes") is None else image["bytes"]
    return image


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

    def identity(self, index: int) -> object:
        """See `Table.identity`."""
        return self._table.identity(self._column, self._places[index])


class Archives:
    """Images in zip archives, found by path, file name or bare stem."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._open: dict[tuple[int, Path], zipfile.ZipFile] = {}
        self._members: dict[str, tuple[Path, str]] = {}
        for archive in paths:
            try:
                with zipfile.ZipFile(archive) as opened:
                    names = opened.namelist()
            except Exception as error:
                raise TaskError(f"{archive} is damaged or cut short ({plain(error)}): fetch it again.") from error
            for name in names:
                path = Path(name)
                if path.suffix.lower().removeprefix(".") in IMAGE_SUFFIXES and not path.name.startswith("._"):
                    self._members[path.name] = self._members[path.stem] = (archive, name)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": {}}

    def read(self, name: str, *, where: str) -> bytes:
        keys = (name, Path(name).name, Path(name).stem)
        member = next((self._members[key] for key in keys if key in self._members), None)
        if member is None:
            raise TaskError(f"The image {name!r} of {where} is in none of its archives: data is missing.")
        archive, path = member
        opened = (os.getpid(), archive)  # a forked loader worker must not share its parent's file position
        try:
            if opened not in self._open:
                self._open[opened] = zipfile.ZipFile(archive)
            return self._open[opened].read(path)
        except Exception as error:  # a damaged archive raises a dozen types, zlib's and RuntimeError among them
            raise TaskError(f"{path} in {archive} is damaged ({plain(error)}): fetch it again.") from error


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
