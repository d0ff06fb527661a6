"""Metadata on the hub: pinned to a commit before it is read, streamed with `datasets`, or taken from the cache."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pyarrow.dataset import ParquetFragmentScanOptions

from data_prep.settings.source_config import SourceConfig
from data_prep.sources.text_columns import need_columns
from pipeline.errors import UserError, in_a_line

_COMMIT = re.compile(r"^[0-9a-f]{40}$")


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
        found = HfApi().dataset_info(source.hub, revision=source.revision)
        return replace(source, revision=found.sha)
    except Exception as error:  # the hub's client raises its own exceptions and those of its HTTP library
        raise _unreachable(source, error) from error


def read(source: SourceConfig, columns: list[str], batch_rows: int) -> Iterator[Any]:
    """Read the data set's rows in order as pyarrow Tables with these columns.

    Raises:
        UserError: The data set cannot be read, or lacks a column.
    """
    import datasets

    options: dict[str, Any] = {}
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
        for table in rows.with_format("arrow").iter(batch_size=batch_rows):
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
