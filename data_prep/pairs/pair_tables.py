"""Tables of image files: CSV, TSV, JSONL, and JSON (`json_tables`)."""

from __future__ import annotations

import contextlib
import csv
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.pairs.json_tables import SPLITS, Read, tree_rows
from data_prep.pairs.listing import PairRow
from data_prep.pairs.pair import (
    MALFORMED_ROW,
    URL,
    SourceOptions,
    captions_in_first,
    choose_columns,
    has_urls,
    path_of,
    shortened,
)
from data_prep.sources.text_rows import first_lines, json_lines, separated_values
from pipeline.errors import UserError

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
_DELIMITERS = ",\t;|"
_HEAD, _NEAR = 100, 1_000
"""Rows that columns are found in, and folders that are tried for their images."""
_NUMBERED = re.compile(r"(.+\.\w{3,5})#(\d+)$")


@dataclass(frozen=True)
class PairTable:
    """A table on this machine, and where its image paths start."""

    path: Path
    options: SourceOptions
    image: str
    captions: tuple[str, ...]
    folder: Path
    note: str = ""
    """What the user should know about how it is read."""

    def rows(self) -> Iterator[PairRow]:
        """Stream every row of the table."""
        for place, row in _read(self.path, self.options, table=self):
            if isinstance(row, PairRow):
                yield row
                continue
            name = row.get(self.image)
            if not isinstance(name, str) or not name.strip():
                yield PairRow(place, problem=MALFORMED_ROW, detail=f"no image path in {self.image!r}")
                continue
            path = path_of(self.folder, _file_name(self.folder, name.strip()), self.options, where=place)
            yield PairRow(place, path, captions_in_first(row, self.captions))


def open_table(path: Path, options: SourceOptions) -> PairTable:
    """Read the head of a table to find its columns, and where its images are.

    Raises:
        UserError: It is empty or unreadable, columns or images are not found, or the images are URLs.
    """
    head, image, captions = find_columns(path, options)
    names = [row[image].strip() for row in head if isinstance(row.get(image), str)]
    if names and sum(bool(URL.match(name)) for name in names) > len(names) / 2:
        raise UserError(has_urls(str(path), image))
    note = f"images: {image}; captions: {', else '.join(captions)}"
    if splits := head[0].get(SPLITS):
        note += f"; split {options.split or 'train'} of {splits} (--split a,b chooses others)"
    return PairTable(path, options, image, captions, _folder_of(path, names, image, options), note)


def find_columns(path: Path, options: SourceOptions) -> tuple[list[Mapping[str, Any]], str, tuple[str, ...]]:
    """The first rows of a table, and its columns of images and captions; errors as for `open_table`."""
    head = [row for _, row in itertools.islice(_read(path, options), _HEAD) if isinstance(row, Mapping)]
    if not head:
        raise UserError(f"{path} has no row that can be read: it must be UTF-8 text with a line of column names (CSV, "
                        "TSV), one JSON object a line (JSONL), or a JSON list of objects.")  # fmt: skip
    names = list(dict.fromkeys(name for row in head for name in row))
    is_text = path.suffix.lower() in (".csv", ".tsv", ".txt") and not options.header
    note = "If the table has no line of names, give them: --header image,caption." if is_text else ""
    return head, *choose_columns(names, options, where=str(path), note=note)


def _folder_of(path: Path, names: Sequence[str], column: str, options: SourceOptions) -> Path:
    """Where the paths of a table start: the folder that was named, the table's own, or one near it.

    Raises:
        UserError: None has any of the images, or several have.
    """
    own = options.images.absolute() if options.images else path.parent
    tiers = [[own]]
    if not options.images:
        below, beside = ([p for p in one.iterdir() if p.is_dir()][:_NEAR] for one in (path.parent, path.parent.parent))
        tiers += [sorted(below), [path.parent.parent], sorted(beside)]
    if not names:
        return own
    for tier in tiers:
        has = [folder for folder in tier if any(_is_file(folder / _file_name(folder, name)) for name in names)]
        if len(has) == 1:
            return has[0]
        if has:
            break
    what = f"are in several folders, {', '.join(map(str, has[:3]))}" if has else f"do not exist in {own} or near it"
    raise UserError(
        f"The first {len(names)} images of {path}, such as {shortened(names[0])}, {what}: paths in column {column!r} "
        "start from the table's folder, or from the one given by --images."
    )


def _file_name(folder: Path, name: str) -> str:
    """The name of an image's file, without the number of the caption that Flickr8k appends: `dog.jpg#0`."""
    numbered = _NUMBERED.match(name)
    return numbered[1] if numbered and not _is_file(folder / name) else name


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long for a name, or with a zero byte
        return False


def _read(path: Path, options: SourceOptions, *, table: PairTable | None = None) -> Read:
    """The rows of a table. With `table`, quotes are checked as well."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        yield from tree_rows(path, options)
        return
    if suffix in (".jsonl", ".ndjson"):
        rows = json_lines(path)
    else:
        names, rows = separated_values(
            path,
            delimiter="\t" if suffix == ".tsv" else _delimiter(first_lines(path)),
            header=options.header,
            identifies=None if table is None else (table.image, lambda name: _is_file(table.folder / name)),
        )
        if twice := sorted(name for name in set(names) if name and names.count(name) > 1):
            raise UserError(
                f"{path} has several columns called {twice[0]!r}: rename all but one of them in its first line."
            )
    for number, row in rows:
        place = f"{path.name}:{number}"
        yield place, PairRow(place, problem=MALFORMED_ROW, detail=row) if isinstance(row, str) else row


def _delimiter(lines: Sequence[str]) -> str:
    """The delimiter that splits most of the lines into as many fields as the first, which must be several."""

    def agreement(delimiter: str) -> tuple[int, int]:
        counts = []
        with contextlib.suppress(csv.Error):
            counts += [len(fields) for fields in csv.reader(lines, delimiter=delimiter) if fields]
        return (counts.count(counts[0]) if counts and counts[0] > 1 else 0, lines[0].count(delimiter) if lines else 0)

    return max(_DELIMITERS, key=agreement)
