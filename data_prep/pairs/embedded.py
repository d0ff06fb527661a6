"""Data sets with the images in them, read by `datasets`: parquet files, folders of `save_to_disk`, and the hub's."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.dataset import ParquetFragmentScanOptions

from data_prep.pairs.listing import PairRow, PairSource
from data_prep.pairs.pair import NOT_UTF8, PairOptions, choose_columns, not_utf8, read_image
from data_prep.pairs.pair_tables import Columns
from pipeline.errors import UserError, in_a_line

_BATCH = 64  # rows with images in memory at a time
_CHECKED = ParquetFragmentScanOptions(page_checksum_verification=True)


def _read(files: tuple[tuple[str, ...], ...], column: str, row: PairRow) -> bytes:
    """Read the image of a row from the Arrow files of data sets; a row without a place there names a file."""
    if not row.at:
        return read_image(row)
    number, index = row.at
    table = _opened(files[number]).with_format("arrow")[index : index + 1].select([column])
    value = _checked(table, files[number][0])[column][0].as_py()
    return bytes(value["bytes"] if isinstance(value, Mapping) else value)


@functools.lru_cache(maxsize=4)
def _opened(files: tuple[str, ...]) -> Any:
    from datasets import Dataset, concatenate_datasets

    return concatenate_datasets([Dataset.from_file(file) for file in files])


def _checked(table: Any, name: str) -> Any:
    """A table whose memory-mapped values may be used; damaged ones, refused here, could point anywhere and end the
    process."""
    for column in table.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):  # which costs the row
                raise UserError(f"A file of {name} is damaged ({error}): copy it again.") from error
    return table


def _source(about: Mapping[str, Any], columns: Columns, sets: list[tuple[str, Path, Any]]) -> PairSource:
    """The rows of data sets, each with a name for messages, and the folder that paths in it start from."""

    def rows() -> Iterator[PairRow]:
        for number, (shown, folder, data) in enumerate(sets):
            here = replace(columns, folder=folder)
            for first in range(0, len(data), _BATCH):
                table = _checked(data.with_format("arrow")[first : first + _BATCH], shown)
                for index in range(len(table)):
                    place, at = f"{shown} row {first + index}", (number, first + index)
                    try:
                        yield here.row(place, table.slice(index, 1).to_pylist()[0], at)
                    except UnicodeDecodeError as error:
                        yield PairRow(place, problem=NOT_UTF8, detail=not_utf8(error))

    files = tuple(tuple(file["filename"] for file in data.cache_files) for _, _, data in sets)
    return columns.source(about, rows(), functools.partial(_read, files, columns.image))


def open_parquet(path: Path, files: list[Path], options: PairOptions, cache: Path) -> PairSource:
    """Parquet files in the order of their names; `datasets` copies the two columns into `cache` as Arrow files.

    Raises:
        UserError: A file cannot be read, columns are not found, or the files' columns differ.
    """
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    image, captions = columns_of(files[0], options)
    root, sets = path if path.is_dir() else path.parent, []
    for number, file in enumerate(files):
        about = _parquet(file)
        if missing := [name for name in (image, *captions) if name not in about.schema_arrow.names]:
            raise UserError(
                f"{file} lacks columns of {files[0]}: {', '.join(missing)}. A folder must hold one data set; name one "
                "file, or one split's subfolder."
            )
        if not about.metadata.num_rows:  # as Spark writes for empty parts; `datasets` would call it damaged
            continue
        try:
            data = Dataset.from_parquet(
                str(file),
                cache_dir=str(cache / str(number)),
                columns=[image, *captions],
                fragment_scan_options=_CHECKED,
            )
        except Exception as error:  # `datasets` wraps those of pyarrow
            raise UserError(f"{file} is damaged ({in_a_line(error.__cause__ or error)}): fetch it again.") from error
        sets.append((file.relative_to(root).as_posix(), file.parent, data))
    return _source({"kind": "parquet"}, Columns(image, captions, root, options), sets)


def columns_of(file: Path, options: PairOptions) -> tuple[str, tuple[str, ...]]:
    """The columns of image and captions of a parquet file; refuses one that cannot be read, or has none."""
    schema = _parquet(file).schema_arrow
    texts = [field.name for field in schema if _is_text(field.type)]
    return choose_columns(schema.names, options, where=str(file), texts=texts)


def _parquet(file: Path) -> Any:
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} is not a parquet file that can be read ({error}): fetch it again.") from error


def _is_text(kind: Any) -> bool:
    """Whether a type can hold captions: texts or mappings, or lists of them."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _is_text(kind.value_type)
    return any(is_kind(kind) for is_kind in (
        pa.types.is_string, pa.types.is_large_string, pa.types.is_dictionary, pa.types.is_struct))  # fmt: skip


def open_dataset(name: str, options: PairOptions) -> PairSource:
    """A split of a data set: a folder of `save_to_disk`, or a name on the hub, which goes into the cache of `datasets`.

    Raises:
        UserError: It cannot be loaded, the split is not given or does not exist, or columns are not found.
    """
    from datasets import Image

    data = _load(name, options)
    images = [column for column, feature in data.features.items() if isinstance(feature, Image)]
    texts = [field.name for field in data.features.arrow_schema if field.name not in images and _is_text(field.type)]
    named = replace(options, image=options.image or (images[0] if len(images) == 1 else None))
    image, captions = choose_columns(data.column_names, named, where=name, texts=texts)
    shown = Path(name).name if Path(name).exists() else name
    about = {"kind": "datasets", "name": shown, "split": options.split, "subset": options.subset,
             "revision": options.revision}  # fmt: skip
    sets = [(shown, Path(name), data.select_columns([image, *captions]))]
    columns = Columns(image, captions, Path(name), options)
    return _source({key: value for key, value in about.items() if value}, columns, sets)


def _load(name: str, options: PairOptions) -> Any:
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
                builder.config.fragment_scan_options = _CHECKED
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
