"""Rows of a task stored as parquet, as a `datasets.save_to_disk` folder, or as the hub's CSV with a zip of images.

Images are taken as the bytes that were stored and decoded like every other image: `datasets` itself would apply the
EXIF rotation, which the benchmark does not.
"""

from __future__ import annotations

import ast
import json
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pipeline.evaluation.datasets.task_data import IMAGE_SUFFIXES, TaskError

Place = tuple[int, int | None]
"""Row, and position in the row's list of images (None when the row has one image)."""


Needs = Sequence[tuple[str, ...]]
"""Columns that a CSV must have, each with its possible names."""


class Table(Protocol):
    layout: str
    files: tuple[Path, ...]
    columns: tuple[str, ...]

    def __len__(self) -> int: ...

    def values(self, column: str) -> list[Any]:
        """A column without images, as plain values."""

    def image(self, column: str, place: Place) -> bytes:
        """An encoded image."""


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
        return f"{self._column}{inner} of row {row} in {self._table.files[0].parent}"


class ParquetTable:
    """Parquet files as one table; the row group that was read last stays in memory."""

    layout = "parquet"

    def __init__(self, folder: Path) -> None:
        import pyarrow.parquet as pq

        self.folder = folder
        self.files = _of_test_split(sorted(folder.rglob("*.parquet")), folder)
        self._starts: list[tuple[int, Path, int]] = []
        self._rows = 0
        for path in self.files:
            try:
                meta = pq.read_metadata(path)
            except Exception as error:  # pyarrow raises its own kinds
                raise TaskError(f"{path} is not a complete parquet file ({error}): fetch it again.") from error
            for group in range(meta.num_row_groups):
                self._starts.append((self._rows, path, group))
                self._rows += meta.row_group(group).num_rows
        self.columns = tuple(pq.read_schema(self.files[0]).names)
        self._group: tuple[Any, Any] = (None, None)
        self._row: tuple[Any, Any] = (None, None)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_group": (None, None), "_row": (None, None)}

    def __len__(self) -> int:
        return self._rows

    def values(self, column: str) -> list[Any]:
        import pyarrow.parquet as pq

        return [v for path in self.files for v in pq.read_table(path, columns=[column]).column(0).to_pylist()]

    def image(self, column: str, place: Place) -> bytes:
        if self._row[0] != (column, place[0]):
            self._row = ((column, place[0]), self._value(column, place[0]))
        return _blob(self._row[1], place, self.folder)

    def _value(self, column: str, row: int) -> Any:
        start, path, group = next(entry for entry in reversed(self._starts) if entry[0] <= row)
        if self._group[0] != (path, group, column):
            import pyarrow.parquet as pq

            read = pq.ParquetFile(path).read_row_group(group, columns=[column], use_threads=False).column(0)
            self._group = ((path, group, column), read)
        return self._group[1][row - start].as_py()


class DiskTable:
    """A folder written by `Dataset.save_to_disk`, or the test split of a `DatasetDict`."""

    layout = "save_to_disk"

    def __init__(self, folder: Path) -> None:
        import datasets

        self.folder = folder
        try:
            loaded = datasets.load_from_disk(str(folder))
        except Exception as error:  # many kinds, from a missing file to a damaged stream
            raise TaskError(f"{folder} cannot be loaded from disk ({error}): it is incomplete or damaged.") from error
        if isinstance(loaded, datasets.DatasetDict):
            split = next((name for name in loaded if name.lower() == "test"), None)
            if split is None and len(loaded) != 1:
                raise TaskError(f"{folder} has the splits {', '.join(loaded)}, but none is called test.")
            loaded = loaded[split or next(iter(loaded))]
        self._dataset = loaded.with_format("arrow")
        self._row: tuple[Any, Any] = (None, None)
        self.columns = tuple(loaded.column_names)
        self.files = tuple(Path(entry["filename"]) for entry in loaded.cache_files)

    def __len__(self) -> int:
        return len(self._dataset)

    def values(self, column: str) -> list[Any]:
        return list(self._dataset.select_columns(column)[:].column(0).to_pylist())

    def image(self, column: str, place: Place) -> bytes:
        if self._row[0] != (column, place[0]):
            value = self._dataset.select_columns(column)[place[0] : place[0] + 1].column(0)[0].as_py()
            self._row = ((column, place[0]), value)
        return _blob(self._row[1], place, self.folder)


