"""Streams of record batches from URL tables: parquet, CSV, TSV, JSONL, or the hub; memory stays bounded."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.settings.source_config import SOURCES, SourceConfig
from data_prep.sources import hub
from pipeline.errors import UserError

_SUFFIXES = {
    "parquet": (".parquet",),
    "csv": (".csv",),
    "tsv": (".tsv", ".txt"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
}
_Opener = Callable[[Path, SourceConfig, str], Iterator[Any]]
_BATCH_ROWS = 32_768
_PEEKED_LINES = 1_000
# More lines with a wrong number of fields than this share mean that the settings are wrong, or the file is damaged.
_ODD_SHARE = 0.1


def files_of(source: SourceConfig) -> list[Path]:
    """The table's files in name order.

    A named source's pattern is that of its repository: a folder in which nothing matches it is taken as holding just
    the files that are meant. Raises: UserError when there are none.
    """
    path = Path(source.table or "")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"source.table = {str(path)!r} is neither a file nor a folder. Give the table's path.")
    wanted = [s for kind, some in _SUFFIXES.items() if source.format in ("auto", kind) for s in some]
    every = sorted(
        p for p in path.rglob("*") if p.is_file() and _suffix(p) in wanted and ".cache" not in p.relative_to(path).parts
    )
    found = [p for p in every if fnmatch(str(p.relative_to(path)), source.files or "*")]
    if not found and source.name in SOURCES and source.files == SOURCES[source.name].settings.get("files"):
        found = every
    if not found:
        named = f" and matches {source.files}" if source.files else ""
        raise UserError(f"source.table = {str(path)!r} holds no file that ends in {', '.join(wanted)}{named}.")
    return found


def format_of(path: Path, source: SourceConfig) -> str:
    """The format of one file, from the setting or from its name."""
    if source.format != "auto":
        return source.format
    kind = next((kind for kind, some in _SUFFIXES.items() if _suffix(path) in some), None)
    if kind is None:
        raise UserError(f"The format of {path.name} is not clear from its name: set source.format.")
    return kind


def columns_of(source: SourceConfig) -> list[str]:
    """The columns to read, in a fixed order."""
    named = [source.url, source.caption, source.uid, source.hash, source.blur, *source.keep]
    return [name for name in named if name]


def read(source: SourceConfig, *, on_skipped: Callable[[int], None] = lambda lines: None) -> Iterator[Any]:
    """pyarrow RecordBatches with exactly `columns_of(source)`, in the table's order.

    Args: on_skipped: called at the end of each file with its lines that have another number of fields than the rest.
    Raises: UserError when a column is missing or a file cannot be read as its format.
    """
    if source.table is None:
        for table in hub.read(source, columns_of(source), _BATCH_ROWS):
            _need(columns_of(source), table.schema.names, str(source.hub))
            yield from table.select(columns_of(source)).to_batches()
        return
    for path in files_of(source):
        yield from _read_file(path, source, on_skipped)


def count_known(source: SourceConfig) -> int | None:
    """The number of rows where it is known without reading the table (local parquet), else None."""
    import pyarrow.parquet as pq

    if source.table is None:
        return None
    paths = files_of(source)
    if any(format_of(path, source) != "parquet" for path in paths):
        return None
    return sum(pq.ParquetFile(path).metadata.num_rows for path in paths)


def check_files(source: SourceConfig) -> None:
    """Compare the files named in `source.sha256` with their published digests. Raises: UserError naming the file."""
    by_name = {path.name: path for path in files_of(source)} if source.sha256 else {}
    for name, wanted in source.sha256.items():
        if name not in by_name:
            raise UserError(f"source.sha256 names {name}, which is not among {', '.join(sorted(by_name))}.")
        with by_name[name].open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != wanted.lower():
            raise UserError(
                f"{by_name[name]} has SHA-256 {found}, but source.sha256 says {wanted}: "
                "it is damaged or another version. Fetch it again, or correct the setting."
            )


def _suffix(path: Path) -> str:
    suffixes = [s for s in path.suffixes if s not in (".gz", ".zst")]
    return suffixes[-1].lower() if suffixes else ""


def _read_file(path: Path, source: SourceConfig, on_skipped: Callable[[int], None]) -> Iterator[Any]:
    import pyarrow as pa

    kind, columns = format_of(path, source), columns_of(source)
    separated = partial(_separated, on_skipped=on_skipped)
    openers: dict[str, _Opener] = {
        "parquet": _parquet,
        "csv": separated,
        "tsv": separated,
        "jsonl": _json_lines,
    }
    try:
        for batch in openers[kind](path, source, kind):
            _need(columns, batch.schema.names, str(path))
            yield batch.select(columns)
    except (pa.ArrowInvalid, pa.ArrowKeyError, OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as {kind}: {error}") from error


def _parquet(path: Path, source: SourceConfig, kind: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        _need(columns_of(source), file.schema_arrow.names, str(path))
        # One row group at a time: over the whole file, what was read stays in memory to the end.
        for group in range(file.num_row_groups):
            yield from file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=columns_of(source))


def _separated(path: Path, source: SourceConfig, kind: str, *, on_skipped: Callable[[int], None]) -> Iterator[Any]:
    """CSV with quotes; TSV without, because captions hold unbalanced ones. All columns are read as text.

    Lines with a wrong number of fields are left out and counted, unless they are too many to be accidents.
    """
    import pyarrow as pa
    import pyarrow.csv as pc

    names = list(source.header) or None
    quote: Any = '"' if kind == "csv" else False
    skipped = 0
    first: Any = None

    def leave_out(line: Any) -> str:
        nonlocal skipped, first
        skipped, first = skipped + 1, first or line
        return "skip"

    reader = pc.open_csv(
        path,
        read_options=pc.ReadOptions(column_names=names, block_size=8 << 20),
        parse_options=pc.ParseOptions(
            delimiter="," if kind == "csv" else "\t",
            quote_char=quote,
            newlines_in_values=kind == "csv",
            invalid_row_handler=leave_out,
        ),
        convert_options=pc.ConvertOptions(column_types={name: pa.string() for name in columns_of(source)}),
    )
    good = 0
    for batch in reader:
        good += batch.num_rows
        yield batch
    if first is not None and skipped > _ODD_SHARE * (good + skipped):
        raise UserError(
            f"{path} cannot be read as {kind}: {skipped:,} of {good + skipped:,} lines have another number of fields "
            f"than {first.expected_columns}, for example {first.actual_columns} in {first.text[:80]!r}. "
            "Set source.format and source.header to what the file holds."
        )
    on_skipped(skipped)


def _json_lines(path: Path, source: SourceConfig, kind: str) -> Iterator[Any]:
    import pyarrow.json as pj

    yield from pj.open_json(
        path,
        read_options=pj.ReadOptions(block_size=8 << 20),
        # Fields that nobody asked for are passed over, whatever kinds of values they hold.
        parse_options=pj.ParseOptions(explicit_schema=_json_schema(path, source), unexpected_field_behavior="ignore"),
    )


def _json_schema(path: Path, source: SourceConfig) -> Any:
    """The kinds of the columns to read: text, boxes, and for the kept ones what the first lines hold."""
    import pyarrow as pa

    with io.TextIOWrapper(pa.input_stream(path), encoding="utf-8") as file:
        rows = [json.loads(line) for line in itertools.islice(file, _PEEKED_LINES) if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} cannot be read as jsonl: a line of it is not an object such as {{...}}.")
    _need(columns_of(source), list(dict.fromkeys(name for row in rows for name in row)), str(path))
    kinds = dict.fromkeys(columns_of(source), pa.string())
    for name in source.keep:
        kind = pa.array([row.get(name) for row in rows]).type
        kinds[name] = pa.string() if pa.types.is_null(kind) else kind
    if source.blur:
        kinds[source.blur] = pa.list_(pa.list_(pa.float64()))
    return pa.schema(kinds)


def _need(columns: list[str], present: list[str], where: str) -> None:
    missing = [name for name in columns if name not in present]
    if missing:
        raise UserError(
            f"{where} has no column {', '.join(map(repr, missing))}. Its columns are {', '.join(map(repr, present))}. "
            "Set source.url, source.caption, source.uid, source.hash or source.keep to these names."
        )
