"""Detect the kind of a SOURCE and open it as rows."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from data_prep.pairs import embedded, folders, members, pair_tables
from data_prep.pairs.listing import PairSource
from data_prep.pairs.pair import SourceOptions
from pipeline.data.shards.manifest_format import JOURNAL
from pipeline.errors import UserError
from pipeline.pictures.image_error import FORMAT_SUFFIXES

_KNOWN = (
    "a CSV, TSV, JSONL or JSON table of image files, a folder with such a table, a folder of images with .txt or .json "
    "files beside them, COCO's captions_*.json, parquet files, a folder of datasets.save_to_disk, webdataset tars, or "
    "the name of a data set on the Hugging Face hub (owner/name)"
)
_MOST_TEXTS = 5
_TEXT_SUFFIXES = ("txt", "caption", "json")
"""Of captions beside images."""
_TARS = (".tar", ".tgz", ".tar.gz")
_METADATA = ("metadata.csv", "metadata.jsonl")
_KINDS = {
    "tars": _TARS,
    "archives": (".zip", ".7z", ".rar", ".tar.bz2", ".tar.xz", ".tar.zst"),
    "parquet files": (".parquet",),
    "tables": pair_tables.TABLE_SUFFIXES,
    "images": tuple(f".{suffix}" for suffix in FORMAT_SUFFIXES),
}
_BESIDE = {"table": ("images",), "images": ("images", "tables", "parquet files"), "tars": ("tables", "parquet files"),
           "parquet": ("images", "tables")}  # fmt: skip
"""What belongs to a source of a kind, or stands beside it, as beside img2dataset's tars."""
_APPLIES = {
    "image": ("table", "tars", "parquet", "datasets", "hub"),
    "images": ("table",),
    "header": ("table",),
    "caption_template": ("images",),
    "split": ("table", "images", "parquet", "datasets", "hub"),
    "subset": ("hub",),
    "revision": ("hub",),
}


def open_source(source: str, options: SourceOptions, cache: Path) -> PairSource:
    """Open a file, a folder, a pattern of tars or a name on the hub; `cache` is a folder for copies.

    Raises:
        UserError: It cannot be read, is of no known kind, or an option does not apply to its kind.
    """
    path = Path(source).absolute()
    kind, files = _kind_of(source, path, options)
    for name, kinds in _APPLIES.items():
        if getattr(options, name) and kind not in kinds:
            raise UserError(
                f"--{name.replace('_', '-')} does not apply to this source, which is of kind {kind}, but to "
                f"{', '.join(kinds)}."
            )
    root = path if path.is_dir() else Path(os.path.commonpath([file.parent for file in files])) if files else path
    chosen, notes = files, tuple[str, ...]()
    if kind == "parquet" or (kind == "table" and files[0].suffix.lower() != ".json"):  # a JSON may name splits itself
        chosen, notes = folders.of_split(root, files, options)
    match kind:
        case "table":
            opened = _open_tables(root, chosen, options)
        case "images":
            opened = (folders.open_classes if options.caption_template else folders.open_folder)(path, options)
        case "tars":
            opened = members.open_tars(root, chosen, options, cache)
        case "parquet":
            opened = embedded.open_parquet(path, chosen, options, cache)
        case _:
            opened = embedded.open_dataset(source, options)
    return replace(opened, notes=(*notes, *opened.notes, *_unread(path, kind, files)))


def _open_tables(root: Path, files: list[Path], options: SourceOptions) -> PairSource:
    """One table, or the metadata files of an image folder, each of which names images beside it."""
    tables = [pair_tables.open_table(file, options) for file in files]
    if len(files) == 1:
        return tables[0]
    rows = (
        replace(row, place=os.path.join(file.parent.relative_to(root), row.place))
        for file, table in zip(files, tables, strict=True)
        for row in table.rows
    )
    return replace(tables[0], rows=rows, root=root)


def _unread(folder: Path, kind: str, files: list[Path]) -> Iterator[str]:
    """A note about what a folder has besides its source, and what is not read."""
    counts, used = Counter[str](), set(files)
    for path in (Path(root, name) for root, names in folders.walk(folder) for name in names if kind in _BESIDE):
        fits = (what for what, suffixes in _KINDS.items() if path.name.lower().endswith(suffixes))
        what = next(fits, "") if path not in used else ""
        counts[what] += what not in ("", *_BESIDE[kind])
    if shown := ", ".join(f"{count:,} {what}" for what, count in counts.items() if count):
        yield f"not read, besides: {shown}; to convert them, name their files or folder"


def is_hub(source: str) -> bool:
    """Whether a source is a name on the hub, not a path."""
    return source.count("/") == 1 and not source.startswith((".", "/", "~")) and not Path(source).exists()


