"""Columns of URL tables as the plan needs them: text as UTF-8, boxes and kept columns in one type for all files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from data_prep.settings.source_config import SourceConfig
from pipeline.errors import UserError


def normalized(batch: Any, source: SourceConfig, kinds: Mapping[str, Any], where: str) -> tuple[Any, int]:
    """A RecordBatch with its columns in fixed types; rows whose text is not UTF-8 are left out.

    Args:
        batch: Columns of the source, under their own names.
        source: Says which columns are text.
        kinds: Types for the kept columns, by name; others stay as they are.
        where: The file, for messages.

    Returns:
        The batch, and the number of rows left out.

    Raises:
        UserError: A column cannot be converted.
    """
    import pyarrow as pa

    texts = {source.url, source.caption, source.uid, source.hash}
    good = np.ones(batch.num_rows, dtype=bool)
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        kind = pa.string() if name in texts or is_text(column.type) else kinds.get(name, column.type)
        if name == source.blur:
            kind = pa.list_(pa.list_(pa.float64()))
        columns.append(_converted(column, kind, good, f"Column {name!r} of {where}"))
    batch = pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
    left_out = int(len(good) - good.sum())
    return (batch.filter(pa.array(good)) if left_out else batch), left_out


def is_text(kind: Any) -> bool:
    """Whether a pyarrow type holds strings or bytes."""
    import pyarrow as pa

    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(inner) for test in tests) or inner == pa.string_view()


def _converted(column: Any, kind: Any, good: np.ndarray, what: str) -> Any:
    """The column in another type; rows that are not UTF-8 become null, and False in `good`."""
    import pyarrow as pa

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
    import pyarrow as pa
    import pyarrow.compute as pc

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
            "Set source.url, source.caption, source.uid, source.hash or source.keep to these names."
        )
