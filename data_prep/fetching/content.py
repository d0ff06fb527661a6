"""Checks that a response is a complete image of acceptable size, from its bytes and without decoding pixels."""

from __future__ import annotations

import warnings
import zlib

from data_prep import reasons
from data_prep.reasons import FetchError
from pipeline.pixels import ImageError, jpeg_has_end, open_image

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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes, which are checked here, and unusual metadata
            with open_image(body, max_pixels=max_pixels) as image:
                kind = image.format or ""
    except ImageError as error:
        detail = (content_type or "no content type") if error.reason == reasons.NOT_AN_IMAGE else error.detail
        raise FetchError(error.reason, detail) from error
    if not is_whole(body, kind):
        raise FetchError(reasons.TRUNCATED, f"{kind} of {len(body)} bytes without its end")
    if kind == "PNG" and not _has_checksums(body):
        raise FetchError(reasons.UNDECODABLE, "a part of this PNG does not have its checksum")


def is_whole(body: bytes, kind: str) -> bool:
    """Whether an image file is complete; formats without an end marker are left to the decoder.

    Bytes after the end of a JPEG, PNG or GIF are allowed: many cameras add some, phones a whole video.
    """
    if kind in ("JPEG", "MPO"):
        tail = body[-64:]  # nearly always sufficient, and cheaper than following the markers
        return (b"\xff\xd9" in tail and b"\xff\xda" not in tail) or jpeg_has_end(body)
    if kind == "PNG":
        # Near the end, or anywhere with its checksum: pixels may contain the four letters.
        return b"IEND" in body[-4096:] or b"IEND\xaeB`\x82" in body
    if kind == "GIF":
        return _is_whole_gif(body)
    if kind == "WEBP":
        return len(body) >= int.from_bytes(body[4:8], "little") + 8
    return True


def _has_checksums(body: bytes) -> bool:
    """Whether the pixels of a PNG, and what they need, have their checksums: libpng compares them, Pillow does not."""
    place = 8
    while place + 12 <= len(body):
        end = place + 8 + int.from_bytes(body[place : place + 4], "big")
        if end + 4 > len(body):
            return False
        is_needed = not body[place + 4] & 0x20  # the name of a critical chunk begins with a capital letter
        if is_needed and zlib.crc32(memoryview(body)[place + 4 : end]) != int.from_bytes(body[end : end + 4], "big"):
            return False
        if body[place + 4 : place + 8] == b"IEND":
            return True
        place = end + 4
    return False


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


def extension(body: bytes, default: str) -> str:
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
