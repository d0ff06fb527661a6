"""Tables of image files: CSV, TSV, JSONL, and JSON (lists, mappings, columns, COCO's captions, Karpathy's splits)."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.pairs.listing import PairRow, PairSource
from data_prep.pairs.pair import (
    CAPTION_NAMES,
    IMAGE_NAMES,
    MALFORMED_ROW,
    MISSING_FILE,
    URL,
    URL_NAMES,
    SourceOptions,
    captions_in,
    choose_columns,
    has_urls,
    path_of,
    read_image,
    refuse_split,
    shortened,
)
from data_prep.sources.text_rows import json_items, json_lines, json_tree, separated_values
from pipeline.errors import UserError

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
_HEAD = 100
"""Rows that columns are found in."""
_SPLITS = "splits"
"""Field of a row of Karpathy's splits: the names of all."""

Read = Iterator[tuple[str, Mapping[str, Any] | PairRow]]
"""Place and row; an unreadable row is a `PairRow` with its problem."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table, and the folder that paths in it start from."""

    image: str
    captions: tuple[str, ...]
    folder: Path
    options: SourceOptions

    @property
    def description(self) -> str:
        """How the table is read, for the user."""
        return f"images: {self.image}; captions: {', else '.join(self.captions)}"

    def row(self, place: str, values: Mapping[str, Any], at: tuple[int, ...] = ()) -> PairRow:
        """A row as listed; `at` says where it is if it holds the image itself. Refuses what `path_of` does."""
        value = values.get(self.image)
        texts = next(filter(None, (captions_in(values.get(name)) for name in self.captions)), ())
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if at and isinstance(value, bytes | bytearray):
            return PairRow(place, hashlib.blake2b(value, digest_size=16).hexdigest(), texts, at=at)
        if isinstance(value, str) and value.strip():
            name = _file_name(self.folder, value.strip())
            return PairRow(place, path_of(self.folder, name, self.options, where=place), texts)
        if at:
            return PairRow(place, problem=MISSING_FILE, detail="no image in this row")
        return PairRow(place, problem=MALFORMED_ROW, detail=f"no image path in {self.image!r}")


def open_table(path: Path, options: SourceOptions) -> PairSource:
    """Read the head of a table to find its columns.

    Raises:
        UserError: It is empty or unreadable, columns are not found, or none of its first images exists.
    """
    head, image, captions = find_columns(path, options)
    columns = Columns(image, captions, options.images.absolute() if options.images else path.parent, options)
    names = [row[image].strip() for row in head if isinstance(row.get(image), str)]
    if names and sum(bool(URL.match(name)) for name in names) > len(names) / 2:
        raise UserError(has_urls(str(path), image))
    if names and not any(_is_file(columns.folder / _file_name(columns.folder, name)) for name in names):
        raise UserError(
            f"None of the first {len(names)} images of {path}, such as {shortened(names[0])}, exists in "
            f"{columns.folder}: name with --images the folder that the paths in column {image!r} start from."
        )
    note = columns.description
    if splits := head[0].get(_SPLITS):
        note += f"; split {options.split or 'train'} of {splits} (--split a,b chooses others)"
    rows = (
        row if isinstance(row, PairRow) else columns.row(place, row)
        for place, row in _read(path, options, images=(image, columns.folder))
    )
    about = {"kind": "table", "image": image, "caption": list(captions)}
    return PairSource(about, rows, columns.folder, read_image, notes=(note,))


def find_columns(path: Path, options: SourceOptions) -> tuple[list[Mapping[str, Any]], str, tuple[str, ...]]:
    """The first rows of a table, and its columns of images and captions; errors as for `open_table`."""
    head = [row for _, row in itertools.islice(_read(path, options), _HEAD) if isinstance(row, Mapping)]
    if not head:
        raise UserError(f"{path} has no row that can be read: it must be UTF-8 text with a line of column names (CSV, "
                        "TSV), one JSON object a line (JSONL), or a JSON list of objects.")  # fmt: skip
    names = list(dict.fromkeys(name for row in head for name in row))
    is_text = path.suffix.lower() in (".csv", ".tsv", ".txt", ".token") and not options.header
    note = "If the table has no line of names, give them: --header image,caption." if is_text else ""
    return head, *choose_columns(names, options, where=str(path), note=note)


