"""Detect the kind of a SOURCE, its split and its classes, and open it as rows."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from data_prep.pairs import embedded, members
from data_prep.pairs.listing import PairRow, PairSource
from data_prep.pairs.members import is_image
from data_prep.pairs.pair import PairOptions, read_image
from data_prep.pairs.pair_tables import TABLE_SUFFIXES, find_columns, open_table
from data_prep.reasons import NO_CAPTION
from pipeline.data.shards.manifest_format import JOURNAL
from pipeline.errors import UserError
from pipeline.files import files_below, regular_files
from pipeline.pictures import FORMAT_SUFFIXES

_KNOWN = (
    "a CSV, TSV, JSONL or JSON table of image files, a folder with such a table, a folder of images with .txt or .json "
    "files beside them, COCO's captions_*.json, parquet files, a folder of datasets.save_to_disk, webdataset tars, or "
    "the name of a data set on the Hugging Face hub (owner/name, run where there is no folder of that owner)"
)
_METADATA = ("metadata.csv", "metadata.jsonl")
_TARS = (".tar", ".tgz", ".tar.gz")
_CAPTIONS = ("txt", "caption", "json")
"""Suffixes of captions beside images."""
_SUFFIXES = {
    "tars": _TARS,
    "archives": (".zip", ".7z", ".rar", ".tar.bz2", ".tar.xz", ".tar.zst"),
    "parquet files": (".parquet",),
    "tables": TABLE_SUFFIXES,
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
_SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval")
"""As `datasets` finds them in names."""


def open_source(source: str, options: PairOptions, cache: Path) -> PairSource:
    """Open a file, a folder or a name on the hub; `cache` is a folder for copies.

    Raises:
        UserError: It cannot be read, is of no known kind, or an option does not apply to it.
    """
    path = Path(source).absolute()
    kind, files = _kind_of(source, path, options)
    for name, kinds in _APPLIES.items():
        if getattr(options, name) and kind not in kinds:
            raise UserError(
                f"--{name.replace('_', '-')} does not apply to this source, which is of kind {kind}, but to "
                f"{', '.join(kinds)}."
            )
    root = path if path.is_dir() else path.parent
    chosen, split = files, ""
    if kind == "parquet" or (kind == "table" and files[0].suffix.lower() != ".json"):  # a JSON may name splits itself
        chosen, split = _of_split(root, files, options)
    match kind:
        case "table":
            opened, *others = [open_table(file, options) for file in chosen]
            if others:  # the metadata files of an image folder, each of which names images beside it
                rows = (
                    replace(row, place=os.path.join(file.parent.relative_to(root), row.place))
                    for file, table in zip(chosen, (opened, *others), strict=True)
                    for row in table.rows
                )
                opened = replace(opened, rows=rows, root=root)
        case "images":
            opened = (_open_classes if options.caption_template else members.open_folder)(path, options)
        case "tars":
            opened = members.open_tars(root, chosen, options, cache)
        case "parquet":
            opened = embedded.open_parquet(path, chosen, options, cache)
        case _:
            opened = embedded.open_dataset(source, options)
    if split := split or opened.split:
        opened = replace(opened, notes=(f"split {split}", *opened.notes))
    elif options.split and kind in ("table", "images", "parquet"):
        raise UserError(f"--split does not apply to {source}, in which nothing has the name of a split.")
    return replace(opened, notes=(*opened.notes, *_unread(path, kind, files)))


def _unread(folder: Path, kind: str, used: list[Path]) -> Iterator[str]:
    """A note about what a folder has besides its source, and what is not read."""
    counts = Counter[str]()
    for path in files_below(folder) if kind in _BESIDE else ():
        fits = (what for what, suffixes in _SUFFIXES.items() if path.name.lower().endswith(suffixes))
        if path not in used and (what := next(fits, "")) and what not in _BESIDE[kind]:
            counts[what] += 1
    if counts:
        shown = ", ".join(f"{count:,} {what}" for what, count in counts.items())
        yield f"not read, besides: {shown}; to convert them, name their files or folder"


def is_hub(source: str) -> bool:
    """Whether a source is a name on the hub, not a path."""
    return source.count("/") == 1 and not source.startswith((".", "/", "~")) and not Path(source).parent.exists()


def _kind_of(source: str, path: Path, options: PairOptions) -> tuple[str, list[Path]]:
    """The kind of a source (table, tars, images, parquet, datasets, hub) and its files."""
    if path.is_dir():
        return _kind_of_folder(path, options)
    kinds = {"table": (*TABLE_SUFFIXES, ".txt", ".token", ".json"), "parquet": (".parquet",), "tars": _TARS}
    kind = next((kind for kind, suffixes in kinds.items() if path.name.lower().endswith(suffixes)), "")
    if path.is_file() and kind:
        return kind, [path]
    if is_hub(source) and kind != "table":
        return "hub", []
    what = f"{source} is not a supported kind of file" if path.is_file() else f"There is no file or folder {source}"
    raise UserError(f"{what}. A source is {_KNOWN}.")


def _kind_of_folder(path: Path, options: PairOptions) -> tuple[str, list[Path]]:
    """The first kind that fits, in an order in which the files beside img2dataset's output decide nothing; if none
    does, the error says why the first file that could have does not."""
    if options.caption_template:
        return "images", []
    if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json")):
        return "datasets", []
    if files := regular_files(path, lambda name: name in _METADATA):
        return "table", files
    problems: list[UserError] = []

    def fits(file: Path) -> bool:
        """Whether a file has columns of images and captions."""
        try:
            (embedded.columns_of if file.suffix.lower() == ".parquet" else find_columns)(file, options)
        except UserError as problem:
            problems.append(problem)
            return False
        return True

    beside = (file for file in sorted(path.iterdir()) if file.is_file() and file.name != JOURNAL)
    if tables := [file for file in beside if file.suffix.lower() in TABLE_SUFFIXES and fits(file)]:
        if len(tables) > 1:
            names = ", ".join(table.name for table in tables[:5])
            raise UserError(f"{path} has several tables ({names}): name one of them.")
        return "table", tables
    files = regular_files(path, lambda name: name.lower().endswith(".parquet"))
    if files and fits(files[0]):
        return "parquet", files
    if files := regular_files(path, lambda name: name.lower().endswith(_TARS)):
        return "tars", files
    # Of any kind: links to nothing and pipes are rows that are counted.
    images = list(itertools.islice(filter(is_image, files_below(path)), 10_000))
    beside_it = (
        f"{name}.{suffix}" for image in images for name in (image, image.with_suffix("")) for suffix in _CAPTIONS
    )
    if any(Path(file).is_file() for file in beside_it):
        return "images", []
    for file in sorted((*path.glob("*.json"), *path.glob("annotations/captions*.json"))):
        if fits(file):
            raise UserError(f"{path} has captions in JSON: name the annotations, such as {file}.")
    if problems:
        raise problems[0]
    if not images:
        raise UserError(f"{path} holds no supported kind of source. A source is {_KNOWN}.")
    raise UserError(
        f"{path} has images, but no captions: neither a table (CSV, TSV, JSONL; a .txt file must be named) in it, nor "
        ".txt or .json files beside them. If they are in folders with the names of classes: --caption-template "
        "'a photo of a {class}'."
    )


def _open_classes(root: Path, options: PairOptions) -> PairSource:
    """Images in folders with the names of their classes, perhaps below folders of splits.

    A class takes the place of `{class}` in each template, and the name of the folder above it that of `{parent}`.
    """
    templates = options.caption_template
    if wrong := [template for template in templates if "{class}" not in template]:
        raise UserError(f"--caption-template {wrong[0]!r} has no {{class}}, the place for the name of a folder.")
    below = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    folders, split = [root], ""
    if below and all(_split_of(path, root) for path in below):
        folders, split = _of_split(root, below, options)
    tops, with_parent = (root, *folders), any("{parent}" in template for template in templates)

    def rows() -> Iterator[PairRow]:
        for path in (path for top in folders for path in filter(is_image, files_below(top))):
            place, here = path.relative_to(root).as_posix(), path.parent
            if here in tops or (with_parent and here.parent in tops):
                yield PairRow(place, problem=NO_CAPTION, detail="it is in no folder of a class")
            else:
                label, parent = (re.sub(r"[_\s]+", " ", folder.name) for folder in (here, here.parent))
                texts = (text.replace("{class}", label).replace("{parent}", parent) for text in templates)
                yield PairRow(place, str(path), tuple(texts))

    names = sorted({Path(row.image).parent.name for row in rows() if not row.problem})
    if not names:
        raise UserError(f"{root} has no folders with images, whose names would be the classes of --caption-template.")
    about = {"kind": "folders of classes", "caption": list(templates)}
    note = f"classes: {len(names):,} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
    return PairSource(about, rows(), root, read_image, notes=(note,), split=split)


def _of_split(root: Path, paths: list[Path], options: PairOptions) -> tuple[list[Path], str]:
    """Files or folders of one split if all are of splits, else all; and which split of which, for the user."""
    splits = {path: _split_of(path, root) for path in paths}
    names = sorted({*splits.values()} - {""})
    if not names or (not options.split and ("" in splits.values() or len(names) < 2)):
        return paths, ""
    wanted = options.split or "train"
    if wanted not in names:
        raise UserError(f"{root} has no split {wanted!r}: choose with --split. It has: {', '.join(names)}.")
    chosen = [path for path, split in splits.items() if split == wanted]
    return chosen, f"{wanted} of {', '.join(names)} (--split chooses another)"


def _split_of(path: Path, root: Path) -> str:
    """The split that a file or folder is of, by its name or that of a folder above it; empty for none."""
    words = (re.split(r"[-_. ]", part)[0].lower() for part in path.relative_to(root).parts)
    return next((word for word in words if word in _SPLITS), "")
