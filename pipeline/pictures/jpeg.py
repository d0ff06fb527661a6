"""JPEGs by their bytes: damage that decoders pass over, scans that take hours, and decoding by libjpeg-turbo."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pipeline.pictures import TOO_MANY_SCANS, TRUNCATED, ImageError

MAX_SCANS = 100
"""Scans of a JPEG; libtiff has the same limit. Encoders write up to about a dozen. A file of 1.5 MB can have 12,000,
each of which takes as long as decoding the picture once."""
ORDINARY_SCANS, MAX_SCANNED_PIXELS = 12, 2**31
"""Above that many scans, the limit of scans x pixels: 12 scans of the largest picture that Pillow opens."""

# The next marker of a JPEG: its entropy-coded data contains 0xFF only as stuffed zeros, restarts and fill bytes.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_WITHOUT_LENGTH = (0x01, 0xD8)
_END, _SCAN = 0xD9, 0xDA
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_TABLES = frozenset({0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})
"""Segments before the first scan that are not about the frame: tables, application data, comments."""


def check_scans(data: bytes) -> None:
    """Refuse a JPEG with more than `MAX_SCANS` scans, or fewer if it is large, with ImageError; other data pass."""
    if data[:2] != b"\xff\xd8" or count_scans(data, limit=ORDINARY_SCANS) <= ORDINARY_SCANS:
        return
    limit = min(MAX_SCANS, max(ORDINARY_SCANS, MAX_SCANNED_PIXELS // max(1, _frame_pixels(data))))
    if count_scans(data, limit=limit) > limit:
        raise ImageError(TOO_MANY_SCANS, f"more than {limit}")


def is_plain(data: bytes) -> bool:
    """Whether a JPEG has 8 bits a channel, one scan, which is not progressive, and an end."""
    return _has_one_scan(data) and has_end(data)


def has_end(data: bytes) -> bool:
    """Whether the markers of a JPEG lead to its end; thumbnails, which have ends of their own, are skipped."""
    return any(marker == _END for marker, _ in markers(data))


def header(data: bytes) -> tuple[int, int, str]:
    """Height and width in pixels and the colour space of a JPEG by libjpeg-turbo; ValueError if it cannot read it."""
    import simplejpeg

    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except KeyError as error:  # a chroma subsampling that it has no name for, such as 4:4:1
        raise ValueError(f"chroma subsampling {error}") from error
    return height, width, colorspace


def decode_strictly(data: bytes, *, smallest: bool = False) -> Any:
    """The pixels of a JPEG by libjpeg-turbo: grey `[h, w]` or BGR `[h, w, 3]`, uint8.

    None for four channels, and if libjpeg-turbo complains about anything that other decoders may correct. `smallest`
    decodes it in an eighth of its size, which takes half as long.

    Raises:
        ImageError: The entropy-coded data end before the pixels, which other decoders do not report.
    """
    import simplejpeg

    try:
        kind = header(data)[2]
        colorspace = "BGR" if kind in ("YCbCr", "RGB") else "Gray" if kind == "Gray" else "CMYK"
        least = {"min_height": 1, "min_width": 1, "min_factor": 8} if smallest or colorspace == "CMYK" else {}
        array = simplejpeg.decode_jpeg(data, colorspace=colorspace, strict=True, **least)
    except ValueError as error:
        if "remature end" in str(error):
            raise ImageError(TRUNCATED, "the data of this JPEG end before its pixels") from error
        return None
    return {"BGR": array, "Gray": array[..., 0]}.get(colorspace)


def count_scans(data: bytes, *, limit: int) -> int:
    """The scans of a JPEG, counted up to `limit` + 1."""
    if _has_one_scan(data):
        return 1
    if (bound := data.count(b"\xff\xda\x00")) <= limit:  # much faster than the markers; thumbnails count, too
        return bound
    scans = 0
    for marker, _ in markers(data):
        scans += marker == _SCAN
        if marker == _END or scans > limit:
            break
    return scans


def _has_one_scan(data: bytes) -> bool:
    """Whether a JPEG's header is an ordinary one of 8 bits, whose first scan has all components and is not progressive.

    Decoders refuse further scans after it. Much faster than counting, which goes through the whole file.
    """
    components, place, end = -1, 2, len(data) - 10
    while place < end and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == _SCAN:
            return data[place + 4] == components
        if marker == 0xC0 or marker == 0xC1:  # baseline, extended
            components = data[place + 9] if data[place + 4] == 8 else -1
        elif marker not in _TABLES:
            return False
        place += 2 + (data[place + 2] << 8 | data[place + 3])
    return False


def markers(data: bytes) -> Iterator[tuple[int, int]]:
    """The markers of a JPEG, each with the position of what follows it."""
    place = 2
    while match := _MARKER.search(data, place):
        marker, place = data[match.end() - 1], match.end()
        yield marker, place
        if marker not in (*_WITHOUT_LENGTH, _END):
            place += int.from_bytes(data[place : place + 2], "big")


def _frame_pixels(data: bytes) -> int:
    """The pixels of a JPEG by its first frame header; 0 without one."""
    for marker, place in markers(data):
        if marker in _FRAMES:
            height, width = (int.from_bytes(data[place + k : place + k + 2], "big") for k in (3, 5))
            return height * width
        if marker in (_SCAN, _END):
            break
    return 0
