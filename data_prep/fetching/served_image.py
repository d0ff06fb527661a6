"""An image as served: is it complete and acceptable, and what are its pixels, in 8 bits and in bounded memory?"""

from __future__ import annotations

import warnings
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from data_prep import reasons
from data_prep.reasons import FetchError
from pipeline.pictures import ImageError, jpeg
from pipeline.pictures.pixels import (
    WHITE,
    Colour,
    eight_bits,
    is_transparent,
    load,
    open_image,
    orientation,
    to_rgb,
    transparent_layer,
)

_TEXT = (b"<!doctype", b"<html", b"<?xml", b"<svg", b"{", b"<head", b"<script")


def check_image(body: bytes, *, content_type: str, max_pixels: int) -> None:
    """Refuse a body that is not one complete image of at most `max_pixels`.

    Format and size are read from the header, so that a decompression bomb is never decoded. The end marker shows
    whether a file is truncated; lenient decoders would fill the rest with grey.

    Raises:
        FetchError: empty, not an image, of an unsupported format, too many pixels or scans, or truncated.
    """
    if not body:
        raise FetchError(reasons.EMPTY)
    if body[:64].lstrip().lower().startswith(_TEXT):
        raise FetchError(reasons.NOT_AN_IMAGE, f"text where an image should be ({content_type or 'no content type'})")
    try:
        # The warnings are about sizes, which are checked here, and unusual metadata.
        with warnings.catch_warnings(action="ignore"), open_image(body, max_pixels=max_pixels) as image:
            kind = image.format or ""
    except ImageError as error:
        detail = (content_type or "no content type") if error.reason == reasons.NOT_AN_IMAGE else error.detail
        raise FetchError(error.reason, detail) from error
    has_checksums = _has_checksums(body) if kind == "PNG" else True
    if not is_whole(body, kind) or has_checksums is None:
        raise FetchError(reasons.TRUNCATED, f"{kind} of {len(body)} bytes without its end")
    if not has_checksums:
        raise FetchError(reasons.UNDECODABLE, "a part of this PNG does not have its checksum")


def is_whole(body: bytes, kind: str) -> bool:
    """Whether an image file is complete; formats without an end marker are left to the decoder.

    Bytes after the end of a JPEG, PNG or GIF are allowed: many cameras add some, phones a whole video.
    """
    if kind in ("JPEG", "MPO"):
        tail = body[-64:]  # nearly always sufficient, and cheaper than following the markers
        return (b"\xff\xd9" in tail and b"\xff\xda" not in tail) or jpeg.has_end(body)
    if kind == "PNG":
        # Near the end, or anywhere with its checksum: pixels may contain the four letters.
        return b"IEND" in body[-4096:] or b"IEND\xaeB`\x82" in body
    if kind == "GIF":
        return _is_whole_gif(body)
    if kind == "WEBP":
        return len(body) >= int.from_bytes(body[4:8], "little") + 8
    return True


def _has_checksums(body: bytes) -> bool | None:
    """Whether the pixels of a PNG, and what they need, have their checksums: libpng compares them, Pillow does not.

    None if a part is longer than what is left of the file, or the last one is missing.
    """
    place = 8
    while place + 12 <= len(body):
        end = place + 8 + int.from_bytes(body[place : place + 4], "big")
        if end + 4 > len(body):
            return None
        is_needed = not body[place + 4] & 0x20  # the name of a critical chunk begins with a capital letter
        if is_needed and zlib.crc32(memoryview(body)[place + 4 : end]) != int.from_bytes(body[end : end + 4], "big"):
            return False
        if body[place + 4 : place + 8] == b"IEND":
            return True
        place = end + 4
    return None


def _is_whole_gif(body: bytes) -> bool:
    """Whether the blocks of a GIF lead to its end; bytes after the end are allowed."""
    place = 13 + _table_bytes(body[10])
    while place < len(body):
        kind = body[place]
        if kind == 0x3B:
            return True
        if kind == 0x2C:  # an image: its descriptor, perhaps a colour table, and the size of its codes
            place += 11 + _table_bytes(body[place + 9] if place + 9 < len(body) else 0)
        elif kind == 0x21:  # an extension
            place += 2
        elif kind:  # damaged, which the decoder judges; zeros are padding
            return True
        else:
            place += 1
            continue
        while place < len(body) and body[place]:
            place += 1 + body[place]
        place += 1
    return False


