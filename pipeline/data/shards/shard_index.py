"""Where the members of a shard are, so that training reads them without parsing headers.

The index of a shard is in the folder `index` beside the manifest, under the shard's SHA-256. `neuclip manifest`,
`pairs` and `download` write it when they scan or make the shard; a shard without one is parsed.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipeline.data.shards.tar_reader import IMAGE_SUFFIXES, MemberPlace, TarRecord, read_records
from pipeline.files import read_bounded, replacing
from pipeline.tars import read_exactly, skip

INDEX_FOLDER = "index"
LONGEST_SUFFIX = 8
MEMBERS = np.dtype([("sample", "<u4"), ("suffix", f"S{LONGEST_SUFFIX}"), ("offset", "<u8"), ("size", "<u4")])
"""A member: the number of its sample, its suffix (empty if that is longer), its first byte and its size."""
CHECKSUM_BYTES = 4
CONVERTED = 256
"""Samples whose places are made Python's numbers at a time."""


def index_path(folder: str | Path, sha256: str) -> Path:
    """Where the index of the shard with this SHA-256 is, given the folder of its manifest."""
    return Path(folder) / INDEX_FOLDER / f"{sha256}.members"


def write_index(folder: str | Path, tar: Path, *, sha256: str) -> None:
    """Write the index of a local shard; `folder` is that of the manifest.

    Raises:
        DamagedTar: The shard is not a complete tar.
    """
    save_index(folder, scan_members(tar), sha256=sha256)


def scan_members(tar: Path) -> NDArray[np.void]:
    """The members of a shard, `MEMBERS` [m], from its headers.

    Raises:
        DamagedTar: The shard is not a complete tar.
    """
    places: list[MemberPlace] = []
    with tar.open("rb") as file:
        for _ in read_records(file, skip=sys.maxsize, index=places):
            pass
    return as_members(places)


def as_members(places: Sequence[MemberPlace]) -> NDArray[np.void]:
    """`MEMBERS` [m] of what `read_records` has collected."""
    most = np.iinfo(np.uint32).max  # larger than any payload that is read
    rows = [(n, s if len(s) <= LONGEST_SUFFIX else b"", offset, min(size, most)) for n, s, offset, size in places]
    return np.array(rows, dtype=MEMBERS)


def save_index(folder: str | Path, members: NDArray[np.void], *, sha256: str) -> None:
    """Write the index of a shard: a CRC-32 of the shard's SHA-256 and the members, and the members in order.

    Where it cannot be written, there is none.
    """
    data = members.tobytes()
    with suppress(OSError), replacing(index_path(folder, sha256)) as temporary:
        temporary.write_bytes(_checksum(data, sha256) + data)


def _checksum(data: bytes, sha256: str) -> bytes:
    """The first bytes of an index: another shard's, under a wrong name, is told by them."""
    return zlib.crc32(data, zlib.crc32(sha256.encode())).to_bytes(CHECKSUM_BYTES, "little")


def is_index(name: str) -> bool:
    """Whether a file in the index's folder is an index, or what a killed process has left of one."""
    return re.fullmatch(r"[0-9a-f]{64}\.members|\.[0-9a-f]{64}\.members\.[0-9a-f]{32}\.tmp", name) is not None


def load_index(folder: str | Path, *, sha256: str, samples: int) -> NDArray[np.void] | None:
    """The members of a shard, `MEMBERS` [m]; None if there is no whole index of so many samples."""
    if not is_index(f"{sha256}.members"):  # the manifest may be a stranger's
        return None
    try:
        data = read_bounded(index_path(folder, sha256))
        members = np.frombuffer(data, MEMBERS, offset=CHECKSUM_BYTES)
    except (OSError, ValueError):
        return None
    whole = data[:CHECKSUM_BYTES] == _checksum(data[CHECKSUM_BYTES:], sha256)
    if not (whole and len(members)):
        return None
    steps = np.diff(members["sample"].astype(np.int64), prepend=-1, append=samples)
    is_whole = steps[0] == steps[-1] == 1 and bool(np.isin(steps, (0, 1)).all())
    offsets = members["offset"].astype(np.int64)
    ends = np.append(0, offsets + members["size"])
    in_order = bool((offsets > ends[:-1]).all())  # as in every tar, whoever wrote the index
    return members if is_whole and in_order else None


def sample_places(members: NDArray[np.void], caption_suffix: str) -> NDArray[np.int64] | None:
    """First byte and size of each sample's image and caption, int64 [n, 4], -1 where there is none.

    They are those that `read_records` returns. None if the index does not hold such suffixes.
    """
    if len(caption_suffix.encode()) > LONGEST_SUFFIX:
        return None
    sample, suffix = members["sample"].astype(np.int64), members["suffix"]
    places = np.full((int(sample[-1]) + 1, 4), -1, dtype=np.int64)
    images = np.flatnonzero(np.isin(suffix, [name.encode() for name in IMAGE_SUFFIXES]))[::-1]  # the first image counts
    captions = np.flatnonzero(suffix == caption_suffix.encode())  # and the last caption
    for column, chosen in ((0, images), (2, captions)):
        places[sample[chosen], column] = members["offset"][chosen]
        places[sample[chosen], column + 1] = members["size"][chosen]
    return places


def first_byte(places: NDArray[np.int64]) -> int:
    """Where the first of these samples begins."""
    offsets = places[:1, ::2]
    return min(offsets[offsets >= 0].tolist(), default=0)


def indexed_records(file: BinaryIO, places: NDArray[np.int64], *, position: int = 0) -> Iterator[TarRecord]:
    """The samples at these places, read in order from an open shard.

    Args:
        file: The shard; a stream that cannot seek is read through.
        places: Of `sample_places`.
        position: Of the file.

    Raises:
        DamagedTar: The file ends before a member does.
    """
    for first in range(0, len(places), CONVERTED):
        for image_at, image_size, caption_at, caption_size in places[first : first + CONVERTED].tolist():
            members = [("image", image_at, image_size), ("caption", caption_at, caption_size)]
            if caption_at < image_at:
                members.reverse()
            parts: dict[str, bytes] = {}
            for name, at, size in members:
                if at >= 0:
                    skip(file, at - position)
                    parts[name] = read_exactly(file, size)
                    position = at + size
            yield TarRecord(image=parts.get("image"), caption=parts.get("caption"))
