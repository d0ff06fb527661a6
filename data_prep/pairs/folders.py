"""Folders: their files, splits by name, and images in folders that have the names of classes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from data_prep.pairs.listing import PairRow, PairSource
from data_prep.pairs.pair import SourceOptions, read_image, refuse_split
from data_prep.reasons import NO_CAPTION
from pipeline.errors import UserError
from pipeline.pictures.image_error import FORMAT_SUFFIXES

_SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval")
"""As `datasets` finds them in names."""


def open_classes(root: Path, options: SourceOptions) -> PairSource:
    """Images in folders with the names of their classes, perhaps below folders of splits.

    A class takes the place of `{class}` in each template, and the name of the folder above it that of `{parent}`.

    Raises:
        UserError: A template has no such place, or there are no such folders with images.
    """
    templates = options.caption_template
    if wrong := [template for template in templates if "{class}" not in template]:
        raise UserError(f"--caption-template {wrong[0]!r} has no {{class}}, the place for the name of a folder.")
    below = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    folders, notes = [root], tuple[str, ...]()
    if below and all(_split_of(path, root) for path in below):
        folders, notes = of_split(root, below, options)
    else:
        refuse_split(options, "this source, whose folders are not all named after splits")
    tops, with_parent = (root, *folders), any("{parent}" in template for template in templates)

    def rows() -> Iterator[PairRow]:
        for path in (Path(at, name) for top in folders for at, files in walk(top) for name in files if is_image(name)):
            place, here = path.relative_to(root).as_posix(), path.parent
            if here in tops or (with_parent and here.parent in tops):
                yield PairRow(place, problem=NO_CAPTION, detail="it is in no folder of a class")
            else:
                label, parent = (re.sub(r"[_\s]+", " ", folder.name) for folder in (here, here.parent))
                texts = (text.replace("{class}", label).replace("{parent}", parent) for text in templates)
                yield PairRow(place, str(path), tuple(texts))

    classes = {Path(row.image).parent for row in rows() if not row.problem}
    if not classes:
        raise UserError(f"{root} has no folders with images, whose names would be the classes of --caption-template.")
    notes += (f"classes: {_names(classes)}",)
    if (above := {folder.parent for folder in classes if folder.parent not in tops}) and not with_parent:
        notes += (f"in no caption: the folders above, {_names(above)}; {{parent}} in a template takes their names",)
    about = {"kind": "folders of classes", "caption": list(templates)}
    return PairSource(about, rows(), root, read_image, notes=notes)


def _names(folders: Collection[Path]) -> str:
    names = sorted({folder.name for folder in folders})
    return f"{len(names):,} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"


def of_split(root: Path, paths: list[Path], options: SourceOptions) -> tuple[list[Path], tuple[str, ...]]:
    """Files or folders of one split if all are of splits, else all; and a note about the choice.

    Raises:
        UserError: There is no such split.
    """
    splits = {path: _split_of(path, root) for path in paths}
    names = sorted(set(splits.values()) - {""})
    if not names:
        refuse_split(options, "this source, in which nothing has the name of a split")
    if not options.split and ("" in splits.values() or len(names) < 2):
        return paths, ()
    wanted = options.split or "train"
    if wanted not in names:
        raise UserError(f"{root} has no split {wanted!r}: choose with --split. It has: {', '.join(names)}.")
    chosen = [path for path, split in splits.items() if split == wanted]
    return chosen, (f"split {wanted} of {', '.join(names)} (--split chooses another)",)


def _split_of(path: Path, root: Path) -> str:
    """The split that a file or folder is of, by its name or that of a folder above it; empty for none."""
    words = (re.split(r"[-_. ]", part)[0].lower() for part in path.relative_to(root).parts)
    return next((word for word in words if word in _SPLITS), "")


def is_image(name: str) -> bool:
    """Whether a file is an image by its name."""
    return name.rpartition(".")[2].lower() in FORMAT_SUFFIXES and not name.startswith(".")


def walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Folders below a folder, links followed, with their files.

    Hidden folders, such as `.ipynb_checkpoints`, and links to a folder that they are in are left out.
    """
    for root, below, files in os.walk(folder, followlinks=True):
        here = Path(root).resolve()
        visible = (name for name in below if not name.startswith("."))
        below[:] = sorted(name for name in visible if not here.is_relative_to((here / name).resolve()))
        yield root, sorted(files)


def files_below(folder: Path) -> Iterator[Path]:
    """The files of all kinds below a folder, in the order of `walk`."""
    return (Path(root, name) for root, names in walk(folder) for name in names)


def regular_files(folder: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """The files with wanted names below a folder.

    Raises:
        UserError: One is a link to nothing, a pipe or a device.
    """
    files = [path for path in files_below(folder) if wanted(path.name)]
    if odd := [path for path in files if not path.is_file()]:
        raise UserError(f"{odd[0]} is not a file, nor a link to one: mend it, or move it away.")
    return files
