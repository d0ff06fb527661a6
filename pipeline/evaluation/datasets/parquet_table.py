"""A task's rows as parquet files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.evaluation.datasets.tables import Place, image_bytes
from pipeline.evaluation.datasets.task_data import TaskError, plain

_PART = re.compile(r"^(?P<stem>.*?)(?P<number>\d+)-of-(?P<total>\d+)(?P<rest>\D.*)?$")
SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test")
"""Names of splits in use."""
_NUMBERED = re.compile(r"^\d+$")


class ParquetTable:
    """Parquet files as one table; the row group that was read last stays in memory."""

    layout = "parquet"

    def __init__(self, files: Sequence[Path], folder: Path) -> None:
        import pyarrow.parquet as pq

        self.folder, self.files = folder, tuple(files)
        check_parts(self.files)
        self._starts: list[tuple[int, Path, int]] = []
        self._rows = 0
        schemas = []
        for path in self.files:
            try:
                meta = pq.read_metadata(path)
                schemas.append(tuple(pq.read_schema(path).names))
            except Exception as error:  # pyarrow raises its own exceptions
                raise TaskError(f"{path} is not a complete parquet file ({plain(error)}): fetch it again.") from error
            if not meta.num_rows:
                raise TaskError(f"{path} holds no rows at all: fetch it again.")
            if schemas[-1] != schemas[0]:
                raise TaskError(f"{path} has other columns than {self.files[0]}: they are of different data sets.")
            for group in range(meta.num_row_groups):
                self._starts.append((self._rows, path, group))
                self._rows += meta.row_group(group).num_rows
        self.columns = schemas[0]
        self._group: tuple[Any, Any] = (None, None)
        self._row: tuple[Any, Any] = (None, None)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_group": (None, None), "_row": (None, None)}

    def __len__(self) -> int:
        return self._rows

    def values(self, column: str) -> list[Any]:
        import pyarrow.parquet as pq

        try:
            return [v for path in self.files for v in pq.read_table(path, columns=[column]).column(0).to_pylist()]
        except Exception as error:
            raise TaskError(f"{self.folder}: column {column} cannot be read ({plain(error)}).") from error

    def image(self, column: str, place: Place) -> bytes:
        if self._row[0] != (column, place[0]):
            self._row = ((column, place[0]), self._value(column, place[0]))
        return image_bytes(self._row[1], place, table=self, folder=self.folder)

    def image_files(self, column: str) -> tuple[Path, ...]:
        return ()

    def row_name(self, row: int) -> str:
        path = self._group_of(row)[1]
        first = next(entry[0] for entry in self._starts if entry[1] == path)
        return f"row {row - first} of {path}"

    def class_names(self, column: str) -> tuple[str, ...]:
        """The names that `datasets` stored for a label column; empty when it stored none."""
        import json

        import pyarrow.parquet as pq

        stored = pq.read_schema(self.files[0]).metadata or {}
        features = json.loads(stored.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        return tuple(features.get(column, {}).get("names", ()))

    def _group_of(self, row: int) -> tuple[int, Path, int]:
        return next(entry for entry in reversed(self._starts) if entry[0] <= row)

    def _value(self, column: str, row: int) -> Any:
        start, path, group = self._group_of(row)
        if self._group[0] != (path, group, column):
            import pyarrow.parquet as pq

            try:
                read = pq.ParquetFile(path).read_row_group(group, columns=[column], use_threads=False).column(0)
            except Exception as error:
                raise TaskError(f"{path} is damaged ({plain(error)}): fetch it again.") from error
            self._group = ((path, group, column), read)
        return self._group[1][row - start].as_py()


def parquet_files(folder: Path, *, split: str = "test") -> list[Path]:
    """The parquet files of a split; all of them where no file's name says which split it is.

    Raises:
        TaskError: The names are those of other splits.
    """
    files = sorted(path for path in folder.rglob("*.parquet") if not path.name.startswith("."))
    names = {path: path.relative_to(folder).as_posix().lower() for path in files}

    def of(*splits: str) -> list[Path]:
        pattern = re.compile(rf"(^|[/_.-])({'|'.join(map(re.escape, splits))})(?![a-z])")
        return [path for path, name in names.items() if pattern.search(name)]

    found = of(split.lower())
    if not found and (others := of(*SPLITS)):
        raise TaskError(f"{folder} has no files of the split {split}, but of others ({names[others[0]]}): set split.")
    return found or files


def check_parts(files: Sequence[Path]) -> None:
    """Names such as `test-00000-of-00002.parquet` or `0000.parquet` say how many files there must be.

    Raises:
        TaskError: One of them is not there.
    """
    promised: dict[tuple[Path, str, str], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    numbered: dict[Path, set[int]] = defaultdict(set)
    for path in files:
        part = _PART.match(path.name)
        if part:
            group = promised[path.parent, part["stem"], part["rest"] or ""]
            group[int(part["total"])].add(int(part["number"]))
        elif _NUMBERED.match(path.stem):
            numbered[path.parent].add(int(path.stem))
    for (folder, stem, rest), totals in promised.items():
        if len(totals) > 1:
            counts = " and ".join(f"of {total}" for total in sorted(totals))
            raise TaskError(f"{folder}: files {stem}*{rest} are of different versions: their names say {counts} parts.")
        total, found = next(iter(totals.items()))
        missing = sorted(set(range(total)) - found)
        if missing:
            raise TaskError(
                f"{folder}: {len(missing)} of {total} parts {stem}*-of-*{rest} are missing (number "
                f"{', '.join(map(str, missing[:5]))}). A score over partial data would not be this task's score: "
                "fetch them."
            )
    for folder, found in numbered.items():
        missing = sorted(set(range(max(found) + 1)) - found)
        if missing and max(found) < 100_000:
            raise TaskError(f"{folder}: the numbered parts {', '.join(map(str, missing[:5]))} are missing: fetch them.")
