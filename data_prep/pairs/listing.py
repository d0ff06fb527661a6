"""The list of a source's rows: a data set of `datasets` on the disk, which any process can read from any row.

It is made anew at every start, so that a repeated command notices what has changed since.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep import reasons
from data_prep.pairs.pair import MALFORMED_ROW, NOT_UTF8, captions_of_list, not_utf8
from pipeline.files import as_text

CONTEXT = 77
"""Tokens of a text in CLIP's models, with those for its start and end."""
_CHUNK = 1_000
_ZERO = "a zero byte; if the text is in UTF-16: iconv -f UTF-16LE -t UTF-8 FILE"
_SCHEMA = pa.schema({
    "place": pa.string(), "image": pa.binary(), "captions": pa.list_(pa.string()), "problem": pa.string(),
    "detail": pa.string(), "at": pa.list_(pa.int64()),
})  # fmt: skip
"""Of the stored rows; file names may be any bytes."""


@dataclass(frozen=True, slots=True)
class PairRow:
    """One row of a source. For one that cannot become a sample, `problem` (a reason) and `detail` say why."""

    place: str
    """Human-readable location: file and line."""
    image: str = ""
    """The image's absolute path, that of its tar, or the digest of an image in a data set."""
    captions: tuple[str, ...] = ()
    problem: str = ""
    detail: str = ""
    at: tuple[int, ...] = ()
    """Where the image is: offset and size in a tar, or number of the data set and row."""


@dataclass(frozen=True)
class PairSource:
    """A source as opened: its rows, and how a process reads the image of one."""

    about: Mapping[str, Any]
    """Its kind and columns, for the manifest."""
    rows: Iterable[PairRow]
    root: Path
    """Images below it are known by their relative names."""
    read: Callable[[PairRow], bytes]
    """Reads the encoded image of a row; can be pickled. Raises FetchError."""
    notes: tuple[str, ...] = ()
    """What the user should know about how it is read."""
    split: str = ""
    """Which of its splits is read, for the user; empty if it has none."""


@dataclass(frozen=True)
class Listing:
    """A stored list."""

    path: Path
    rows: int
    digest: str
    """Of its content; does not depend on where the images are."""
    stamp: str
    """The same, with sizes and dates of the images' files."""
    merged: int
    """Rows of the source that are part of another, which has the same image."""

    def counts(self, dropped: Collection[int]) -> dict[str, int]:
        """Captions of the rows that are not `dropped`: all, distinct ones, and those of more than `CONTEXT` tokens of
        open_clip's tokenizer, which training cuts."""
        texts, long = array("q"), 0
        for number, row in enumerate(_rows(_opened(self.path))):
            for text in () if number in dropped else row.captions:
                texts.append(_digest(body := text.encode()))
                if len(body) > CONTEXT - 2:  # a token has at least a byte
                    import open_clip

                    long += len(open_clip.tokenizer._tokenizer.encode(text)) > CONTEXT - 2
        distinct = len(np.unique(np.frombuffer(texts, np.int64))) if texts else 0
        return {"captions": len(texts), "distinct_captions": distinct, "long_captions": long}

    def read(self, numbers: range) -> Iterator[PairRow]:
        """The rows with these numbers."""
        return _rows(_opened(self.path).select(numbers))


