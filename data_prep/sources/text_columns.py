"""Columns of URL tables as the plan needs them: text as UTF-8, boxes and kept columns in one type for all files."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.download_config import SourceConfig
from data_prep.sources.text_rows import Rows, json_items, json_lines, json_tree, separated_values
from pipeline.errors import UserError

URL = re.compile(r"^\s*[a-z][a-z0-9+.-]*://", re.IGNORECASE)
BATCH_ROWS = 32_768
_PEEKED_ROWS = 1_000
# More unreadable rows than this share mean that the settings are wrong, or the file is damaged.
_ODD_SHARE = 0.1


def normalized(batch: Any, source: SourceConfig, kinds: Mapping[str, Any], where: str) -> tuple[Any, int]:
    """A RecordBatch with its columns in fixed types, of the source and of `kinds`, by name; `where` is for messages.

    Rows whose text is not UTF-8 are left out.

    Returns:
        The batch, and the number of rows left out.

    Raises:
        UserError: A column cannot be converted.
    """
    texts = {source.url, source.caption, source.uid, source.hash}
    good = np.ones(batch.num_rows, dtype=bool)
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        kind = pa.string() if name in texts or is_text(column.type) else kinds.get(name, column.type)
        if name == source.caption and is_list(kinds.get(name)):
            kind = pa.list_(pa.string())
        if name == source.blur:
            kind = pa.list_(pa.list_(pa.float64()))
        columns.append(_converted(column, kind, good, f"Column {name!r} of {where}"))
    batch = pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
    left_out = int(len(good) - good.sum())
    return (batch.filter(pa.array(good)) if left_out else batch), left_out


def is_text(kind: Any) -> bool:
    """Whether a pyarrow type holds strings or bytes."""
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    return inner in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary())


def is_list(kind: Any) -> bool:
    """Whether a pyarrow type, or None, is one of lists."""
    return kind is not None and (pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _converted(column: Any, kind: Any, good: np.ndarray, what: str) -> Any:
    """The column in another type; rows that are not UTF-8 become null, and False in `good`."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        if kind == pa.string() and pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), None, column)  # NaN is what pandas writes where a value is missing,
            with suppress(pa.ArrowInvalid):  # and makes floats of the whole numbers beside it
                column = column.cast(pa.int64())
        if kind != pa.string() or not is_text(column.type):
            if pa.types.is_nested(column.type):
                column.validate(full=True)  # else text inside that is not UTF-8 is an error wherever it is used
            return column if column.type == kind else column.cast(kind)
        # Parquet and Arrow do not check that a string column is UTF-8; only the conversion from bytes does.
        raw = column.cast(pa.large_binary())
        try:
            return raw.cast(pa.large_string()).cast(pa.string())
        except pa.ArrowInvalid:
            values = raw.to_pylist()
            for place, value in enumerate(values):
                try:
                    values[place] = value.decode() if value is not None else None
                except UnicodeDecodeError:
                    values[place], good[place] = None, False
            return pa.array(values, pa.string())
    except pa.ArrowException as error:
        raise UserError(f"{what} is of type {column.type}, which cannot be used as {kind} ({error}).") from error


def first_captions(lists: Any) -> tuple[Any, Any]:
    """The first caption of each list of them, or nothing, and the lists without empty captions."""
    kept = [[text for text in texts or () if text and text.strip()] for texts in lists.to_pylist()]
    return pa.array([texts[0] if texts else "" for texts in kept], pa.string()), pa.array(kept, lists.type)


def columns_of(source: SourceConfig) -> list[str]:
    """The columns to read, in a fixed order."""
    named = [source.url, source.caption, source.uid, source.hash, source.blur, *source.keep]
    return [name for name in named if name]


def need_columns(columns: list[str], present: list[str], where: str) -> None:
    """Check that all `columns` are among `present`.

    Raises:
        UserError: Some are missing, or there are several of one name.
    """
    if twice := sorted({name for name in columns if present.count(name) > 1}):
        raise UserError(
            f"{where} has several columns named {', '.join(map(repr, twice))}: rename or remove all but one."
        )
    if missing := [name for name in columns if name not in present]:
        raise UserError(
            f"{where} has no column {', '.join(map(repr, missing))}. Its columns are {', '.join(map(repr, present))}. "
            "Set source.url, source.caption, source.uid, source.hash or source.keep to these names, or source.header "
            "to the names of all columns if the first line is a row."
        )


def text_batches(path: Path, source: SourceConfig, kind: str, on_skipped: Callable[[int], None]) -> Iterator[Any]:
    """The batches of a text file. Rows that cannot be read are left out, unless they are too many to be accidents."""
    good, bad, example = 0, 0, ""
    rows, columns = _text_rows(path, source, kind), columns_of(source)
    while chunk := list(itertools.islice(rows, BATCH_ROWS)):
        table = [row for _, row in chunk if isinstance(row, dict)]
        example = example or next((f"{place} ({row})" for place, row in chunk if isinstance(row, str)), "")
        if not good and table:
            need_columns(columns, list(dict.fromkeys(name for row in table[:_PEEKED_ROWS] for name in row)), str(path))
        good, bad = good + len(table), bad + len(chunk) - len(table)
        readable = [row for row in table if all(_is_utf8(row.get(name)) for name in columns)]
        on_skipped(len(table) - len(readable))
        if readable:
            yield pa.RecordBatch.from_pydict({name: _array(readable, name, source, path) for name in columns})
    if bad > _ODD_SHARE * (good + bad):
        raise UserError(
            f"{path} cannot be read as {kind}: {bad:,} of {good + bad:,} rows are none, such as {example}. Set "
            "source.format and source.header to what the file holds."
        )
    on_skipped(bad)


def _text_rows(path: Path, source: SourceConfig, kind: str) -> Rows:
    if kind in ("csv", "tsv"):
        names, rows = separated_values(
            path,
            delimiters="," if kind == "csv" else "\t",
            quotes=kind == "csv",  # in TSV, captions hold unbalanced ones
            header=source.header,
            needed=columns_of(source),
            identifies=(source.url, lambda value: bool(URL.match(value))) if kind == "csv" else None,
        )
        need_columns(columns_of(source), names, str(path))
        return rows
    if ".json" not in map(str.lower, path.suffixes) or (tree := json_tree(path)) is None:
        return json_lines(path)
    if isinstance(tree, dict) and not {source.url, source.caption} <= tree.keys() and not all(map(URL.match, tree)):
        raise UserError(
            f"{path} cannot be read as json: it is neither an object a line, nor a list of objects, nor a mapping of "
            "URLs to captions or objects, nor one of names to lists."
        )
    return json_items(path, tree, keys=[source.url], values=[source.caption])


def _is_utf8(value: Any) -> bool:
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError:
        return False
    return True


def _array(rows: list[dict[str, Any]], name: str, source: SourceConfig, path: Path) -> Any:
    """A column of rows, of text if it has no value; refuses values without a common type, and huge numbers."""
    kind = pa.list_(pa.list_(pa.float64())) if name == source.blur else None
    try:
        array = pa.array([row.get(name) for row in rows], kind)
    except (pa.ArrowException, OverflowError) as error:
        raise UserError(
            f"Field {name!r} of {path} has no single type ({error}). Store it as text in every line."
        ) from error
    return pa.nulls(len(rows), pa.string()) if pa.types.is_null(array.type) else array
