"""A task's rows as a CSV whose rows name their images, in zip archives or as files."""

from __future__ import annotations

import csv
import os
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.evaluation.datasets.tables import Place, as_list
from pipeline.evaluation.datasets.task_data import IMAGE_SUFFIXES, TaskError, plain, read_bytes

Needs = Sequence[tuple[str, ...]]
"""Columns that a CSV must have, each with its possible names."""


class CsvTable:
    """A CSV, and images found by path, file name or bare stem in zip archives, or by path in a folder."""

    def __init__(self, path: Path, *, archives: Sequence[Path] = (), images: Path | None = None) -> None:
        self.layout = "csv+zip" if images is None else "csv+files"
        self._frame = read_csv(path)
        self.columns = tuple(self._frame.columns)
        self._members, self._images = _zip_members(archives), images
        self.files = (path, *archives)
        self._open: dict[tuple[int, Path], zipfile.ZipFile] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": {}}

    def __len__(self) -> int:
        return len(self._frame)

    def values(self, column: str) -> list[Any]:
        return list(self._frame[column])

    def image(self, column: str, place: Place) -> bytes:
        names = as_list(self._frame[column].iloc[place[0]], where=self.row_name(place[0]))
        position = place[1] or 0
        if position >= len(names) or not names[position].strip():
            raise TaskError(f"{self.row_name(place[0])} names no image in the column {column}.")
        return self._named(names[position], place[0])

    def image_files(self, column: str) -> tuple[Path, ...]:
        if self._images is None:
            return ()
        names = (as_list(value, where=self.row_name(row)) for row, value in enumerate(self._frame[column]))
        return tuple(dict.fromkeys(self._images / name for own in names for name in own))

    def row_name(self, row: int) -> str:
        return f"row {row + 1} of {self.files[0]}"

    def class_names(self, column: str) -> tuple[str, ...]:
        return ()

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
        except (zipfile.BadZipFile, OSError) as error:
            raise TaskError(f"{path_inside} in {archive} is damaged ({plain(error)}): fetch it again.") from error


def read_csv(path: Path) -> Any:
    """Read a CSV as a pandas frame of text.

    Raises:
        TaskError: It cannot be read.
    """
    import pandas as pd

    try:
        if b"\0" in path.read_bytes():
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
        except (zipfile.BadZipFile, OSError) as error:
            raise TaskError(f"{archive} is damaged or cut short ({plain(error)}): fetch it again.") from error
        for name in names:
            path = Path(name)
            if path.suffix.lower().removeprefix(".") in IMAGE_SUFFIXES and not path.name.startswith("._"):
                members[path.name] = members[path.stem] = (archive, name)
    return members
