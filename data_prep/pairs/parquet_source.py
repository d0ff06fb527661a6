"""Parquet files with the images' bytes in them, as Hugging Face datasets are published."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from data_prep.pairs.columns import choose_columns
from data_prep.pairs.pair import MALFORMED_ROW, NOT_UTF8, Pair, captions_in, not_utf8
from pipeline.errors import UserError

_BATCH = 64  # rows with images in memory at a time


@dataclass(frozen=True)
class ParquetSource:
    """Rows of parquet files, located by the files' own row groups.

    `groups` are (file, row group, rows) in order.
    """

    root: Path
    image: str
    caption: str
    groups: tuple[tuple[str, int, int], ...]

    @property
    def rows(self) -> int:
        return sum(rows for _, _, rows in self.groups)

    @property
    def facts(self) -> dict[str, Any]:
        sizes = [(name, (self.root / name).stat().st_size) for name in dict.fromkeys(n for n, _, _ in self.groups)]
        digest = hashlib.sha256(repr((sizes, self.groups)).encode()).hexdigest()
        return {"kind": "parquet", "image": self.image, "caption": self.caption, "digest": digest}

    def read(self, start: int, stop: int) -> Iterator[Pair]:
        ends = list(accumulate(rows for _, _, rows in self.groups))
        place = start
        while place < stop:
            number = bisect.bisect_right(ends, place)
            name, group, rows = self.groups[number]
            first = ends[number] - rows
            before = sum(n for other, g, n in self.groups if other == name and g < group)
            at = first
            for batch in self._batches(name, group):
                if at + len(batch) > place:
                    for row in _plain(batch.slice(max(0, place - at), stop - place)):
                        where = f"{name} row {before + place - first}"
                        if isinstance(row, str):
                            yield Pair(where, problem=NOT_UTF8, detail=row)
                        else:
                            yield pair_of(row[self.image], row[self.caption], place=where, folder=self.root)
                        place += 1
                at += len(batch)
                if place >= stop:
                    break

    def _batches(self, name: str, group: int) -> Iterator[Any]:
        """The row group in batches.

        Raises:
            UserError: The file is damaged, for instance a page that has not its checksum.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.root / name
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                yield from file.iter_batches(_BATCH, row_groups=[group], columns=[self.image, self.caption])
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path} is damaged in row group {group} ({error}): fetch it again.") from error


def _plain(batch: Any) -> Iterator[Any]:
    """The rows of a batch; in place of one with a text that is not UTF-8, why."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for number in range(len(batch)):
            try:
                yield batch.slice(number, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield not_utf8(error)


def pair_of(image: Any, caption: Any, *, place: str, folder: Path) -> Pair:
    """A row's image (bytes, a path, or Hugging Face's mapping of both) and caption as a pair."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes | bytearray):
        return Pair(place, bytes(image), captions_in(caption))
    if isinstance(image, str) and image:
        return Pair(place, str(folder / image), captions_in(caption))
    return Pair(place, problem=MALFORMED_ROW, detail="no image in this row")


def open_parquet(path: Path, *, image: str | None, caption: str | None) -> ParquetSource:
    """A parquet file, or all of a folder in the order of their names.

    Raises:
        UserError: A file cannot be read, columns are not found, or the files' columns differ.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = path if path.is_dir() else path.parent
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    groups, schema = [], None
    for file in files:
        name = file.relative_to(root).as_posix()
        try:
            with pq.ParquetFile(file, page_checksum_verification=True) as opened:
                schema = opened.schema_arrow if schema is None else schema
                if missing := [column for column in schema.names if column not in opened.schema_arrow.names]:
                    raise UserError(
                        f"{file} lacks columns of {files[0]}: {', '.join(missing[:5])}. A folder must hold one data "
                        "set; name one file, or one split's subfolder."
                    )
                groups += [(name, g, opened.metadata.row_group(g).num_rows) for g in range(opened.num_row_groups)]
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{file} is not a parquet file that can be read ({error}): fetch it again.") from error
    assert schema is not None
    texts = [
        name
        for name in schema.names
        if _is_text(schema.field(name).type)
        or (pa.types.is_list(schema.field(name).type) and _is_text(schema.field(name).type.value_type))
    ]
    found = choose_columns(schema.names, image=image, caption=caption, where=str(path), texts=texts)
    return ParquetSource(root, *found, tuple(group for group in groups if group[2]))


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))
