"""Detect the kind of a SOURCE and open it as rows."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from data_prep.pairs import class_folders, embedded, members, pair_tables
from data_prep.pairs.listing import PairSource
from data_prep.pairs.pair import SourceOptions, read_image, refuse_split
from pipeline.data.shards.manifest_format import JOURNAL
from pipeline.data.shards.tar_reader import FORMAT_SUFFIXES
from pipeline.errors import UserError

_KNOWN = (
    "a CSV, TSV, JSONL or JSON table of image files, a folder with such a table, a folder of images with .txt or .json "
    "files beside them, COCO's captions_*.json, parquet files, a folder of datasets.save_to_disk, webdataset tars, or "
    "the name of a data set on the Hugging Face hub (owner/name)"
)
_MOST_TEXTS = 5
_TARS = (".tar", ".tgz", ".tar.gz")
_SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval")
"""As `datasets` finds them in names."""
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
    opened = _open_kind(kind, source, files, options, cache)
    return replace(opened, notes=(*opened.notes, *_unread(path, kind, files)))


def _open_kind(kind: str, source: str, files: list[Path], options: SourceOptions, cache: Path) -> PairSource:
    path = Path(source).absolute()
    root = path if path.is_dir() else Path(os.path.commonpath([file.parent for file in files])) if files else path
    if kind == "table":
        return _open_tables(root, files, options)
    if kind == "images" and options.caption_template:
        return _open_classes(path, options)
    if kind == "images":
        refuse_split(options, "this source, images with captions beside them")
        return members.open_folder(path, options)
    if kind == "tars":
        return members.open_tars(root, files, options, cache)
    if kind == "parquet":
        files, notes = _of_split(root, files, options)
        opened = embedded.open_parquet(path, files, options, cache)
        return replace(opened, notes=(*notes, *opened.notes))
    return embedded.open_dataset(source, options)


def _unread(folder: Path, kind: str, files: list[Path]) -> Iterator[str]:
    """A note about what a folder has besides its source, and what is not read."""
    counts, used = Counter[str](), set(files)
    for path in (Path(root, name) for root, names in members.walk(folder) for name in names if kind in _BESIDE):
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
    """The first kind that fits, in an order in which the files beside img2dataset's output decide nothing."""
    if options.caption_template:
        return "images", []
    if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json")):
        return "datasets", []
    problems: list[UserError] = []
    if found := list(members.files_below(path, lambda name: name in _METADATA)):
        return "table", found
    if found := list(_fitting(_tables(path), options, problems)):
        if len(found) > 1:
            names = ", ".join(table.name for table in found[:5])
            raise UserError(f"{path} has several tables ({names}): name one of them.")
        return "table", found
    parquet = list(members.files_below(path, lambda name: name.lower().endswith(".parquet")))
    if parquet and _fits(parquet[0], options, problems):
        return "parquet", parquet
    if tars := list(members.files_below(path, lambda name: name.lower().endswith(_TARS))):
        return "tars", tars
    images = members.files_below(path, members.is_image)
    if any(_has_text(image) for image in itertools.islice(images, 10_000)):
        return "images", []
    if found := list(
        _fitting(sorted((*path.glob("*.json"), *path.glob("annotations/captions*.json"))), options, problems)
    ):
        raise UserError(f"{path} has captions in JSON: name the annotations, such as {found[0]}.")
    if problems:
        raise problems[0]
    if next(members.files_below(path, members.is_image), None):
        raise UserError(
            f"{path} has images, but no captions: neither a table in it, nor .txt or .json files beside them. If the "
            "folders that they are in have the names of classes: --caption-template 'a photo of a {class}'."
        )
    raise UserError(f"{path} holds no supported kind of source. A source is {_KNOWN}.")


def _has_text(image: Path) -> bool:
    names = (image.stem, image.name)
    return any((image.parent / f"{name}.{suffix}").is_file() for name in names for suffix in members.TEXT_SUFFIXES)


def _fitting(files: list[Path], options: SourceOptions, problems: list[UserError]) -> Iterator[Path]:
    return (file for file in files if _fits(file, options, problems))


def _fits(file: Path, options: SourceOptions, problems: list[UserError]) -> bool:
    """Whether a file has columns of images and captions; why not is added to `problems`."""
    try:
        if file.suffix.lower() == ".parquet":
            embedded.columns_of(file, options)
        else:
            pair_tables.find_columns(file, options)
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


def _split_of(path: Path, root: Path) -> str:
    """The split that a file or folder is of, by its name or that of a folder above it; empty for none."""
    words = (re.split(r"[-_. ]", part)[0].lower() for part in path.relative_to(root).parts)
    return next((word for word in words if word in _SPLITS), "")


def _of_split(root: Path, files: list[Path], options: SourceOptions) -> tuple[list[Path], tuple[str, ...]]:
    """Files or folders of one split if all are of splits, else all; and a note about the choice.

    Raises:
        UserError: There is no such split.
    """
    splits = {file: _split_of(file, root) for file in files}
    names = sorted(set(splits.values()) - {""})
    if not names:
        refuse_split(options, "this source, in which nothing has the name of a split")
    if not options.split and ("" in splits.values() or len(names) < 2):
        return files, ()
    wanted = options.split or "train"
    if wanted not in names:
        raise UserError(f"{root} has no split {wanted!r}: choose with --split. It has: {', '.join(names)}.")
    chosen = [file for file, split in splits.items() if split == wanted]
    return chosen, (f"split {wanted} of {', '.join(names)} (--split chooses another)",)


def _open_classes(root: Path, options: SourceOptions) -> PairSource:
    """Images in folders with the names of their classes, perhaps below folders of splits."""
    below = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    folders, notes = [root], tuple[str, ...]()
    if below and all(_split_of(path, root) for path in below):
        folders, notes = _of_split(root, below, options)
    else:
        refuse_split(options, "this source, whose folders are not all named after splits")
    opened = class_folders.open_classes(root, folders, options.caption_template)
    return replace(opened, notes=(*notes, *opened.notes))


def _open_tables(root: Path, files: list[Path], options: SourceOptions) -> PairSource:
    """One table, or the metadata files of an image folder, each of which names images beside it."""
    notes: tuple[str, ...] = ()
    if files[0].suffix.lower() != ".json":  # which may name splits itself
        files, notes = _of_split(root, files, options)
    opened = [pair_tables.open_table(file, options) for file in files]
    first = opened[0]
    named = len(files) > 1
    rows = (
        replace(row, place=os.path.join(table.path.parent.relative_to(root), row.place)) if named else row
        for table in opened
        for row in table.rows()
    )
    about = {"kind": "table", "image": first.image, "caption": list(first.captions)}
    notes += (first.note,)
    return PairSource(about, rows, first.folder if not named else root, read_image, notes=notes)