def _kind_of(source: str, path: Path, options: SourceOptions) -> tuple[str, list[Path]]:
    """The kind of a source (table, tars, images, parquet, datasets, hub) and its files."""
    if "{" in source and not path.exists():
        return "tars", _expanded(source)
    lower = path.name.lower()
    tabular = lower.endswith((*pair_tables.TABLE_SUFFIXES, ".txt", ".json"))
    if path.is_file():
        if tabular or lower.endswith((".parquet", *_TARS)):
            return "table" if tabular else "parquet" if lower.endswith(".parquet") else "tars", [path]
        raise UserError(f"{source} is not a supported kind of file. A source is {_KNOWN}.")
    if path.is_dir():
        return _kind_of_folder(path, options)
    if source.count("/") == 1 and Path(source).parent.is_dir():
        raise UserError(
            f"There is no {path.name} in the folder {Path(source).parent}, which exists here. A source is {_KNOWN}; "
            f"for the data set {source} of the hub, run this in a folder without {Path(source).parent}/."
        )
    if is_hub(source) and not tabular:
        return "hub", []
    raise UserError(f"There is no file or folder {source}. A source is {_KNOWN}.")


def _expanded(pattern: str) -> list[Path]:
    """The tars of a pattern such as `x/{00000..00099}.tar`.

    Raises:
        UserError: Some do not exist.
    """
    from webdataset.shardlists import expand_urls

    files = [Path(name).absolute() for name in expand_urls(pattern)]
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(
            f"{len(missing):,} of the {len(files):,} files of {pattern} do not exist, such as {missing[0]}: give a "
            "pattern without them, or the folder."
        )
    return files


def _kind_of_folder(path: Path, options: SourceOptions) -> tuple[str, list[Path]]:
    """The first kind that fits, in an order in which the files beside img2dataset's output decide nothing.

    Raises:
        UserError: None does; the message says why the first file that could have does not.
    """
    problems: list[UserError] = []

    def fitting(files: list[Path]) -> list[Path]:
        return [file for file in files if _fits(file, options, problems)]

    def below(*suffixes: str) -> list[Path]:
        return list(folders.files_below(path, lambda name: name.lower().endswith(suffixes)))

    if options.caption_template:
        return "images", []
    if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json")):
        return "datasets", []
    if found := list(folders.files_below(path, lambda name: name in _METADATA)):
        return "table", found
    if found := fitting(_tables(path)):
        if len(found) > 1:
            names = ", ".join(table.name for table in found[:5])
            raise UserError(f"{path} has several tables ({names}): name one of them.")
        return "table", found
    if (found := below(".parquet")) and fitting(found[:1]):
        return "parquet", found
    if found := below(*_TARS):
        return "tars", found
    # Of any kind: links to nothing and pipes are rows that are counted.
    below_it = (Path(root, name) for root, names in folders.walk(path) for name in names if folders.is_image(name))
    images = list(itertools.islice(below_it, 10_000))
    if any(image.with_name(f"{name}.{suffix}").is_file() for image in images for name in (image.stem, image.name)
           for suffix in _TEXT_SUFFIXES):  # fmt: skip
        return "images", []
    if found := fitting(sorted((*path.glob("*.json"), *path.glob("annotations/captions*.json")))):
        raise UserError(f"{path} has captions in JSON: name the annotations, such as {found[0]}.")
    if problems:
        raise problems[0]
    if images:
        raise UserError(
            f"{path} has images, but no captions: neither a table in it, nor .txt or .json files beside them. If the "
            "folders that they are in have the names of classes: --caption-template 'a photo of a {class}'."
        )
    raise UserError(f"{path} holds no supported kind of source. A source is {_KNOWN}.")


def _fits(file: Path, options: SourceOptions, problems: list[UserError]) -> bool:
    """Whether a file has columns of images and captions; why not is added to `problems`."""
    try:
        (embedded.columns_of if file.suffix.lower() == ".parquet" else pair_tables.find_columns)(file, options)
    except UserError as problem:
        problems.append(problem)
        return False
    return True


def _tables(folder: Path) -> list[Path]:
    """Tables in a folder; without any, a few .txt files that belong to no image."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != JOURNAL)
    if found := [path for path in files if path.suffix.lower() in pair_tables.TABLE_SUFFIXES]:
        return found
    pictures = {name for path in files if path.suffix.lower() != ".txt" for name in (path.stem, path.name)}
    alone = [path for path in files if path.suffix.lower() == ".txt" and path.stem not in pictures]
    return alone if len(alone) <= _MOST_TEXTS else []
