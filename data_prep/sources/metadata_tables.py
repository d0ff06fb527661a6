"""Streams of record batches from URL tables: parquet, CSV, TSV, JSONL, or the hub; memory stays bounded.

Also whether a table is the one that was published, or that a plan was made from.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.dataset import ParquetFragmentScanOptions

from data_prep.download_config import SOURCES, SourceConfig
from data_prep.sources.text_columns import BATCH_ROWS, columns_of, is_text, need_columns, normalized, text_batches
from pipeline.errors import UserError, in_a_line
from pipeline.files import regular_files, sha256_of

_FORMATS = {".parquet": "parquet", ".csv": "csv", ".tsv": "tsv", ".txt": "tsv",
            ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}  # fmt: skip
_COMMIT = re.compile(r"^[0-9a-f]{40}$")


def files_of(source: SourceConfig) -> list[Path]:
    """List the table's files in name order.

    A named source's pattern describes the files of its repository. If it matches nothing in a local folder, all of the
    folder's files are taken.

    Raises:
        UserError: There are no files.
    """
    path = Path(source.table or "")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"source.table = {str(path)!r} is neither a file nor a folder. Give the table's path.")
    wanted = [suffix for suffix, kind in _FORMATS.items() if source.format in ("auto", kind)]
    tables = regular_files(path, lambda name: _suffix(Path(name)) in wanted and name[0] != ".")  # `._a.parquet`
    every = {p: str(p.relative_to(path)) for p in sorted(tables)}
    files = [p for p, name in every.items() if fnmatch(name, source.files or "*")]
    if not files and source.name in SOURCES and source.files == SOURCES[source.name].get("files"):
        files = list(every)
    if not files:
        named = f" and matches {source.files}" if source.files else ""
        raise UserError(f"source.table = {str(path)!r} holds no file that ends in {', '.join(wanted)}{named}.")
    return files


def format_of(path: Path, source: SourceConfig) -> str:
    """The format of one file, from the setting or from its name."""
    if source.format != "auto":
        return source.format
    if (kind := _FORMATS.get(_suffix(path))) is None:
        raise UserError(f"The format of {path.name} is not clear from its name: set source.format.")
    return kind


def read(source: SourceConfig, *, on_skipped: Callable[[int], None] = lambda rows: None) -> Iterator[Any]:
    """pyarrow RecordBatches with exactly `columns_of(source)`, in the table's order.

    URLs, captions, uids and hashes are strings whatever the files hold; kept columns have one type in all files.
    `on_skipped` is called with the number of rows that cannot be read: text that is not UTF-8, and, at the end of a
    file, lines with another number of fields than the rest, or that are no JSON objects.

    Raises:
        UserError: A column is missing or of an unfit type, or a file cannot be read as its format.
    """
    if source.table is None:
        kinds: dict[str, Any] = {}
        tables = _read_hub(source)
        batches = ((str(source.hub), batch) for table in tables for batch in table.to_batches())
    else:
        files = files_of(source)
        kinds = _kept_kinds(files, source)
        batches = ((str(path), batch) for path in files for batch in _read_file(path, source, on_skipped))
    for where, batch in batches:
        for name in (*source.keep, source.caption):
            kind = batch.schema.field(name).type
            kinds.setdefault(name, pa.string() if is_text(kind) else kind)
        clean, left_out = normalized(batch, source, kinds, where)
        if left_out:
            on_skipped(left_out)
        yield clean


def count_known(source: SourceConfig) -> int | None:
    """The number of rows if it is known without reading the table (local parquet), else None."""
    if source.table is None:
        return None
    paths = files_of(source)
    is_known = all(format_of(path, source) == "parquet" for path in paths)
    return sum(_open_parquet(path).metadata.num_rows for path in paths) if is_known else None


def _open_parquet(path: Path) -> Any:
    try:
        return pq.ParquetFile(path, page_checksum_verification=True)
    except PermissionError as error:
        raise UserError(f"{path} cannot be read: permission denied. Change its permissions, or give a copy.") from error
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path} is not a complete parquet file ({error}). Was it cut short, or is it a web page saved under this "
            "name? Fetch it again, or move it away."
        ) from error


def _kept_kinds(files: list[Path], source: SourceConfig) -> dict[str, Any]:
    """A type for each kept column that the values of all parquet files fit, such as double for float and int."""
    kinds: dict[str, Any] = {}
    if not source.keep or any(format_of(path, source) != "parquet" for path in files):
        return kinds
    for path in files:
        schema = _open_parquet(path).schema_arrow
        need_columns(columns_of(source), schema.names, str(path))
        for name in source.keep:
            kind = schema.field(name).type
            kind = pa.string() if is_text(kind) else kind
            try:
                pair = [pa.schema([(name, known)]) for known in (kinds.get(name, kind), kind)]
                kinds[name] = pa.unify_schemas(pair, promote_options="permissive").field(name).type
            except pa.ArrowException as error:
                raise UserError(
                    f"Column {name!r} is of type {kind} in {path} and of type {kinds[name]} in the files before it. "
                    f"Leave it out of source.keep = {list(source.keep)}, or convert the files to one type."
                ) from error
    return kinds


def _suffix(path: Path) -> str:
    suffixes = [s for s in path.suffixes if s not in (".gz", ".zst")]
    return suffixes[-1].lower() if suffixes else ""


def _read_file(path: Path, source: SourceConfig, on_skipped: Callable[[int], None]) -> Iterator[Any]:
    kind, columns = format_of(path, source), columns_of(source)
    try:
        if kind != "parquet":
            yield from text_batches(path, source, kind, on_skipped)
            return
        with _open_parquet(path) as file:
            need_columns(columns, file.schema_arrow.names, str(path))
            # One row group at a time; otherwise all data read stays in memory until the end of the file.
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=columns):
                    yield batch.select(columns)
    except UserError:
        raise
    except (pa.ArrowException, OSError, EOFError, zlib.error, csv.Error, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as {kind}: {error}") from error


def identity_of(source: SourceConfig) -> dict[str, dict[str, Any]]:
    """Size, date and SHA-256 of each of a local table's files, by path below the table; nothing for the hub's.

    Raises:
        UserError: One that `source.sha256` names is missing or has another.
    """
    files = {name: stamp(path) for name, path in _named(source).items()}
    digests = {Path(name).name: about["sha256"] for name, about in files.items()}
    for name, wanted in source.sha256.items():
        if digests.get(name) != wanted.lower():
            what = f"has SHA-256 {digests[name]}" if name in digests else f"is not among {', '.join(sorted(digests))}"
            raise UserError(
                f"{name} {what}, but source.sha256 says {wanted}: it is damaged or another version. Fetch it again, or "
                "correct the setting."
            )
    return files


def stamp(path: Path) -> dict[str, Any]:
    """Size, date and SHA-256 of a file."""
    about = path.stat()
    return {"bytes": about.st_size, "mtime_ns": about.st_mtime_ns, "sha256": sha256_of(path)}


def is_same(path: Path, planned: Mapping[str, Any]) -> bool:
    """Whether a file is as its `stamp` says; one of the same size and date is not read."""
    about = path.stat()
    is_dated = about.st_mtime_ns == planned["mtime_ns"]
    return about.st_size == planned["bytes"] and (is_dated or sha256_of(path) == planned["sha256"])


def _named(source: SourceConfig) -> dict[str, Path]:
    if source.table is None:
        return {}
    root = Path(source.table)
    return {path.name if root.is_file() else str(path.relative_to(root)): path for path in files_of(source)}


def check_unchanged(source: SourceConfig, planned: Mapping[str, Mapping[str, Any]]) -> bool:
    """Compare a table with its record from when the URL list was made. Files of the same size and date are not read.

    Returns:
        Whether the table still exists; the list in the data set's folder is sufficient to continue without it.

    Raises:
        UserError: Files were changed, added or removed.
    """
    if source.table is None or not planned:
        return True
    if not Path(source.table).exists():
        return False
    files = _named(source)
    different = sorted(set(files) ^ set(planned))
    different = different or [name for name, path in files.items() if not is_same(path, planned[name])]
    if different:
        raise UserError(
            f"source.table = {source.table!r} has changed since its URL list was made ({', '.join(different[:5])}"
            f"{', ...' if len(different) > 5 else ''}). Use another output folder for the changed table, or put the "
            "former one back to continue."
        )
    return True


def check_rows(source: SourceConfig, count: int) -> None:
    """Compare the row count of the whole table, before any subset, with the published one.

    Raises:
        UserError: They differ.
    """
    if source.rows not in (None, count):
        raise UserError(
            f"The table has {count:,} rows, but {source.name} is published with {source.rows:,} (source.rows): it is "
            "incomplete or another version. Fetch it again, or set source.rows to what you mean to use."
        )


def pin(source: SourceConfig) -> SourceConfig:
    """Pin the source's revision to a commit, so that the same data can be read again.

    Offline (HF_HUB_OFFLINE=1), the repository's snapshot in the hub's cache is read like a local folder.

    Raises:
        UserError: The hub, or offline the cache, does not have the data set.
    """
    if source.hub is None or source.table is not None:
        return source
    from huggingface_hub import HfApi, constants, snapshot_download

    try:
        if constants.HF_HUB_OFFLINE:
            folder = snapshot_download(source.hub, repo_type="dataset", revision=source.revision, local_files_only=True)
            return replace(source, table=folder, revision=folder.rstrip("/").rpartition("/")[2])
        if source.revision and _COMMIT.match(source.revision):
            return source
        info = HfApi().dataset_info(source.hub, revision=source.revision)
        return replace(source, revision=info.sha)
    except Exception as error:  # the hub's client raises its own exceptions and those of its HTTP library
        raise _unreachable(source, error) from error


def _read_hub(source: SourceConfig) -> Iterator[Any]:
    """Read the rows of a data set on the hub in order as pyarrow Tables."""
    import datasets

    columns, options = columns_of(source), dict[str, Any]()
    if source.format == "parquet":
        # Parquet can leave unwanted columns on the server; other formats cannot.
        checked = ParquetFragmentScanOptions(page_checksum_verification=True)
        options = {"columns": columns, "fragment_scan_options": checked}
    try:
        rows = datasets.load_dataset(
            source.hub,
            revision=source.revision,
            split=source.split,
            data_files=source.files,
            streaming=True,
            **options,
        )
        for table in rows.with_format("arrow").iter(batch_size=BATCH_ROWS):
            need_columns(columns, table.column_names, str(source.hub))
            yield table.select(columns)
    except UserError:
        raise
    except Exception as error:  # `datasets` and its dependencies raise many exception types
        raise _unreachable(source, error) from error


def _unreachable(source: SourceConfig, error: Exception) -> UserError:
    return UserError(
        f"source.hub = {source.hub!r} at revision {source.revision!r} cannot be read ({in_a_line(error)}). "
        "Is it spelt right, reachable, and do you have access? A local copy is read with source.table=<its folder>."
    )
