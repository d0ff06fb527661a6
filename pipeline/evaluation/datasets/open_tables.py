"""Tables in every layout in use: parquet files, a `save_to_disk` folder, a cache of `datasets`, or a CSV."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pipeline.evaluation.datasets.tables import Members, Table, dataset_cells, parquet_cells
from pipeline.evaluation.datasets.task_data import (
    IMAGE_SUFFIXES,
    TaskError,
    files_below,
    plain,
    read_text,
)
from pipeline.files import text_lines

SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test")
"""Names of splits in use."""
_PART = re.compile(r"^(?P<stem>.*?)(?P<number>\d+)-of-(?P<total>\d+)(?P<rest>\D.*)?$")
MOST_PARTS = 100_000
"""Larger numbers are dates."""


def find_table(folder: Path, *, split: str = "test", csv_columns: Sequence[str] = ()) -> Table:
    """Find the table of a split in a folder, in any supported layout.

    A CSV with zips of images counts only where `csv_columns` says which columns it must have.
    """
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _open_saved(folder, split)
    if files_below(folder, ".arrow"):
        return _open_cached(folder, split)
    if files := _parquet_files(folder, split):
        return _open_parquet(files, folder)
    if csv_columns and (paths := files_below(folder, ".csv")):
        archives = files_below(folder, ".zip")
        tables = [open_csv(path, archives=archives) for path in paths]
        fitting = [table for table in tables if set(csv_columns) <= set(table.columns)]
        if len(fitting) != 1:
            raise TaskError(
                f"{folder}: exactly one CSV with the columns {', '.join(csv_columns)} is expected, but "
                f"{len(fitting)} of {', '.join(path.name for path in paths)} have them."
            )
        return fitting[0]
    raise TaskError(
        f"{folder} has no supported layout: expected a wds folder (test/nshards.txt), a save_to_disk folder, a "
        f"cache of `datasets` (*.arrow), parquet files{', or a CSV with a zip of images' if csv_columns else ''}."
    )


def _open_parquet(files: Sequence[Path], folder: Path) -> Table:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_parts(files)
    schemas = []
    for path in files:
        try:
            schemas.append(pq.read_schema(path))
            if not pq.read_metadata(path).num_rows:
                raise ValueError("it holds no rows at all")
        except Exception as error:  # pyarrow raises its own exceptions
            raise TaskError(f"{path} is not a complete parquet file ({plain(error)}): fetch it again.") from error
        if sorted(schemas[-1].names) != sorted({*schemas[0].names}):
            raise TaskError(f"{path} has other columns than {files[0]}, or one twice: are they of one data set?")
    try:
        pa.unify_schemas(schemas, promote_options="permissive")  # refuses numbers here and texts there
        features = datasets.Features.from_arrow_schema(schemas[0])
    except Exception as error:  # of columns that `datasets` has no type for, or what it wrote beside them is damaged
        raise TaskError(f"{folder} cannot be read ({plain(error)}): are its parquet files of one data set?") from error
    return Table(partial(parquet_cells, files), features, folder=folder, layout="parquet", files=files)


def _parquet_files(folder: Path, split: str) -> list[Path]:
    """The parquet files of a split; all of them where no file's name says which split it is."""
    files = files_below(folder, ".parquet")
    names = {path: path.relative_to(folder).as_posix().lower() for path in files}

    def of(*splits: str) -> list[Path]:
        pattern = re.compile(rf"(^|[/_.-])({'|'.join(map(re.escape, splits))})(?![a-z])")
        return [path for path, name in names.items() if pattern.search(name)]

    chosen = of(split.lower())
    if not chosen and (others := of(*SPLITS)):
        raise TaskError(f"{folder} has no files of the split {split}, but of others ({names[others[0]]}): set split.")
    return chosen or files


def check_parts(files: Sequence[Path]) -> None:
    """Names such as `test-00000-of-00002.parquet` or `0000.parquet` say how many files there must be."""
    groups: dict[tuple[Path, str, str], set[tuple[int, int]]] = defaultdict(set)
    """(total, number) of the parts; the total is 0 where their names have none."""
    for path in files:
        if part := _PART.match(path.name):
            groups[path.parent, part["stem"], part["rest"] or ""].add((int(part["total"]), int(part["number"])))
        elif path.stem.isdecimal() and int(path.stem) < MOST_PARTS:
            groups[path.parent, "", path.suffix].add((0, int(path.stem)))
    for (folder, stem, rest), parts in groups.items():
        numbers = {number for _, number in parts}
        totals = sorted({total or max(numbers) + 1 for total, _ in parts})
        missing = sorted(set(range(totals[-1])) - numbers)
        if missing or len(totals) > 1:
            raise TaskError(
                f"{folder}: the parts {stem}*{rest} are of different versions, or some are missing: their names say "
                f"{' and '.join(map(str, totals))} parts, without number {', '.join(map(str, missing[:5]))}. A score "
                "over partial data would not be this task's score: fetch them."
            )