def _table_bytes(flags: int) -> int:
    """Size of the colour table that a GIF's flags announce."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def extension(body: bytes, default: str = "") -> str:
    """The file extension according to the bytes: stored originals keep their format, whatever the encoder's is."""
    if body.startswith(b"\xff\xd8\xff"):
        return "jpg"
    if body.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if body[:4] == b"RIFF" and body[8:12] == b"WEBP":
        return "webp"
    if body[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    return default


# Share of the memory that decoders may use, because other processes also grow.
_SHARE = 0.6


def memory_at_hand(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that all worker processes of this machine, and its control group, together may use for decoding."""
    left = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # a ValueError: its limit is `max`
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(facts["inactive_file"])  # the page cache is free
        left = min(left, max(0, int((group / "memory.max").read_text()) - used))
    return int(_SHARE * left)


_BYTES_PER_PIXEL = 16
"""While Pillow decodes and puts a background behind a picture: the picture, the background, and two copies."""
_JPEG_BYTES_PER_PIXEL = 9
# Smaller images are decoded without checking the machine's memory.
_SMALL_BYTES = 64 << 20


@dataclass(frozen=True)
class Pixels:
    """A decoded image."""

    array: np.ndarray
    """Grey `[h, w]` or BGR `[h, w, 3]`, uint8, as the file stores it: `orientation` is not applied yet."""
    orientation: int
    """EXIF orientation, 1 to 8; 1 is upright."""
    is_changed: bool
    """The array differs from the file's own pixels: alpha or 16 bits were converted."""
    is_transparent: bool = False
    """Some of the file's pixels are not opaque."""


def decode(body: bytes, *, processes: int = 1, background: Colour = WHITE) -> Pixels:
    """Decode a served image that `check_image` has accepted, on a machine where `processes` may decode at a time.

    16-bit channels are scaled to 8 bits.

    Raises:
        FetchError: undecodable, or too little memory.
    """
    try:
        with warnings.catch_warnings(action="ignore"), open_image(body) as image:
            _check_memory(image, processes)
            turned = orientation(image, body)
            if image.format in ("JPEG", "MPO") and (array := jpeg.decode_strictly(body)) is not None:
                return Pixels(array, turned, is_changed=False)
            has_alpha = is_transparent(image)
            is_changed = has_alpha or image.mode.startswith("I")
            load(image, body)
            see_through = has_alpha and transparent_layer(image) is not None
            picture = eight_bits(image)
            is_grey = picture.mode in ("1", "L") and not has_alpha
            array = np.asarray(picture.convert("L") if is_grey else to_rgb(image, background))
    except ImageError as error:
        raise FetchError(error.reason, error.detail) from error
    bgr = array if array.ndim == 2 else np.ascontiguousarray(array[..., ::-1])
    return Pixels(bgr, turned, is_changed, is_transparent=see_through)


def upright(array: np.ndarray, orientation: int) -> np.ndarray:
    """The image as a viewer shows it, given its EXIF orientation."""
    if orientation in (5, 6, 7, 8):
        array = np.swapaxes(array, 0, 1)
    if orientation in (3, 4, 7, 8):
        array = array[::-1]
    if orientation in (2, 3, 6, 7):
        array = array[:, ::-1]
    return np.ascontiguousarray(array)


def _check_memory(image: Any, processes: int) -> None:
    """Refuse an image whose decoding needs more memory than this process may take."""
    each = _JPEG_BYTES_PER_PIXEL if image.format == "JPEG" and image.mode != "CMYK" else _BYTES_PER_PIXEL
    needed = each * image.width * image.height
    if needed <= _SMALL_BYTES:
        return
    allowed = memory_at_hand() // processes
    if needed > allowed:
        raise FetchError(
            reasons.TOO_LITTLE_MEMORY,
            f"{image.width} x {image.height} {image.mode}: {needed / 1e6:,.0f} MB needed, {allowed / 1e6:,.0f} MB free",
        )