def write_listing(path: Path, source: PairSource, *, lists: bool) -> Listing:
    """Store the rows of a source; with `lists`, a text that is a list of captions is several (`captions_of_list`).

    Rows of the same image become one, as they would be false negatives of each other. A file is one image, whatever
    names and links lead to it; each sample of a tar is one.
    """
    images = array("q")

    def rows() -> Iterator[PairRow]:
        for number, row in enumerate(source.rows):
            row = _checked(row, lists=lists)
            about = None if row.at else _stat(row.image)
            identity = b"%d %d" % (about.st_dev, about.st_ino) if about else os.fsencode(row.image)
            is_alone = row.problem or (row.at and os.path.isabs(row.image))
            images.append(_digest(b"\0%d" % number if is_alone else identity))
            yield row

    _store(path, rows())
    keys = np.frombuffer(images, np.int64) if images else np.empty(0, np.int64)
    _, first, image = np.unique(keys, return_index=True, return_inverse=True)
    if len(first) < len(keys):  # rows of one image become neighbours, at the place of its first
        order = np.argsort(first[image], kind="stable")
        neighbours = zip(keys[order], _rows(_opened(path).select(order)), strict=True)
        merged = path.with_suffix(".merged")
        _store(merged, _merged(neighbours))
        os.replace(merged, path)
    digest, stamp = hashlib.sha256(), hashlib.sha256()
    prefix, last, about = os.path.join(source.root, ""), "", None
    for row in _rows(_opened(path)):
        name = row.image.removeprefix(prefix)
        name = "" if row.at and os.path.isabs(name) else name  # a tar that was unpacked into the output
        digest.update(repr((row.place, name, row.captions, row.problem, row.detail, row.at)).encode(errors="replace"))
        if row.image != last:
            last, about = row.image, _stat(row.image)
        if about:
            stamp.update(b"%d %d " % (about.st_size, about.st_mtime_ns))
    stamp.update(digest.digest())
    return Listing(path, len(first), digest.hexdigest(), stamp.hexdigest(), len(keys) - len(first))


def _store(path: Path, rows: Iterator[PairRow]) -> None:
    with pa.ipc.new_stream(path, _SCHEMA) as writer:
        while chunk := list(itertools.islice(rows, _CHUNK)):
            trees = [
                {**{each: getattr(row, each) for each in PairRow.__slots__}, "place": as_text(row.place),
                 "detail": as_text(row.detail), "image": os.fsencode(row.image)}
                for row in chunk
            ]  # fmt: skip
            writer.write_table(pa.Table.from_pylist(trees, schema=_SCHEMA))


def _merged(rows: Iterable[tuple[int, PairRow]]) -> Iterator[PairRow]:
    """Neighbouring rows with the same key as one row, with all captions."""
    for _, group in itertools.groupby(rows, key=operator.itemgetter(0)):
        first, *others = (row for _, row in group)
        captions = dict.fromkeys(c for row in (first, *others) for c in row.captions)
        yield replace(first, captions=tuple(captions))


def _opened(path: Path) -> Any:
    from datasets import Dataset

    return Dataset.from_file(str(path))


def _rows(rows: Any) -> Iterator[PairRow]:
    for table in rows.with_format("arrow").iter(_CHUNK):
        for tree in table.to_pylist():
            captions, at = tuple(tree["captions"]), tuple(tree["at"])
            yield PairRow(**{**tree, "image": os.fsdecode(tree["image"]), "captions": captions, "at": at})


def _stat(image: str) -> os.stat_result | None:
    try:
        return os.stat(image)
    except (OSError, ValueError):  # missing, too long, with a zero byte: counted when it is read
        return None


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)


def _checked(row: PairRow, *, lists: bool) -> PairRow:
    """The row, or why it cannot be used. Checked before rows are merged: a bad one costs no other."""
    if row.problem:
        return row
    try:
        os.fsencode(row.image)
    except UnicodeEncodeError as error:
        detail = f"the image's name has {not_utf8(error)}"
        return replace(row, image="", captions=(), problem=MALFORMED_ROW, detail=detail)
    if lists:
        row = replace(row, captions=tuple(dict.fromkeys(c for text in row.captions for c in captions_of_list(text))))
    text, detail = "".join(row.captions), ""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        detail = not_utf8(error)
    if detail or "\0" in text:
        return replace(row, captions=(), problem=NOT_UTF8, detail=detail or _ZERO)
    return row if row.captions else replace(row, problem=reasons.NO_CAPTION)
