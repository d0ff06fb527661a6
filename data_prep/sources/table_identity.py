"""Whether a table is the one that was published, or that a plan was made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.settings.source_config import SourceConfig
from data_prep.sources.metadata_tables import files_of
from pipeline.errors import UserError
from pipeline.files import sha256_of


def identity_of(source: SourceConfig) -> dict[str, dict[str, Any]]:
    """Size, date and SHA-256 of each of a local table's files, by path below the table; nothing for the hub's."""
    if source.table is None:
        return {}
    return {name: {**_stat(path), "sha256": sha256_of(path)} for name, path in _named(source).items()}


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
    found = _named(source)
    different = sorted(set(found) ^ set(planned)) or [
        name for name, path in found.items() if not _is_same(path, planned[name])
    ]
    if different:
        raise UserError(
            f"source.table = {source.table!r} has changed since its URL list was made ({', '.join(different[:5])}"
            f"{', ...' if len(different) > 5 else ''}). Use another output folder for the changed table, or put the "
            "former one back to continue."
        )
    return True


def check_rows(source: SourceConfig, found: int) -> None:
    """Compare the row count of the whole table, before any subset, with the published one.

    Raises:
        UserError: They differ.
    """
    if source.rows not in (None, found):
        raise UserError(
            f"The table has {found:,} rows, but {source.name} is published with {source.rows:,} (source.rows): it is "
            "incomplete or another version. Fetch it again, or set source.rows to what you mean to use."
        )


def _is_same(path: Path, planned: Mapping[str, Any]) -> bool:
    now = _stat(path)
    if now["bytes"] != planned["bytes"]:
        return False
    return now["mtime_ns"] == planned["mtime_ns"] or sha256_of(path) == planned["sha256"]


def _named(source: SourceConfig) -> dict[str, Path]:
    root = Path(source.table or "")
    return {path.name if root.is_file() else str(path.relative_to(root)): path for path in files_of(source)}


def _stat(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
