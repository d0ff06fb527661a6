"""Tables of image files: CSV, TSV, JSONL, and JSON (`json_tables`).

They are parsed here and not by `datasets`, so that a malformed line is one dropped row with its number.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

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
from pipeline.errors import UserError
from pipeline.files import distinct_names, other_encoding

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
_DELIMITERS = ",\t;|"
_GUESSED_FROM = 20
"""Lines that the delimiter is guessed from."""
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

    def names_image(self, line: str, *, delimiter: str, columns: Sequence[str]) -> bool:
        """Whether a line, split without regard to quotes, has one of the images at their place."""
        fields, place = line.strip("\r\n").split(delimiter), columns.index(self.image)
        found = [fields[i] for i in (place, place - len(columns)) if -len(fields) <= i < len(fields)]
        return any(_is_file(self.folder / name.strip().strip('"')) for name in found)


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
    with path.open("rb") as file:
        if wrong := other_encoding(file.read(4)):
            raise UserError(f"{path} {wrong}")
    suffix = path.suffix.lower()
    if suffix == ".json":
        yield from tree_rows(path, options)
        return
    # An invalid byte should affect one row only: it becomes a surrogate, and the row is dropped with a reason.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = _json_rows(file) if suffix in (".jsonl", ".ndjson") else _csv_rows(file, path, options.header, table)
        for number, row in rows:
            place = f"{path.name}:{number}"
            yield place, PairRow(place, problem=MALFORMED_ROW, detail=row) if isinstance(row, str) else row


def _json_rows(file: TextIO) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=distinct_names)
        except (ValueError, RecursionError) as error:
            yield number, f"not JSON: {error}"
            continue
        yield number, row if isinstance(row, dict) else f"a {type(row).__name__}, not an object"


def _csv_rows(
    file: TextIO, path: Path, header: Sequence[str], table: PairTable | None
) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Line number and row; a row with a wrong number of fields is its description.

    Raises:
        UserError: A quote that is never closed makes one row of several.
    """
    csv.field_size_limit(1 << 24)
    head = list(itertools.islice(file, _GUESSED_FROM))
    file.seek(0)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else _delimiter(head)
    lines: list[str] = []

    def noted() -> Iterator[str]:
        for line in file:
            lines.append(line)
            yield line

    reader = csv.reader(noted(), delimiter=delimiter)
    names = list(header) if header else [name.strip() for name in next(reader, [])]
    if twice := sorted(name for name in set(names) if name and names.count(name) > 1):
        raise UserError(
            f"{path} has several columns called {twice[0]!r}: rename all but one of them in its first line."
        )
    while True:
        number = reader.line_num + 1
        lines.clear()
        fields, problem = list[str](), ""
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            problem = str(error)
        if table is not None and len(lines) > 1:
            _check_quotes(lines, number, table, delimiter=delimiter, columns=names)
        if fields and len(fields) != len(names):
            problem = f"{len(fields)} fields instead of {len(names)}"
        if problem:
            yield number, problem
        elif fields:
            yield number, dict(zip(names, fields, strict=True))


def _delimiter(lines: Sequence[str]) -> str:
    """The delimiter that splits most of the lines into as many fields as the first, which must be several."""

    def agreement(delimiter: str) -> tuple[int, int]:
        counts = []
        with contextlib.suppress(csv.Error):
            counts += [len(fields) for fields in csv.reader(lines, delimiter=delimiter) if fields]
        return (counts.count(counts[0]) if counts and counts[0] > 1 else 0, lines[0].count(delimiter) if lines else 0)

    return max(_DELIMITERS, key=agreement)


def _check_quotes(lines: list[str], number: int, table: PairTable, *, delimiter: str, columns: Sequence[str]) -> None:
    """Refuse a row with the images of several rows: the others' text would become part of its caption.

    Raises:
        UserError: It has.
    """
    named = (line for line in lines if table.names_image(line, delimiter=delimiter, columns=columns))
    if len(list(itertools.islice(named, 2))) == 2:
        raise UserError(
            f"{table.path}: a quote is not closed in the row that begins at line {number:,}, which would swallow "
            f"{len(lines) - 1:,} lines. Close it, double the quotes inside values, or give the table as JSONL."
        )
