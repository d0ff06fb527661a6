"""The list of pairs behind sources whose rows have no natural random access (tables, COCO's JSON, folders, tars).

It is made in one streaming pass and stored as parquet in small row groups, so that memory stays bounded and any process
can start at any row.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.pairs.pair import MALFORMED_ROW, NOT_UTF8, Pair, not_utf8
from pipeline.errors import UserError
from pipeline.files import as_text, replacing

GROUP = 2_000


@dataclass(frozen=True, slots=True)
class Listed:
    """One row of the list. `image` is a path; a tar's sample has its tar there and its first byte in `offset`."""

    place: str
    image: str = ""
    captions: tuple[str, ...] = ()
    problem: str = ""
    detail: str = ""
    offset: int = -1


@dataclass(frozen=True)
class Listing:
    """A stored list: its file, its length, and a digest of its content."""

    path: Path
    rows: int
    digest: str

    def read(self, start: int, stop: int) -> Iterator[Listed]:
        """The rows `[start, stop)`.

        Raises:
            UserError: The list is damaged.
        """
        try:
            with pq.ParquetFile(self.path, page_checksum_verification=True) as file:
                for group in range(start // GROUP, -(-stop // GROUP)):
                    low, high = max(start - group * GROUP, 0), min(stop - group * GROUP, GROUP)
                    for row in file.read_row_group(group).slice(low, high - low).to_pylist():
                        image = os.fsdecode(row["image"])
                        yield Listed(**{**row, "image": image, "captions": tuple(row["captions"])})
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{self.path} is missing or damaged ({error}): delete {self.path.parent.parent} and run the same "
                "command again."
            ) from error


def write_listing(path: Path, rows: Iterable[Listed], *, root: Path, group_images: bool = True) -> Listing:
    """Store rows as a list, published by rename when complete.

    Args:
        path: The parquet file.
        rows: The rows in the order of the data set.
        root: The folder of the images or tars; the digest does not depend on where it is.
        group_images: Merge neighbouring rows with the same image into one row with all captions. Otherwise they would
            be false negatives of each other in a batch.
    """
    kinds = {"image": pa.binary(), "captions": pa.list_(pa.string()), "offset": pa.int64()}
    schema = pa.schema([(each.name, kinds.get(each.name, pa.string())) for each in fields(Listed)])
    digest, count = hashlib.sha256(), 0
    prefix = os.path.join(os.fsencode(root), b"")
    rows = map(_checked, rows)
    rows = _grouped(rows) if group_images else rows
    with (
        replacing(path, durable=True) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        while chunk := [_plain(row) for row in itertools.islice(rows, GROUP)]:
            for row in chunk:
                shown = {**row, "image": row["image"].removeprefix(prefix)}
                digest.update(repr(tuple(shown.values())).encode())
            writer.write_table(pa.Table.from_pylist(chunk, schema=schema), row_group_size=GROUP)
            count += len(chunk)
    return Listing(path, count, digest.hexdigest())


def _checked(row: Listed) -> Listed:
    """The row, or why it cannot be stored. Checked before rows are merged: a bad one costs no other."""
    try:
        os.fsencode(row.image)
    except UnicodeEncodeError as error:
        detail = f"the image's name has {not_utf8(error)}"
        return replace(row, image="", captions=(), problem=MALFORMED_ROW, detail=detail)
    try:
        "".join(row.captions).encode("utf-8")
    except UnicodeEncodeError as error:
        return replace(row, captions=(), problem=NOT_UTF8, detail=not_utf8(error))
    return row


def _plain(row: Listed) -> dict[str, Any]:
    """A row as stored in parquet: file names may be any bytes, captions are UTF-8."""
    tree: dict[str, Any] = {each.name: getattr(row, each.name) for each in fields(row)}
    tree["image"] = os.fsencode(row.image)
    for name in ("place", "detail"):
        tree[name] = as_text(tree[name])
    return tree


def _grouped(rows: Iterable[Listed]) -> Iterator[Listed]:
    """Rows with a problem are passed on at once: they do not part the rows of an image."""
    waiting: Listed | None = None
    for row in rows:
        if row.problem:
            yield row
            continue
        if waiting is not None and waiting.image == row.image:
            captions = dict.fromkeys((*waiting.captions, *row.captions))
            waiting = Listed(waiting.place, waiting.image, tuple(captions))
            continue
        if waiting is not None:
            yield waiting
        waiting = row
    if waiting is not None:
        yield waiting


@dataclass(frozen=True)
class ListedSource:
    """The rows of a list, whose images are files unless a subclass reads them from elsewhere."""

    listing: Listing
    about: Mapping[str, Any]
    """`facts` without the list's digest."""

    @property
    def rows(self) -> int:
        return self.listing.rows

    @property
    def facts(self) -> dict[str, Any]:
        return {**self.about, "digest": self.listing.digest}

    def read(self, start: int, stop: int) -> Iterator[Pair]:
        for row in self.listing.read(start, stop):
            yield Pair(row.place, problem=row.problem, detail=row.detail) if row.problem else self.pair(row)

    def pair(self, row: Listed) -> Pair:
        """The pair of a row without a problem."""
        return Pair(row.place, row.image, row.captions)
