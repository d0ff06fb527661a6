"""Quotes that are never closed in CSV files: the reader then treats the following lines as one value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.files import text_lines

_URL = re.compile(r"^\s*\"?[a-z][a-z0-9+.-]*://", re.IGNORECASE)


class QuoteCheck:
    """Looks for values that hold whole further records, with a URL at the place of the URL.

    Args:
        path: The file, for messages.
        names: All columns in order.
        url: The column of the URLs.
    """

    def __init__(self, path: Path, names: list[str], url: str) -> None:
        self._path, self._columns, self._url = path, len(names), names.index(url)
        self._records = 0

    def check(self, batch: Any) -> None:
        """Check the values of all columns, which are binary.

        Raises:
            UserError: A value holds a record.
        """
        import pyarrow.compute as pc

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
        return fits and bool(_URL.match(fields[where]))
