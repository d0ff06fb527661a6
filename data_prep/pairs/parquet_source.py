"""Data sets with the images in them: parquet files, and those of the `datasets` library (a folder, or on the hub)."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.dataset import ParquetFragmentScanOptions

from data_prep.pairs.pair import MALFORMED_ROW, NOT_UTF8, Pair, SourceOptions, captions_in, choose_columns, not_utf8
from pipeline.errors import UserError, in_a_line

_BATCH = 64  # rows with images in memory at a time


@dataclass(frozen=True)
class ParquetSource:
    """Rows of parquet files, located by the files' own row groups.

    `groups` are (file, row group, rows) in order.
    """

    root: Path
    image: str
    caption: str
    groups: tuple[tuple[str, int, int], ...]

    @property
    def rows(self) -> int:
        return sum(rows for _, _, rows in self.groups)

    @property
    def facts(self) -> dict[str, Any]:
        sizes = [(name, (self.root / name).stat().st_size) for name in dict.fromkeys(n for n, _, _ in self.groups)]
        digest = hashlib.sha256(repr((sizes, self.groups)).encode()).hexdigest()
        return {"kind": "parquet", "image": self.image, "caption": self.caption, "digest": digest}

    def read(self, start: int, stop: int) -> Iterator[Pair]:
        first, in_file = 0, Counter[str]()  # the number of a row group's first row, among all and in its file
        for name, group, rows in self.groups:
            low, high = max(start - first, 0), min(stop - first, rows)
            for number, row in enumerate(self._rows(name, group, low, high), in_file[name] + low):
                yield _pair(row, self.image, self.caption, place=f"{name} row {number}", folder=self.root)
            first += rows
            in_file[name] += rows

    def _rows(self, name: str, group: int, low: int, high: int) -> Iterator[Any]:
        """The rows `[low, high)` of a row group, as `_plain` gives them.

        Raises:
            UserError: The file is damaged, for instance a page that has not its checksum.
        """
        if low >= high:
            return
        path, at = self.root / name, 0
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                for batch in file.iter_batches(_BATCH, row_groups=[group], columns=[self.image, self.caption]):
                    begin = max(low - at, 0)
                    if begin < len(batch):
                        yield from _plain(batch.slice(begin, high - at - begin))
                    at += len(batch)
                    if at >= high:
                        break
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path} is damaged in row group {group} ({error}): fetch it again.") from error


def _plain(batch: Any) -> Iterator[Any]:
    """The rows of a batch; in place of one with a text that is not UTF-8, why."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for number in range(len(batch)):
            try:
                yield batch.slice(number, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield not_utf8(error)


def _pair(row: Any, image_column: str, caption_column: str, *, place: str, folder: Path) -> Pair:
    """A row of `_plain` as a pair; its image is bytes, a path, or Hugging Face's mapping of both."""
    if isinstance(row, str):
        return Pair(place, problem=NOT_UTF8, detail=row)
    image, caption = row[image_column], row[caption_column]
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes | bytearray):
        return Pair(place, bytes(image), captions_in(caption))
    if isinstance(image, str) and image:
        return Pair(place, str(folder / image), captions_in(caption))
    return Pair(place, problem=MALFORMED_ROW, detail="no image in this row")


def open_parquet(path: Path, options: SourceOptions) -> ParquetSource:
    """A parquet file, or all of a folder in the order of their names.

    Raises:
        UserError: A file cannot be read, columns are not found, or the files' columns differ.
    """
    root = path if path.is_dir() else path.parent
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    groups, schema = [], None
    for file in files:
        name = file.relative_to(root).as_posix()
        try:
            with pq.ParquetFile(file, page_checksum_verification=True) as opened:
                schema = opened.schema_arrow if schema is None else schema
                if missing := [column for column in schema.names if column not in opened.schema_arrow.names]:
                    raise UserError(
                        f"{file} lacks columns of {files[0]}: {', '.join(missing[:5])}. A folder must hold one data "
                        "set; name one file, or one split's subfolder."
                    )
                groups += [(name, g, opened.metadata.row_group(g).num_rows) for g in range(opened.num_row_groups)]
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{file} is not a parquet file that can be read ({error}): fetch it again.") from error
    assert schema is not None
    texts = [
        name
        for name, kind in zip(schema.names, schema.types, strict=True)
        if _is_text(kind) or (pa.types.is_list(kind) and _is_text(kind.value_type))
    ]
    found = choose_columns(schema.names, options, where=str(path), texts=texts)
    return ParquetSource(root, *found, tuple(group for group in groups if group[2]))


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))


