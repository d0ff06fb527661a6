"""A task's rows as Hugging Face `datasets` stores them: a `save_to_disk` folder, or its cache."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.evaluation.datasets.parquet_table import check_parts
from pipeline.evaluation.datasets.tables import Place, image_bytes, locate
from pipeline.evaluation.datasets.task_data import TaskError, plain


class DatasetTable:
    """A `datasets.Dataset` whose images are read as stored bytes."""

    def __init__(self, dataset: Any, *, folder: Path, layout: str, further: Sequence[Path] = ()) -> None:
        """`further`: files beside the dataset's own that belong to its data."""
        self.folder, self.layout = folder, layout
        self.files = (*(Path(entry["filename"]) for entry in dataset.cache_files), *further)
        self.columns = tuple(dataset.column_names)
        self._features = dataset.features
        self._dataset = dataset.with_format("arrow")
        self._row: tuple[Any, Any] = (None, None)
        check_parts(self.files)

    def __len__(self) -> int:
        return len(self._dataset)

    def values(self, column: str) -> list[Any]:
        with self._reading():
            return list(self._dataset.select_columns(column)[:].column(0).to_pylist())

    def image(self, column: str, place: Place) -> bytes:
        if self._row[0] != (column, place[0]):
            with self._reading():
                value = self._dataset.select_columns(column)[place[0] : place[0] + 1].column(0)[0].as_py()
            self._row = ((column, place[0]), value)
        return image_bytes(self._row[1], place, table=self, folder=self.folder)

    def image_files(self, column: str) -> tuple[Path, ...]:
        """The images that the cache names by their path, below its `downloads/`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found: dict[Path, None] = {}
        with self._reading():
            chunks = self._dataset.select_columns(column)[:].column(0).chunks
        for chunk in chunks:
            values = chunk.flatten() if pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type) else chunk
            if not pa.types.is_struct(values.type):
                return ()
            named = pc.filter(pc.struct_field(values, "path"), pc.is_null(pc.struct_field(values, "bytes")))
            found.update(dict.fromkeys(locate(path, self.folder) for path in named.to_pylist() if path))
        return tuple(found)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a damaged arrow file can raise any of a dozen exception types
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
        name = next((name for name in loaded if name.lower() == split.lower()), None)
        if name is None and len(loaded) != 1:
            raise TaskError(f"{folder} has the splits {', '.join(loaded)}, but none is called {split}.")
        loaded = loaded[name or next(iter(loaded))]
    saved = Path(loaded.cache_files[0]["filename"]).parent if loaded.cache_files else folder
    beside = (folder / "dataset_dict.json", saved / "state.json", saved / "dataset_info.json")
    further = [path for path in beside if path.is_file()]
    return DatasetTable(loaded, folder=folder, layout="save_to_disk", further=further)


def cached_versions(folder: Path) -> list[Path]:
    """The folders of finished data sets below one of `datasets`' cache (`owner___name/config/version/digest`)."""
    infos = (path.parent for path in sorted(folder.rglob("dataset_info.json")) if any(path.parent.glob("*.arrow")))
    return [path for path in infos if not any(part.endswith(".incomplete") for part in path.parts)]


def open_cached(folder: Path, *, split: str = "test") -> DatasetTable:
    """Open a data set in the cache of `datasets`, as written by `load_dataset(..., cache_dir=...)`.

    Raises:
        TaskError: It cannot be opened.
    """
    import datasets

    versions = cached_versions(folder)
    if len(versions) != 1:
        names = ", ".join(path.relative_to(folder).as_posix() for path in versions[:3]) or "none finished"
        raise TaskError(f"{folder} must hold one finished data set, but holds {len(versions)} ({names}).")
    version = versions[0]
    facts = _splits(version / "dataset_info.json")
    name = next((name for name in facts if name.lower() == split.lower()), None)
    if name is None:
        if len(facts) != 1:
            raise TaskError(f"{version} has the splits {', '.join(facts)}, but none is called {split}.")
        name = next(iter(facts))
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
