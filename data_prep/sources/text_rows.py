"""Rows of tables that are text (CSV, TSV, JSON), for downloads and for `neuclip pairs`.

They are parsed here because the readers of `datasets` and pyarrow fail for a whole file where a line has a field too
many, is no JSON or is not UTF-8, change texts (`007` becomes 7, `NA` nothing), and know no numbers of lines.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
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


def first_lines(path: Path) -> list[str]:
    """The first twenty lines of a text file."""
    with open_text(path) as file:
        return list(itertools.islice(file, 20))


def json_lines(path: Path) -> Rows:
    """The objects of a file with one a line."""
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield number, _object(json.loads(line, object_pairs_hook=distinct_names))
                except (ValueError, RecursionError) as error:
                    yield number, f"not JSON: {error}"


def _object(item: Any) -> dict[str, Any] | str:
    return item if isinstance(item, dict) else f"a {type(item).__name__}, not an object"


def json_tree(path: Path) -> Any:
    """The value of a JSON file, read whole (118,000 images of COCO take 0.5 GB); None if it has one object a line.

    Raises:
        UserError: It is not JSON, or an object has a name twice.
    """
    first, *others = [line for line in first_lines(path) if line.strip()] or [""]
    with contextlib.suppress(ValueError, RecursionError):
        if others and isinstance(json.loads(first), dict):
            return None
    try:
        with open_text(path) as file:
            return json.load(file, object_pairs_hook=distinct_names)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}).") from error


def json_items(path: Path, tree: Any, *, keys: Collection[str], values: Collection[str]) -> Rows:
    """The rows of a JSON value: a list of objects, columns by name, or keys with their values or objects.

    Args:
        path: The file, for messages.
        tree: The value.
        keys: Names of columns of keys (images, URLs), the first of which the keys of a mapping get.
        values: Those of captions. A mapping with names of both kinds has columns: lists, or values by row as pandas
            writes them.

    Raises:
        UserError: Columns differ in length.
    """
    if not isinstance(tree, dict):
        yield from ((place, _object(item)) for place, item in enumerate(tree if isinstance(tree, list) else [tree]))
        return
    names = {name.lower() for name in tree}
    if not (names & {name.lower() for name in keys} and names & {name.lower() for name in values}):
        for key, item in tree.items():
            yield key, {next(iter(keys)): key, **(item if isinstance(item, dict) else {next(iter(values)): item})}
        return
    columns = list(tree.values())
    if all(isinstance(column, dict) and column.keys() == columns[0].keys() for column in columns):
        columns = [[column[row] for row in columns[0]] for column in columns]
    if not all(isinstance(column, list) for column in columns):
        yield 0, tree
        return
    if len({len(column) for column in columns}) > 1:
        sizes = ", ".join(f"{name[:60]} {len(column):,}" for name, column in itertools.islice(tree.items(), 10))
        raise UserError(f"{path} has columns of different lengths, so that no row is certain: {sizes}.")
    yield from enumerate(dict(zip(tree, row, strict=True)) for row in zip(*columns, strict=True))


def separated_values(
    path: Path,
    *,
    delimiters: str,
    quotes: bool = True,
    header: Sequence[str] = (),
    needed: Collection[str] = (),
    identifies: tuple[str, Callable[[str], bool]] | None = None,
) -> tuple[list[str], Rows]:
    """The names of the columns of a CSV or TSV file, and its rows.

    Args:
        path: The file.
        delimiters: What may be between fields: by it, most of the first rows have as many fields as the first of them,
            or as `header`.
        quotes: Whether quotes surround fields with delimiters or line breaks.
        header: Names of all columns, if the first line has none.
        needed: If the first line has all of these names, it is a line of names after all.
        identifies: A column, and what tells its values from text. A row of several lines with such values was made by a
            quote that is not closed, and raises UserError: the text of other rows would become part of a value.
    """
    csv.field_size_limit(1 << 24)
    form: dict[str, Any] = {"quoting": csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE}
    head = [line[: 1 << 19] for line in first_lines(path)]  # shorter than the limit
    widths = {mark: [len(row) for row in csv.reader(head, delimiter=mark, **form) if row] for mark in delimiters}

    def agreement(mark: str) -> tuple[int, list[int]]:
        wide = len(header) or next(iter(widths[mark]), 0)
        return widths[mark].count(wide) if wide > 1 else 0, widths[mark][:1]

    form["delimiter"] = delimiter = max(delimiters, key=agreement)
    first = [name.strip() for name in next(csv.reader(head, **form), [])]
    has_names = not header or (bool(needed) and set(needed) <= set(first))
    names = first if has_names else list(header)

    def rows() -> Rows:
        lines: list[str] = []
        with open_text(path) as file:
            reader = csv.reader((lines.append(line) or line for line in file), **form)  # type: ignore[func-returns-value]
            if has_names:
                next(reader, None)
            while True:
                number, fields, problem = reader.line_num + 1, list[str](), ""
                lines.clear()
                try:
                    fields = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    problem = str(error)
                if identifies and len(lines) > 1 and _values_in(lines, names, delimiter, *identifies) > 1:
                    raise UserError(
                        f"{path}: a quote is not closed in the row that begins at line {number:,}, which would swallow "
                        f"{len(lines) - 1:,} lines. Close it, double the quotes inside values, or give the table in a "
                        "form that needs no quotes: JSONL or parquet."
                    )
                if fields and len(fields) != len(names):
                    problem = f"{len(fields)} fields instead of {len(names)}"
                if problem or fields:
                    yield number, problem or dict(zip(names, fields, strict=True))

    return names, rows()


def _values_in(lines: list[str], names: list[str], delimiter: str, column: str, is_value: Callable[[str], bool]) -> int:
    """How many lines would have a value in the column if quotes meant nothing, counted from either end."""
    places, count = (names.index(column), names.index(column) - len(names)), 0
    for line in lines:
        fields = line.strip("\r\n").split(delimiter)
        some = [fields[i] for i in places if -len(fields) <= i < len(fields)]
        # A line of one field may be part of a text.
        count += len(fields) > 1 and any(is_value(field.strip().strip('"')) for field in some)
    return count
