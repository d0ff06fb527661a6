"""Rows of tables that are text (CSV, TSV, JSON lines, one JSON value), for downloads and for `neuclip pairs`.

They are parsed here and not by pyarrow or `datasets`, so that a malformed row has a number, and costs no other.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa

from pipeline.errors import UserError
from pipeline.files import distinct_names, other_encoding

Rows = Iterator[tuple[int | str, dict[str, Any] | str]]
"""Number of the line or item, or the key of the item, and the row; of an unreadable one, what is wrong with it."""


def open_text(path: Path) -> TextIO:
    """Open a text file, perhaps a compressed one. A byte that is not UTF-8 becomes a surrogate, for its row's sake.

    Raises:
        UserError: It is UTF-16 or UTF-32.
    """
    with pa.input_stream(path) as file:
        if wrong := other_encoding(file.read(4)):
            raise UserError(f"{path} {wrong}")
    return io.TextIOWrapper(pa.input_stream(path), encoding="utf-8-sig", errors="surrogateescape", newline="")


def json_lines(path: Path) -> Rows:
    """The objects of a file with one a line."""
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, _object(json.loads(line, object_pairs_hook=distinct_names))
            except (ValueError, RecursionError) as error:
                yield number, f"not JSON: {error}"


def _object(item: Any) -> dict[str, Any] | str:
    return item if isinstance(item, dict) else f"a {type(item).__name__}, not an object"


def json_items(path: Path, tree: Any, *, key: str, value: str, is_columnar: bool) -> Rows:
    """The rows of a list of objects, of a mapping of keys to values or objects, or of one of columns to lists.

    Args:
        path: The file, for messages.
        tree: Its contents.
        key: Column of the keys of a mapping.
        value: Column of its values, where they are no objects.
        is_columnar: Whether a mapping is one of columns.

    Raises:
        UserError: It is neither, or the columns differ in length.
    """
    items: Any = enumerate(tree) if isinstance(tree, list) else ()
    if isinstance(tree, dict) and is_columnar:
        sizes = {name: len(column) for name, column in tree.items()}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name[:60]} {size:,}" for name, size in list(sizes.items())[:10])
            raise UserError(f"{path} has columns of different lengths, so that no row is certain: {listed}.")
        items = enumerate(dict(zip(tree, row, strict=True)) for row in zip(*tree.values(), strict=True))
    elif isinstance(tree, dict):
        rows = ({key: name, **(item if isinstance(item, dict) else {value: item})} for name, item in tree.items())
        items = zip(tree, rows, strict=True)
    yield from ((place, _object(item)) for place, item in items)


def separated_values(
    path: Path,
    *,
    delimiter: str,
    quotes: bool = True,
    header: Sequence[str] = (),
    needed: Sequence[str] = (),
    identifies: tuple[str, Callable[[str], bool]] | None = None,
) -> tuple[list[str], Rows]:
    """The names of the columns of a CSV or TSV file, and its rows.

    Args:
        path: The file.
        delimiter: Between fields.
        quotes: Whether quotes surround fields with delimiters or line breaks.
        header: Names of all columns, if the first line has none.
        needed: If the first line has all of these names, it is a line of names after all.
        identifies: A column, and what tells its values from text. A row of several lines with such values was made by a
            quote that is not closed, and raises UserError: the text of other rows would become part of a value.
    """
    csv.field_size_limit(1 << 24)
    form: Any = {"delimiter": delimiter, "quoting": csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE}
    first = [name.strip() for name in next(csv.reader(first_lines(path), **form), [])]
    has_names = not header or (bool(needed) and set(needed) <= set(first))
    names = first if has_names else list(header)
    return names, _separated(path, form, names, has_names=has_names, identifies=identifies)


def _separated(
    path: Path,
    form: Any,
    names: list[str],
    *,
    has_names: bool,
    identifies: tuple[str, Callable[[str], bool]] | None,
) -> Rows:
    lines: list[str] = []

    def remembered(file: TextIO) -> Iterator[str]:
        for line in file:
            lines.append(line)
            yield line

    with open_text(path) as file:
        reader = csv.reader(remembered(file), **form)
        if has_names:
            next(reader, None)
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
            if identifies is not None and len(lines) > 1:
                place = names.index(identifies[0])
                # From both ends, because quotes are not regarded.
                _check_quotes(path, lines, number, form["delimiter"], (place, place - len(names)), identifies[1])
            if fields and len(fields) != len(names):
                problem = f"{len(fields)} fields instead of {len(names)}"
            if problem:
                yield number, problem
            elif fields:
                yield number, dict(zip(names, fields, strict=True))


def _check_quotes(
    path: Path,
    lines: Sequence[str],
    number: int,
    delimiter: str,
    places: Sequence[int],
    is_value: Callable[[str], bool],
) -> None:
    count = 0
    for line in lines:
        fields = line.strip("\r\n").split(delimiter)
        at = [i for i in places if -len(fields) <= i < len(fields)] if len(fields) > 1 else []
        count += any(is_value(fields[i].strip().strip('"')) for i in at)  # a line of one field may be part of a text
    if count > 1:
        raise UserError(
            f"{path}: a quote is not closed in the row that begins at line {number:,}, which would swallow "
            f"{len(lines) - 1:,} lines. Close it, double the quotes inside values, or give the table in a form that "
            "needs no quotes: JSONL or parquet."
        )


def first_lines(path: Path) -> list[str]:
    """The first twenty lines of a text file."""
    with open_text(path) as file:
        return list(itertools.islice(file, 20))
