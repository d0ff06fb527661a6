"""A task's rows as the hub and `datasets` store them: parquet files, a `save_to_disk` folder, or a cache."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.evaluation.datasets.tables import Place, Table, locate
from pipeline.evaluation.datasets.task_data import TaskError, Unchanged, plain

_PART = re.compile(r"^(?P<stem>.*?)(?P<number>\d+)-of-(?P<total>\d+)(?P<rest>\D.*)?$")
SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test")
"""Names of splits in use."""
_NUMBERED = re.compile(r"^\d+$")


class ParquetTable(Table):
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

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_group": (None, None)}

    def __len__(self) -> int:
        return self._rows

    def values(self, column: str) -> list[Any]:
        import pyarrow.parquet as pq

        try:
            return [
                v
                for path in self.files
                for v in pq.read_table(path, columns=[column], page_checksum_verification=True).column(0).to_pylist()
            ]
        except Exception as error:
            raise TaskError(f"{self.folder}: column {column} cannot be read ({plain(error)}).") from error

    def files_of(self, column: str, place: Place) -> Iterable[Path]:
        return (self._group_of(place[0])[1],)

    def row_name(self, row: int) -> str:
        path = self._group_of(row)[1]
        first = next(entry[0] for entry in self._starts if entry[1] == path)
        return f"row {row - first} of {path}"

    def class_names(self, column: str) -> tuple[str, ...]:
        """The names that `datasets` stored for a label column; empty when it stored none."""
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
                read = (
                    pq.ParquetFile(path, page_checksum_verification=True)
                    .read_row_group(group, columns=[column], use_threads=False)
                    .column(0)
                )
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


class DatasetTable(Table):
    """A `datasets.Dataset` whose images are read as stored bytes.

    Its files are memory-mapped: values that were overwritten could point anywhere, and reading them would end the
    process. So files are compared with what they were before they are read, and values are validated.
    """

    def __init__(self, dataset: Any, *, folder: Path, layout: str, further: Sequence[Path] = ()) -> None:
        """`further`: files beside the dataset's own that belong to its data."""
        self.folder, self.layout = folder, layout
        self.files = (*(Path(entry["filename"]) for entry in dataset.cache_files), *further)
        self.columns = tuple(dataset.column_names)
        self._features = dataset.features
        self._dataset = dataset.with_format("arrow")
        self._unchanged = Unchanged(self.files)
        check_parts(self.files)

    def __len__(self) -> int:
        return len(self._dataset)

    def values(self, column: str) -> list[Any]:
        with self._reading():
            return list(self._rows(column, slice(None)).to_pylist())

    def image_files(self, column: str) -> tuple[Path, ...]:
        """The images that the cache names by their path, below its `downloads/`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found: dict[Path, None] = {}
        with self._reading():
            chunks = self._rows(column, slice(None)).chunks
        for chunk in chunks:
            values = chunk.flatten() if pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type) else chunk
            if not pa.types.is_struct(values.type):
                return ()
            named = pc.filter(pc.struct_field(values, "path"), pc.is_null(pc.struct_field(values, "bytes")))
            found.update(dict.fromkeys(locate(path, self.folder) for path in named.to_pylist() if path))
        return tuple(found)

    def files_of(self, column: str, place: Place) -> Iterable[Path]:
        cell = self._cell(column, place[0])
        value = cell if place[1] is None else cell[place[1]]
        named = isinstance(value, Mapping) and value.get("bytes") is None and value.get("path")
        return (*self.files, locate(value["path"], self.folder)) if named else self.files

    def _value(self, column: str, row: int) -> Any:
        with self._reading():
            return self._rows(column, slice(row, row + 1))[0].as_py()

    def _rows(self, column: str, rows: slice) -> Any:
        found = self._dataset.select_columns(column)[rows].column(0)
        found.validate(full=True)
        return found

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self._unchanged.check(self.files)
        try:
            yield
        except Exception as error:  # a damaged arrow file can raise any of a dozen exception types
            self._unchanged.check(self.files)
            raise TaskError(f"{self.files[0]} is damaged ({plain(error)}): fetch the data set again.") from error

    def row_name(self, row: int) -> str:
        return f"row {row} of {self.folder}"

    def class_names(self, column: str) -> tuple[str, ...]:
        """The names of a label column; empty when it has none."""
        return tuple(getattr(self._features[column], "names", ()) or ())


def open_saved(folder: Path, *, split: str = "test") -> DatasetTable:
    """Open a folder written by `Dataset.save_to_disk`, or one split of a `DatasetDict`.

    Raises:
        TaskError: It cannot be opened.
    """
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # many exception types, from a missing file to a damaged stream
        raise TaskError(
            f"{folder} cannot be loaded from disk ({plain(error)}): it is incomplete or damaged."
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        loaded = loaded[_chosen_split(list(loaded), split, folder)]
    saved = Path(loaded.cache_files[0]["filename"]).parent if loaded.cache_files else folder
    beside = (folder / "dataset_dict.json", saved / "state.json", saved / "dataset_info.json")
    further = [path for path in beside if path.is_file()]
    return DatasetTable(loaded, folder=folder, layout="save_to_disk", further=further)


def _chosen_split(present: Sequence[str], wanted: str, folder: Path) -> str:
    """The split of this name in any case, or the only one there is."""
    found = [name for name in present if name.lower() == wanted.lower()] or present
    if len(present) != 1 and found is present:
        raise TaskError(f"{folder} has the splits {', '.join(present)}, but none is called {wanted}.")
    return found[0]


def open_cached(folder: Path, *, split: str = "test") -> DatasetTable:
    """Open a data set in the cache of `datasets`, as written by `load_dataset(..., cache_dir=...)`.

    Raises:
        TaskError: It cannot be opened.
    """
    import datasets

    # Of finished data sets: owner___name/config/version/digest.
    infos = (path.parent for path in sorted(folder.rglob("dataset_info.json")) if any(path.parent.glob("*.arrow")))
    versions = [path for path in infos if not any(part.endswith(".incomplete") for part in path.parts)]
    if len(versions) != 1:
        names = ", ".join(path.relative_to(folder).as_posix() for path in versions[:3]) or "none finished"
        raise TaskError(f"{folder} must hold one finished data set, but holds {len(versions)} ({names}).")
    version = versions[0]
    facts = _splits(version / "dataset_info.json")
    name = _chosen_split(list(facts), split, version)
    pattern = re.compile(rf"-{re.escape(name)}(-\d+-of-\d+)?\.arrow$")
    files = sorted(path for path in version.glob("*.arrow") if pattern.search(path.name))
    if not files:
        raise TaskError(f"{version} has no file of the split {name} (*-{name}.arrow): the download is incomplete.")
    try:
        parts = [datasets.Dataset.from_file(str(path)) for path in files]
        joined = datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    except Exception as error:
        raise TaskError(f"{version} cannot be read ({plain(error)}): fetch the data set again.") from error
    if facts[name] is not None and len(joined) != facts[name]:
        raise TaskError(
            f"{version} has {len(joined):,} rows, but its dataset_info.json says {facts[name]:,}. A score over partial "
            "data would not be this task's score: fetch the data set again."
        )
    return DatasetTable(joined, folder=version, layout="datasets cache", further=[version / "dataset_info.json"])


def _splits(path: Path) -> dict[str, int | None]:
    """Rows by split, as `datasets` recorded them when it finished."""
    try:
        splits = json.loads(path.read_text(encoding="utf-8"))["splits"]
        return {name: facts.get("num_examples") for name, facts in splits.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TaskError(f"{path} is damaged ({error!r}): fetch the data set again.") from error
