"""Sources that are read through a stored list: of image files, or of samples in tars."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from data_prep.pairs.listing import Listed, Listing
from data_prep.pairs.pair import MALFORMED_ROW, Pair, captions_in
from pipeline.data.shards.tar_reader import FORMAT_SUFFIXES, split_name


@dataclass(frozen=True)
class FileSource:
    """Rows whose images are files."""

    listing: Listing
    about: Mapping[str, Any]

    @property
    def rows(self) -> int:
        return self.listing.rows

    @property
    def facts(self) -> dict[str, Any]:
        return {**self.about, "digest": self.listing.digest}

    def read(self, start: int, stop: int) -> Iterator[Pair]:
        for row in self.listing.read(start, stop):
            yield Pair(row.place, row.image, row.captions, row.problem, row.detail)


@dataclass(frozen=True)
class TarSource:
    """Samples of webdataset tars, as found by their headers; payloads are read one sample at a time.

    `caption` is the suffix of the caption's member, or `json:FIELD`.
    """

    listing: Listing
    caption: str

    @property
    def rows(self) -> int:
        return self.listing.rows

    @property
    def facts(self) -> dict[str, Any]:
        return {"kind": "webdataset tars", "caption": self.caption, "digest": self.listing.digest}

    def read(self, start: int, stop: int) -> Iterator[Pair]:
        for row in self.listing.read(start, stop):
            yield self._pair(row)

    def _pair(self, row: Listed) -> Pair:
        if row.problem:
            return Pair(row.place, problem=row.problem, detail=row.detail)
        try:
            parts = read_sample(row.image, row.offset)
        except (OSError, tarfile.TarError) as error:
            return Pair(row.place, problem=MALFORMED_ROW, detail=f"the tar cannot be read at this position ({error})")
        image = next((body for suffix, body in parts.items() if suffix in FORMAT_SUFFIXES), b"")
        suffix, colon, field = self.caption.partition(":")
        if suffix not in parts:
            return Pair(row.place, image)
        text = parts[suffix].decode("utf-8", "surrogateescape")
        if not colon:
            return Pair(row.place, image, captions_in(text))
        try:
            return Pair(row.place, image, captions_in(json.loads(text).get(field)))
        except (ValueError, AttributeError) as error:
            return Pair(row.place, problem=MALFORMED_ROW, detail=f"its JSON cannot be read ({error})")


def read_sample(path: str, offset: int) -> dict[str, bytes]:
    """The members of the sample that begins at this byte of a tar, by suffix."""
    parts: dict[str, bytes] = {}
    key = None
    with open(path, "rb") as file:
        file.seek(offset)
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                stem, suffix = split_name(member.name)
                if not member.isfile() or not suffix or not stem.rpartition("/")[2]:
                    continue
                if key is not None and stem != key:
                    break
                key = stem
                payload = archive.extractfile(member)
                parts[suffix] = payload.read() if payload else b""
    return parts
