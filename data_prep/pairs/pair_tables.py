"""Tables of image files: CSV, TSV, JSONL, and JSON (lists, mappings, columns, COCO's captions, Karpathy's splits)."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
    PairOptions,
    captions_in,
    choose_columns,
    has_urls,
    read_image,
    shortened,
)
from data_prep.sources.text_rows import json_items, json_lines, json_tree, separated_values
from pipeline.errors import UserError

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
_HEAD = 100
"""Rows that columns are found in."""
_SPLITS = "\0splits"
"""Field of a row of Karpathy's splits: the names of all. No table has a column of this name."""

Read = Iterator[tuple[str, Mapping[str, Any] | PairRow]]
"""Place and row; an unreadable row is a `PairRow` with its problem."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table, and the folder that paths in it start from."""

    image: str
    captions: tuple[str, ...]
    folder: Path
    options: PairOptions

    def source(self, about: Mapping[str, Any], rows: Iterator[PairRow], read: Callable[[PairRow], bytes],
               *, split: str = "") -> PairSource:  # fmt: skip
        """The source with these columns."""
        about = {**about, "image": self.image, "caption": list(self.captions)}
        note = f"images: {self.image}; captions: {', else '.join(self.captions)}"
        return PairSource(about, rows, self.folder, read, notes=(note,), split=split)

    def row(self, place: str, values: Mapping[str, Any], at: tuple[int, ...] = ()) -> PairRow:
        """A row as listed; `at` says where it is if it holds the image itself. Refuses URLs, and paths that lead out of
        the folder: tables are shared."""
        value, folder = values.get(self.image), self.folder
        texts = next(filter(None, (captions_in(values.get(name)) for name in self.captions)), ())
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if at and isinstance(value, bytes | bytearray):
            return PairRow(place, hashlib.blake2b(value, digest_size=16).hexdigest(), texts, at=at)
        if not (isinstance(value, str) and (value := value.strip())):
            if at:
                return PairRow(place, problem=MISSING_FILE, detail="no image in this row")
            return PairRow(place, problem=MALFORMED_ROW, detail=f"no image path in {self.image!r}")
        if URL.match(name := _file_name(folder, value)):
            raise UserError(has_urls(place, self.options.image or "image"))
        path = os.path.normpath(os.path.join(folder, name))
        if not (self.options.allow_outside or path.startswith(os.path.join(os.path.abspath(folder), ""))):
            raise UserError(
                f"{place} names {shortened(name)}, which is not in {folder}: name the folder of the images with "
                "--images, or take them from anywhere with --allow-outside, if you trust the table."
            )
        return PairRow(place, path, texts)


def open_table(path: Path, options: PairOptions) -> PairSource:
    """Read the head of a table to find its columns.

    Raises:
        UserError: It is empty or unreadable, columns are not found, or none of its first images exists.
    """
    head, image, captions = find_columns(path, options)
    columns = Columns(image, captions, options.images.absolute() if options.images else path.parent, options)
    names = [row[image].strip() for row in head if isinstance(row.get(image), str)]
    if names and sum(bool(URL.match(name)) for name in names) > len(names) / 2:
        raise UserError(has_urls(str(path), image))
    if names and not any(_is_image(columns.folder, name) for name in names):
        raise UserError(
            f"None of the first {len(names)} images of {path}, such as {shortened(names[0])}, exists in "
            f"{columns.folder}: name with --images the folder that the paths in column {image!r} start from."
        )
    splits = head[0].get(_SPLITS)
    split = f"{options.split or 'train'} of {splits} (--split a,b chooses others)" if splits else ""
    rows = (
        row if isinstance(row, PairRow) else columns.row(place, row)
        for place, row in _read(path, options, images=(image, columns.folder))
    )
    return columns.source({"kind": "table"}, rows, read_image, split=split)


def find_columns(path: Path, options: PairOptions) -> tuple[list[Mapping[str, Any]], str, tuple[str, ...]]:
    """The first rows of a table, and its columns of images and captions.

    Raises:
        UserError: It is empty or unreadable, or columns are not found.
    """
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
    return numbered[1] if numbered and not os.path.isfile(folder / name) else name


def _is_image(folder: Path, name: str) -> bool:
    return os.path.isfile(folder / _file_name(folder, name))


def _read(path: Path, options: PairOptions, *, images: tuple[str, Path] | None = None) -> Read:
    """The rows of a table. With the column of images and their folder, quotes are checked as well."""
    suffix, mark = path.suffix.lower(), ":"
    tree = json_tree(path) if suffix == ".json" else None
    rows: Any
    if tree is not None:
        rows, mark = _tree_rows(path, tree, options), " "
    elif suffix in (".json", ".jsonl", ".ndjson"):
        rows = json_lines(path)
    else:
        names, rows = separated_values(
            path,
            delimiters="\t" if suffix == ".tsv" else "\t;|,",
            header=options.header,
            identifies=images and (images[0], lambda name: _is_image(images[1], name)),
        )
        if twice := sorted(name for name in set(names) if name and names.count(name) > 1):
            raise UserError(
                f"{path} has several columns called {twice[0]!r}: rename all but one of them in its first line."
            )
    for number, row in rows:
        place = f"{path.name}{mark}{number}"
        yield place, PairRow(place, problem=MALFORMED_ROW, detail=row) if isinstance(row, str) else row


def _tree_rows(path: Path, tree: Any, options: PairOptions) -> Iterator[tuple[str, Any]]:
    """The rows of a JSON value with their places in it; a text says what is wrong with its row."""
    fields: Any = tree if isinstance(tree, dict) else {}
    images, annotations = (
        items if isinstance(items := fields.get(name), list) and all(isinstance(item, dict) for item in items) else None
        for name in ("images", "annotations")
    )
    if images is not None and annotations is not None:
        if not any("caption" in item for item in annotations):
            raise UserError(f"The annotations in {path} have no captions: take captions_*.json, not instances_*.json.")
        yield from _coco(path.name, images, annotations)
    elif images and any("sentences" in item for item in images):
        yield from _karpathy(path, images, options)
    else:
        for name, row in json_items(path, tree, keys=(*IMAGE_NAMES, *URL_NAMES), values=CAPTION_NAMES):
            yield f"[{shortened(name) if isinstance(name, str) else name}]", row


def _karpathy(path: Path, images: list[dict[str, Any]], options: PairOptions) -> Iterator[tuple[str, Any]]:
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

    def id_of(value: Any) -> Any:
        return repr(value) if isinstance(value, list | dict) else value

    ids = Counter(id_of(image.get("id")) for image in images)
    captions: dict[Any, list[Any]] = {key: [] for key in ids}
    lost = []
    for number, annotation in enumerate(annotations):
        if (key := id_of(annotation.get("image_id"))) in captions:
            captions[key].append(annotation.get("caption"))
        else:
            place = f"annotations[{number}]"
            detail = f"no image has the id {shortened(str(annotation.get('image_id')))}"
            lost.append((place, PairRow(f"{name} {place}", problem=MISSING_FILE, detail=detail)))
    for number, image in enumerate(images):
        key = id_of(image.get("id"))
        twice = f"{ids[key]:,} images have the id {shortened(str(key))}" if ids[key] > 1 else ""
        yield f"images[{number}]", twice or {"file_name": image.get("file_name"), "caption": captions[key]}
    yield from lost