def _file_name(folder: Path, name: str) -> str:
    """The name of an image's file, without the number of the caption that Flickr's lists append: `dog.jpg#0`."""
    numbered = re.fullmatch(r"(.+\.\w{3,5})#\d+", name)
    return numbered[1] if numbered and not _is_file(folder / name) else name


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long for a name, or with a zero byte
        return False


def _read(path: Path, options: SourceOptions, *, images: tuple[str, Path] | None = None) -> Read:
    """The rows of a table. With the column of images and their folder, quotes are checked as well."""
    suffix, mark = path.suffix.lower(), ":"
    rows: Any
    if suffix == ".json":
        tree = json_tree(path)
        rows, mark = (json_lines(path), ":") if tree is None else (_tree_rows(path, tree, options), " ")
    elif suffix in (".jsonl", ".ndjson"):
        rows = json_lines(path)
    else:
        names, rows = separated_values(
            path,
            delimiters="\t" if suffix == ".tsv" else "\t;|,",
            header=options.header,
            identifies=images and (images[0], lambda name: _is_file(images[1] / _file_name(images[1], name))),
        )
        if twice := sorted(name for name in set(names) if name and names.count(name) > 1):
            raise UserError(
                f"{path} has several columns called {twice[0]!r}: rename all but one of them in its first line."
            )
    for number, row in rows:
        place = f"{path.name}{mark}{number}"
        yield place, PairRow(place, problem=MALFORMED_ROW, detail=row) if isinstance(row, str) else row


def _tree_rows(path: Path, tree: Any, options: SourceOptions) -> Iterator[tuple[str, Any]]:
    """The rows of a JSON value with their places in it; a text says what is wrong with its row."""
    fields: Any = tree if isinstance(tree, dict) else {}
    images, annotations = fields.get("images"), fields.get("annotations")
    if _are_objects(images) and not _are_objects(annotations) and any("sentences" in item for item in images):
        yield from _karpathy(path, images, options)
        return
    refuse_split(options, f"{path}, which names no splits")
    if _are_objects(images) and _are_objects(annotations):
        if not any("caption" in item for item in annotations):
            raise UserError(f"The annotations in {path} have no captions: take captions_*.json, not instances_*.json.")
        yield from _coco(path.name, images, annotations)
        return
    for name, row in json_items(path, tree, keys=(*IMAGE_NAMES, *URL_NAMES), values=CAPTION_NAMES):
        yield f"[{shortened(name) if isinstance(name, str) else name}]", row


def _are_objects(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, dict) for item in items)


def _karpathy(path: Path, images: list[dict[str, Any]], options: SourceOptions) -> Iterator[tuple[str, Any]]:
    """Andrej Karpathy's splits of COCO and Flickr, of which training takes `train` unless others are named."""
    splits = list(dict.fromkeys(str(image.get("split")) for image in images))
    wanted = options.split.split(",") if options.split else ["train"] if "train" in splits else splits
    if unknown := [name for name in wanted if name not in splits]:
        raise UserError(f"{path} has no split {unknown[0]!r}: choose with --split. It has: {', '.join(splits)}.")
    for number, image in enumerate(images):
        if str(image.get("split")) in wanted:
            file = "/".join(str(image[name]) for name in ("filepath", "filename") if image.get(name))
            row = {"image": file, "caption": image.get("sentences"), _SPLITS: ", ".join(splits)}
            yield f"images[{number}]", row


def _coco(name: str, images: list[dict[str, Any]], annotations: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The images of COCO's annotations, each with all of its captions; last, annotations without an image."""
    ids = Counter(_id(image.get("id")) for image in images)
    captions: dict[Any, list[Any]] = {key: [] for key in ids}
    lost = []
    for number, annotation in enumerate(annotations):
        if (key := _id(annotation.get("image_id"))) in captions:
            captions[key].append(annotation.get("caption"))
        else:
            lost.append((f"annotations[{number}]", f"no image has the id {shortened(str(annotation.get('image_id')))}"))
    for number, image in enumerate(images):
        key = _id(image.get("id"))
        twice = f"{ids[key]:,} images have the id {shortened(str(key))}" if ids[key] > 1 else ""
        yield f"images[{number}]", twice or {"file_name": image.get("file_name"), "caption": captions[key]}
    for place, detail in lost:
        yield place, PairRow(f"{name} {place}", problem=MISSING_FILE, detail=detail)


def _id(value: Any) -> Any:
    """An id as a key; one that is a list or a mapping, as text."""
    return repr(value) if isinstance(value, list | dict) else value
