"""Columns of URL tables as the plan needs them: text as UTF-8, boxes and kept columns in one type for all files.

Also CSV and TSV files as streams of record batches, and quotes in them that are never closed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from data_prep.settings.source_config import SourceConfig
from pipeline.errors import UserError
from pipeline.files import text_lines


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
            column = _whole_numbers(column)
        if kind != pa.string() or not is_text(column.type):
            if pa.types.is_nested(column.type):
                column.validate(full=True)  # else text inside that is not UTF-8 is an error wherever it is used
            return column if column.type == kind else column.cast(kind)
        # Parquet and Arrow do not check that a string column is UTF-8; only the conversion from bytes does.
        raw = column.cast(pa.large_binary())
        try:
            return raw.cast(pa.large_string()).cast(pa.string())
        except pa.ArrowInvalid:
            values = [_decoded(value, place, good) for place, value in enumerate(raw.to_pylist())]
            return pa.array(values, pa.string())
    except pa.ArrowException as error:
        raise UserError(f"{what} is of type {column.type}, which cannot be used as {kind} ({error}).") from error


def _whole_numbers(column: Any) -> Any:
    """Ids that became floats in a table with missing values, as integers again; other floats as they are.

    NaN, which pandas writes where a value is missing, becomes null.
    """
    column = pc.if_else(pc.is_nan(column), None, column)
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid:
        return column


def _decoded(value: bytes | None, place: int, good: np.ndarray) -> str | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        good[place] = False
        return None


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
    twice = sorted({name for name in columns if present.count(name) > 1})
    if twice:
        raise UserError(
            f"{where} has several columns named {', '.join(map(repr, twice))}: rename or remove all but one."
        )
    missing = [name for name in columns if name not in present]
    if missing:
        raise UserError(
            f"{where} has no column {', '.join(map(repr, missing))}. Its columns are {', '.join(map(repr, present))}. "
            "Set source.url, source.caption, source.uid, source.hash or source.keep to these names, or source.header "
            "to the names of all columns if the first line is a row."
        )


URL = re.compile(r"^\s*\"?[a-z][a-z0-9+.-]*://", re.IGNORECASE)


class QuoteCheck:
    """Looks for values that hold whole further records, with a URL at the place of the column `url`."""

    def __init__(self, path: Path, names: list[str], url: str) -> None:
        self._path, self._columns, self._url = path, len(names), names.index(url)
        self._records = 0

    def check(self, batch: Any) -> None:
        """Check the values of all columns, which are binary.

        Raises:
            UserError: A value holds a record.
        """
        for place, column in enumerate(batch.columns):
            suspects = pc.indices_nonzero(pc.fill_null(pc.match_substring_regex(column, "[\r\n]"), False)).to_pylist()
            for row in suspects:
                self.check_text(column[row].as_py().decode(errors="replace"), place, row=row)
        self._records += batch.num_rows

    def check_text(self, text: str, place: int = 0, *, row: int = 0) -> None:
        """The same for one value in the column at `place`, or for a whole line that could not be split."""
        first, *rest = text_lines(text.strip()) or [""]
        held = any(self._is_record(line, 0) for line in rest) or (place < self._url and self._is_record(first, place))
        if rest and (held or place == self._url):  # a URL never holds a line break
            raise UserError(
                f"{self._path}: a quote is not closed about record {self._records + row + 1:,}: the value that begins "
                f"with {text[:60]!r} would swallow {len(rest):,} lines. Close it, double the quotes inside values, or "
                "give the table as TSV or parquet, which need no quotes."
            )

    def _is_record(self, line: str, start: int) -> bool:
        fields = line.split(",")
        where = self._url - start
        # At least two fields, because a line of a caption may be nothing but a URL.
        fits = 0 <= where < len(fields) and 2 <= len(fields) <= self._columns - start
        return fits and bool(URL.match(fields[where]))


# More lines with a wrong number of fields than this share mean that the settings are wrong, or the file is damaged.
_ODD_SHARE = 0.1


def separated_values(
    path: Path, source: SourceConfig, kind: str, *, on_skipped: Callable[[int], None]
) -> Iterator[Any]:
    """CSV with quotes; TSV without, because captions hold unbalanced ones. All columns are read as bytes.

    Lines with a wrong number of fields are left out and counted, unless they are too many to be accidents.
    """
    skipped = 0
    first: Any = None

    def leave_out(line: Any) -> str:
        nonlocal skipped, first
        skipped, first = skipped + 1, first or line
        if kind == "csv" and line.text and len(text_lines(line.text)) > 1:
            suspects.append(line.text)
        return "skip"

    suspects: list[str] = []
    if source.header and _has_header(path, source, kind):
        source = replace(source, header=())
    names = list(source.header) or list(_reader(path, source, kind, on_invalid=lambda line: "skip").schema.names)
    need_columns(columns_of(source), names, str(path))
    quotes, good = QuoteCheck(path, names, source.url), 0
    for batch in _reader(path, source, kind, on_invalid=leave_out, as_bytes=names):
        if kind == "csv":
            quotes.check(batch)
        good += batch.num_rows
        yield batch
    for text in suspects:
        quotes.check_text(text)
    if first is not None and skipped > _ODD_SHARE * (good + skipped):
        raise UserError(
            f"{path} cannot be read as {kind}: {skipped:,} of {good + skipped:,} lines have another number of fields "
            f"than {first.expected_columns}, for example {first.actual_columns} in {first.text[:80]!r}. "
            "Set source.format and source.header to what the file holds."
        )
    on_skipped(skipped)


def _has_header(path: Path, source: SourceConfig, kind: str) -> bool:
    """Whether a file begins with a line of the needed names after all, as some copies of CC3M and CC12M do."""
    with pa.input_stream(path) as file:
        line = file.read(1 << 16).decode("utf-8-sig", errors="replace").partition("\n")[0]
    return set(columns_of(source)) <= set(line.strip("\r").split("," if kind == "csv" else "\t"))


def _reader(
    path: Path, source: SourceConfig, kind: str, *, on_invalid: Callable[[Any], str], as_bytes: Iterable[str] = ()
) -> Any:
    """pyarrow's reader of the file; it reads the columns in `as_bytes` as they are, and guesses the types of others."""
    return csv.open_csv(
        path,
        read_options=csv.ReadOptions(column_names=list(source.header) or None, block_size=8 << 20),
        parse_options=csv.ParseOptions(
            delimiter="," if kind == "csv" else "\t",
            quote_char='"' if kind == "csv" else False,
            newlines_in_values=kind == "csv",
            invalid_row_handler=on_invalid,
        ),
        convert_options=csv.ConvertOptions(column_types=dict.fromkeys(as_bytes, pa.binary())),
    )
