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
            key, parts = read_sample(row.image, row.offset)
        except (OSError, tarfile.TarError) as error:
            return Pair(row.place, problem=MALFORMED_ROW, detail=f"the tar cannot be read at this position ({error})")
        if not row.place.endswith(f":{key.encode('utf-8', 'backslashreplace').decode()}"):
            return Pair(row.place, problem=MALFORMED_ROW, detail="the tar has another sample at this position")
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


def read_sample(path: str, offset: int) -> tuple[str, dict[str, bytes]]:
    """The key and, by suffix, the members of the sample that begins at this byte of a tar: webdataset's reader.

    Raises:
        OSError: The file cannot be read.
        tarfile.TarError: It is no tar there, or two members of the sample have the same suffix.
    """
    from webdataset.tariterators import group_by_keys, tar_file_iterator  # which imports torch

    with open(path, "rb") as file:
        file.seek(offset)
        members = ({**member, "__url__": path} for member in tar_file_iterator(file, skip_meta=None))
        try:
            sample: dict[str, Any] = next(group_by_keys(members, keys=_key_and_suffix), {"__key__": ""})
        except ValueError as error:
            raise tarfile.ReadError(f"two members of its sample have the same suffix: {error.args[0]}") from error
    return sample["__key__"], {name: body for name, body in sample.items() if not name.startswith("__")}


def _key_and_suffix(name: str) -> tuple[str | None, str | None]:
    """As the list has them; None for what belongs to no sample."""
    stem, suffix = split_name(name)
    return (stem, suffix) if suffix and stem.rpartition("/")[2] else (None, None)