class CsvZipTable:
    """A CSV beside zip archives of images, whose rows name their images."""

    layout = "csv+zip"

    def __init__(self, folder: Path, *, needs: Needs) -> None:
        import pandas as pd

        paths = sorted(folder.rglob("*.csv"))
        frames = {path: pd.read_csv(path, dtype=str, keep_default_na=False) for path in paths}
        fitting = [path for path in paths if all(set(names) & set(frames[path].columns) for names in needs)]
        if len(fitting) != 1:
            columns = ", ".join(" or ".join(names) for names in needs)
            raise TaskError(
                f"{folder}: exactly one CSV with the columns {columns} is expected, but "
                f"{len(fitting)} of {', '.join(path.name for path in paths)} have them."
            )
        self._frame = frames[fitting[0]]
        self.columns = tuple(self._frame.columns)
        archives = sorted(folder.rglob("*.zip"))
        self._members = _zip_members(archives)
        self.files = (fitting[0], *archives)
        self._open: dict[tuple[int, Path], zipfile.ZipFile] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": {}}

    def __len__(self) -> int:
        return len(self._frame)

    def values(self, column: str) -> list[Any]:
        return list(self._frame[column])

    def image(self, column: str, place: Place) -> bytes:
        names = as_list(self._frame[column].iloc[place[0]])
        return self.named(names[place[1] or 0])

    def named(self, name: str) -> bytes:
        """The image of a path, a file name or a bare stem."""
        keys = (name, Path(name).name, Path(name).stem)
        member = next((self._members[key] for key in keys if key in self._members), None)
        if member is None:
            raise TaskError(f"The image {name!r} of {self.files[0]} is in none of its archives: data is missing.")
        archive, path = member
        opened = (os.getpid(), archive)  # a forked loader worker must not share its parent's file position
        if opened not in self._open:
            self._open[opened] = zipfile.ZipFile(archive)
        try:
            return self._open[opened].read(path)
        except (zipfile.BadZipFile, OSError) as error:
            raise TaskError(f"{path} in {archive} is damaged ({error}): fetch the archive again.") from error


def open_table(folder: Path, *, needs: Needs) -> Table | None:
    """The table in a folder, in whichever of the three layouts it has; None when it has none of them."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return DiskTable(folder)
    if next(folder.rglob("*.parquet"), None) is not None:
        return ParquetTable(folder)
    if next(folder.rglob("*.csv"), None) is not None:
        return CsvZipTable(folder, needs=needs)
    return None


def as_list(value: Any) -> list[str]:
    """A list that may be stored as text (JSON or Python), or one value for itself."""
    if isinstance(value, str):
        text = value.strip()
        if not text.startswith("["):
            return [value]
        return _parse_list(text)
    return [str(item) for item in value]


def _parse_list(text: str) -> list[str]:
    try:
        return [str(item) for item in json.loads(text)]
    except ValueError:
        try:
            return [str(item) for item in ast.literal_eval(text)]
        except (ValueError, SyntaxError):
            raise TaskError(f"{text[:60]!r} should be a list, but is neither JSON nor Python.") from None


def _blob(value: Any, place: Place, folder: Path) -> bytes:
    """The bytes of a stored image: a struct of bytes and path, or bytes alone."""
    if place[1] is not None:
        if place[1] >= len(value):
            raise TaskError(f"Row {place[0]} of {folder} has {len(value)} images, fewer than it has candidates.")
        value = value[place[1]]
    if isinstance(value, Mapping):
        if value.get("bytes") is None and value.get("path"):
            path = folder / value["path"]
            if not path.is_file():
                raise TaskError(f"Row {place[0]} of {folder} names the image {path}, which is not there.")
            return path.read_bytes()
        value = value.get("bytes")
    if not isinstance(value, bytes):
        raise TaskError(f"Row {place[0]} of {folder} holds no image.")
    return value


def _of_test_split(files: Sequence[Path], folder: Path) -> tuple[Path, ...]:
    """Only the test split's files when file names tell splits apart, else all of them."""
    test = [path for path in files if re.search(r"(^|[/_-])test", path.relative_to(folder).as_posix().lower())]
    return tuple(test or files)


def _zip_members(archives: Sequence[Path]) -> dict[str, tuple[Path, str]]:
    """File name and bare stem -> where an image is."""
    members: dict[str, tuple[Path, str]] = {}
    for archive in archives:
        try:
            names = zipfile.ZipFile(archive).namelist()
        except (zipfile.BadZipFile, OSError) as error:
            raise TaskError(f"{archive} is damaged or cut short ({error}): fetch it again.") from error
        for name in names:
            path = Path(name)
            if path.suffix.lower().removeprefix(".") in IMAGE_SUFFIXES and not path.name.startswith("._"):
                members[path.name] = members[path.stem] = (archive, name)
    return members