def _open_saved(folder: Path, split: str) -> Table:
    """Open a folder written by `Dataset.save_to_disk`, or one split of a `DatasetDict`."""
    import datasets

    try:
        rows = datasets.load_from_disk(str(folder))
    except Exception as error:  # many exception types, too
        raise TaskError(f"{folder} is incomplete or damaged ({plain(error)}): fetch it again.") from error
    if isinstance(rows, datasets.DatasetDict):
        rows = rows[_chosen_split(list(rows), split, folder)]
    saved = Path(rows.cache_files[0]["filename"]).parent if rows.cache_files else folder
    beside = (folder / "dataset_dict.json", saved / "state.json", saved / "dataset_info.json")
    files = [Path(entry["filename"]) for entry in rows.cache_files]
    check_parts(files)
    files += [path for path in beside if path.is_file()]
    return Table(partial(dataset_cells, rows), rows.features, folder=folder, layout="save_to_disk", files=files)


def _chosen_split(present: Sequence[str], wanted: str, folder: Path) -> str:
    """The split of this name in any case, or the only one there is."""
    chosen = [name for name in present if name.lower() == wanted.lower()] or present
    if len(present) != 1 and chosen is present:
        raise TaskError(f"{folder} has the splits {', '.join(present)}, but none is called {wanted}.")
    return chosen[0]


def _open_cached(folder: Path, split: str) -> Table:
    """Open a data set in the cache of `datasets`, as written by `load_dataset(..., cache_dir=...)`."""
    import datasets

    # Of finished data sets: owner___name/config/version/digest.
    infos = (path.parent for path in sorted(folder.rglob("dataset_info.json")) if any(path.parent.glob("*.arrow")))
    versions = [path for path in infos if not any(part.endswith(".incomplete") for part in path.parts)]
    if len(versions) != 1:
        names = ", ".join(path.relative_to(folder).as_posix() for path in versions[:3]) or "none finished"
        raise TaskError(f"{folder} must hold one finished data set, but holds {len(versions)} ({names}).")
    version = versions[0]
    info = version / "dataset_info.json"
    try:
        splits = json.loads(info.read_text())["splits"]
        name = _chosen_split(list(splits), split, version)
        pattern = re.compile(rf"-{re.escape(name)}(-\d+-of-\d+)?\.arrow$")
        files = sorted(path for path in version.glob("*.arrow") if pattern.search(path.name))
        check_parts(files)
        rows = datasets.concatenate_datasets([datasets.Dataset.from_file(str(path)) for path in files])
        if splits[name].get("num_examples") not in (None, len(rows)):
            raise ValueError(f"it has {len(rows):,} rows, but its dataset_info.json says {splits[name]}")
    except TaskError:
        raise
    except Exception as error:  # many exception types, from a missing file to a damaged stream
        raise TaskError(f"{version} is incomplete or damaged ({plain(error)}): fetch the data set again.") from error
    cells = partial(dataset_cells, rows)
    return Table(cells, rows.features, folder=version, layout="datasets cache", files=[*files, info])


def open_csv(
    path: Path, *, images: Path | None = None, column: str = "", archives: Sequence[Path] | None = None
) -> Table:
    """Open a CSV of texts, whose images are files in the folder `images` or in zip `archives`.

    `column` is that of the images, with which a quote that is not closed is noticed.
    """
    import datasets

    try:
        header, *rows = [row for row in csv.reader(io.StringIO(read_text(path), newline="")) if row] or [[]]
    except csv.Error as error:
        raise TaskError(f"{path} is not a readable CSV ({error}).") from error
    if twice := [name for name in header if header.count(name) > 1]:
        raise TaskError(f"{path} has two columns {twice[0]!r}: which one counts? Rename one.")
    place = header.index(column) if column in header else 0
    for number, row in enumerate(rows, 1):
        where = f"row {number} of {path}"
        if len(row) != len(header):
            more = "more" if len(row) > len(header) else "fewer"
            raise TaskError(f"{where} has {more} cells than the header: quote cells that contain commas.")
        for line in (line for cell in row for line in text_lines(cell)[1:]):  # perhaps a row, whose column has an image
            cells = line.split(",")
            named = [cells[k].strip(' "') for k in (place, place - len(row)) if -len(cells) <= k < len(cells)]
            if images is not None and any(os.path.isfile(images / name) for name in named):
                what = f"a quote is not closed, which would swallow the line {line[:60]!r}"
                raise TaskError(f"{where}: {what}. Close it, or double the quotes inside values.")
    text = datasets.Features({name: datasets.Value("string") for name in header})
    columns = {name: [row[place] for row in rows] for place, name in enumerate(header)}
    return Table(
        partial(dataset_cells, datasets.Dataset.from_dict(columns, features=text)),
        text,
        folder=images or path.parent,
        layout="csv+files" if archives is None else "csv+zip",
        files=(path, *(archives or ())),
        members=None if archives is None else _zip_members(archives),
        names=(path, 1),
    )


def _zip_members(archives: Sequence[Path]) -> Members:
    """The images in zip archives, by file name and by bare stem."""
    members = {}
    for archive in archives:
        try:
            with zipfile.ZipFile(archive) as opened:
                names = opened.namelist()
        except Exception as error:
            raise TaskError(f"{archive} is damaged or cut short ({plain(error)}): fetch it again.") from error
        for name in names:
            path = Path(name)
            if path.suffix.lower().removeprefix(".") in IMAGE_SUFFIXES and not path.name.startswith("._"):
                members[path.name] = members[path.stem] = (archive, name)
    return members