@dataclass(frozen=True)
class DatasetSource:
    """A split of a data set, memory-mapped by `datasets`; `name` is a folder or a name on the hub."""

    name: str
    options: SourceOptions
    image: str
    caption: str
    rows: int
    fingerprint: str

    @property
    def facts(self) -> dict[str, Any]:
        about = {
            "kind": "datasets",
            "name": self.name,
            "split": self.options.split,
            "subset": self.options.subset,
            "revision": self.options.revision,
            "image": self.image,
            "caption": self.caption,
            "digest": self.fingerprint,
        }
        return {key: value for key, value in about.items() if value}

    def read(self, start: int, stop: int) -> Iterator[Pair]:
        data = _load(self.name, self.options).select_columns([self.image, self.caption])
        shown = Path(self.name).name if Path(self.name).exists() else self.name
        for first in range(start, stop, _BATCH):
            table = data.with_format("arrow")[first : min(stop, first + _BATCH)]
            self._check(table)
            rows = (row for batch in table.to_batches() for row in _plain(batch))
            for number, row in enumerate(rows, start=first):
                place = f"{shown} row {number}"
                yield _pair(row, self.image, self.caption, place=place, folder=Path(self.name))

    def _check(self, table: Any) -> None:
        """Check memory-mapped values before they are used: damaged ones could point anywhere, and end the process.

        Raises:
            UserError: They are damaged.
        """
        for column in table.columns:
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                if "UTF8" not in str(error):  # which costs the row
                    raise UserError(f"A file of {self.name} is damaged ({error}): copy it again.") from error


def open_dataset(name: str, options: SourceOptions) -> DatasetSource:
    """Find split and columns of a data set: a folder of `save_to_disk`, or a name on the hub.

    A hub's is downloaded into the cache of `datasets`.

    Raises:
        UserError: It cannot be loaded, the split is not given or does not exist, or columns are not found.
    """
    from datasets import Image, Value

    data = _load(name, options)
    images = [column for column, feature in data.features.items() if isinstance(feature, Image)]
    texts = [
        column
        for column, feature in data.features.items()
        if column not in images and isinstance(getattr(feature, "feature", feature), Value | dict)
    ]
    image = options.image or (images[0] if len(images) == 1 else None)
    found = choose_columns(data.column_names, replace(options, image=image), where=name, texts=texts)
    return DatasetSource(name, options, *found, len(data), _fingerprint(data))


def _fingerprint(data: Any) -> str:
    """A digest that is the same in every process and session: of the stored files, not of this load."""

    files = [(Path(file["filename"]).name, Path(file["filename"]).stat().st_size) for file in data.cache_files]
    return hashlib.sha256(repr((files, len(data), str(data.features))).encode()).hexdigest()


@functools.lru_cache(maxsize=1)
def _load(name: str, options: SourceOptions) -> Any:
    """The split."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    datasets.disable_progress_bars()
    try:
        if Path(name).exists():
            loaded = datasets.load_from_disk(name)
        else:
            builder = datasets.load_dataset_builder(name, options.subset, revision=options.revision)
            if hasattr(builder.config, "fragment_scan_options"):  # of parquet, which checks no pages by itself
                builder.config.fragment_scan_options = ParquetFragmentScanOptions(page_checksum_verification=True)
            builder.download_and_prepare()
            loaded = builder.as_dataset()
    except Exception as error:  # the hub's client raises many exception types
        # Its error while it reads a file says no more than that there was one.
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
        raise UserError(
            f"The data set {name} cannot be loaded ({type(cause).__name__}: {in_a_line(cause)}). "
            "Is it a local path that is missing? A private set needs HF_TOKEN; --subset and --revision choose a part."
        ) from error
    if not isinstance(loaded, dict):
        return loaded
    chosen = options.split or (next(iter(loaded)) if len(loaded) == 1 else "train")
    if chosen not in loaded:
        raise UserError(f"{name} has no split {chosen!r}: choose with --split. It has: {', '.join(loaded)}.")
    return loaded[chosen]
