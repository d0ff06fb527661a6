"""CSV and TSV files as streams of record batches, and quotes in them that are never closed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from data_prep.settings.source_config import SourceConfig
from data_prep.sources.text_columns import columns_of, need_columns
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
        if quotes is not None and line.text and len(text_lines(line.text)) > 1:
            suspects.append(line.text)
        return "skip"

    suspects: list[str] = []
    quotes: QuoteCheck | None = None
    names = list(source.header) or list(_reader(path, source, kind, on_invalid=lambda line: "skip").schema.names)
    need_columns(columns_of(source), names, str(path))
    if kind == "csv":
        quotes = QuoteCheck(path, names, source.url)
    good = 0
    for batch in _reader(path, source, kind, on_invalid=leave_out, as_bytes=names):
        if quotes is not None:
            quotes.check(batch)
        good += batch.num_rows
        yield batch
    for text in suspects:
        assert quotes is not None
        quotes.check_text(text)
    if first is not None and skipped > _ODD_SHARE * (good + skipped):
        raise UserError(
            f"{path} cannot be read as {kind}: {skipped:,} of {good + skipped:,} lines have another number of fields "
            f"than {first.expected_columns}, for example {first.actual_columns} in {first.text[:80]!r}. "
            "Set source.format and source.header to what the file holds."
        )
    on_skipped(skipped)


def _reader(
    path: Path, source: SourceConfig, kind: str, *, on_invalid: Callable[[Any], str], as_bytes: Iterable[str] = ()
) -> Any:
    """pyarrow's reader of the file; it reads the columns in `as_bytes` as they are, and guesses the types of others."""
    import pyarrow as pa
    import pyarrow.csv as pc

    return pc.open_csv(
        path,
        read_options=pc.ReadOptions(column_names=list(source.header) or None, block_size=8 << 20),
        parse_options=pc.ParseOptions(
            delimiter="," if kind == "csv" else "\t",
            quote_char='"' if kind == "csv" else False,
            newlines_in_values=kind == "csv",
            invalid_row_handler=on_invalid,
        ),
        convert_options=pc.ConvertOptions(column_types=dict.fromkeys(as_bytes, pa.binary())),
    )
