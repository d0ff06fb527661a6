"""An image as served: is it complete and acceptable, and what are its pixels, in 8 bits and in bounded memory?"""

from __future__ import annotations

import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from data_prep import reasons
from data_prep.reasons import FetchError
from pipeline.pixels import ImageError, eight_bits, jpeg_has_end, load, open_image, orientation, strict_jpeg

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
        return (b"\xff\xd9" in tail and b"\xff\xda" not in tail) or jpeg_has_end(body)
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


# Share that decoders may use, because other processes also grow.
_SHARE = 0.6
_PLENTY = 1 << 62


def memory_at_hand() -> int:
    """Bytes that all worker processes of this machine together may use for decoding."""
    free = min(_available(Path("/proc/meminfo")), _left_in_group(Path("/sys/fs/cgroup")))
    return int(free * _SHARE)


def _available(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:  # not Linux: no limit
        return _PLENTY
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), _PLENTY)


def _left_in_group(root: Path) -> int:
    """Memory left in the control group (version 2, otherwise 1); the page cache counts as free."""
    names = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
    for limit, usage in names:
        try:
            most, used = (root / limit).read_text().strip(), int((root / usage).read_text())
            cached = _inactive_files(root / limit)
        except (OSError, ValueError):
            continue
        return _PLENTY if most == "max" else max(0, int(most) - used + cached)
    return _PLENTY


def _inactive_files(limit: Path) -> int:
    for line in (limit.parent / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


# Channels and bytes per channel that a decoder needs for a mode of PIL; others count as four bytes per pixel.
_BYTES_PER_PIXEL = {"1": 1, "L": 1, "P": 4, "PA": 4, "RGB": 3, "I;16": 2, "I;16B": 2, "I;16L": 2, "LA": 4, "La": 4}
# Smaller images are decoded without checking the machine's memory.
_SMALL_BYTES = 64 << 20
# Rows of alpha matting are computed in blocks of about this many pixels, in 16-bit integers.
_BLOCK_PIXELS = 1 << 20


@dataclass(frozen=True)
class Pixels:
    """A decoded image."""

    array: np.ndarray
    """Grey `[h, w]` or BGR `[h, w, 3]`, uint8, as the file stores it: `orientation` is not applied yet."""
    orientation: int
    """EXIF orientation, 1 to 8; 1 is upright."""
    is_changed: bool
    """The array differs from the file's own pixels: alpha or 16 bits were converted."""


def decode(body: bytes, *, processes: int = 1) -> Pixels:
    """Decode a served image that `check_image` has accepted, on a machine where `processes` may decode at a time.

    Transparency is blended with white, 16-bit channels are scaled to 8 bits.

    Raises:
        FetchError: undecodable, or too little memory.
    """
    try:
        with warnings.catch_warnings(action="ignore"), open_image(body) as image:
            kind = image.format or ""
            _check_memory(image, body, processes)
            turned = orientation(image, body)
            clear = _clear_grey(image, body)
            # For TIFF, OpenCV premultiplies alpha, applies the orientation, and does not support all modes; for PPM,
            # it does not scale the values. Of damaged BMP, GIF and AVIF it refuses others than Pillow.
            if kind in ("TIFF", "PPM", "BMP", "GIF", "AVIF", "JPEG2000"):
                return Pixels(_by_pil(image, body), turned, is_changed=True)
        if kind in ("JPEG", "MPO") and (array := strict_jpeg(body)) is not None:
            return Pixels(array, turned, is_changed=False)
    except ImageError as error:
        raise FetchError(error.reason, error.detail) from error
    array = cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_UNCHANGED)
    if array is None:
        raise FetchError(reasons.UNDECODABLE, f"the decoder refuses this {kind or 'file'}")
    if clear is not None and array.ndim == 2:
        array[array == clear] = 65_535 if array.dtype == np.uint16 else 255
    matted = matte(_eight_bits(array))
    return Pixels(matted, turned, is_changed=clear is not None or matted is not array)


def upright(array: np.ndarray, orientation: int) -> np.ndarray:
    """The image as a viewer shows it, given its EXIF orientation."""
    if orientation in (5, 6, 7, 8):
        array = np.swapaxes(array, 0, 1)
    if orientation in (3, 4, 7, 8):
        array = array[::-1]
    if orientation in (2, 3, 6, 7):
        array = array[:, ::-1]
    return np.ascontiguousarray(array)


def matte(array: np.ndarray) -> np.ndarray:
    """Blend an 8-bit image with white where it is transparent; img2dataset's formula, in integers and by blocks."""
    if array.ndim == 2 or array.shape[2] == 3:
        return array
    height, width, channels = array.shape
    matted = np.empty((height, width, channels - 1), np.uint8)
    rows = max(1, _BLOCK_PIXELS // max(1, width))
    for top in range(0, height, rows):
        block = array[top : top + rows]
        alpha = block[..., -1:].astype(np.uint16)
        # (alpha * colour + (255 - alpha) * 255) / 255, rounded; at most 65,152, which 16 bits hold.
        matted[top : top + rows] = (65_152 - alpha * (255 - block[..., :-1].astype(np.uint16))) // 255
    return matted[..., 0] if channels == 2 else matted


def _eight_bits(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.uint16:
        return cv2.convertScaleAbs(array, alpha=255 / 65_535)
    raise FetchError(reasons.UNDECODABLE, f"pixels of type {array.dtype} have no agreed range")


def _by_pil(image: Any, body: bytes) -> np.ndarray:
    load(image, body)  # applies the orientation
    image = eight_bits(image)
    try:
        has_alpha = image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info
        mode = "RGBA" if has_alpha else "L" if image.mode in ("1", "L") else "RGB"
        array = np.asarray(image.convert(mode))
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise FetchError(reasons.UNDECODABLE, str(error)) from error
    if mode == "L":
        return array
    order = [2, 1, 0, 3] if has_alpha else [2, 1, 0]
    return matte(np.ascontiguousarray(array[..., order]))


def _check_memory(image: Any, body: bytes, processes: int) -> None:
    """Refuse an image whose decoding needs more memory than this process may take.

    The estimate includes the decoder's own planes, the decoded array, and the array without alpha.
    """
    plane = image.width * image.height * _BYTES_PER_PIXEL.get(image.mode, 4)
    if image.format == "PNG" and body[24] == 16 and not image.mode.startswith("I"):  # PIL does not report it
        plane *= 2
    needed = 2 * plane + 3 * image.width * image.height
    if needed <= _SMALL_BYTES:
        return
    allowed = memory_at_hand() // processes
    if needed > allowed:
        raise FetchError(
            reasons.TOO_LITTLE_MEMORY,
            f"{image.width} x {image.height} {image.mode}: {needed / 1e6:,.0f} MB needed, {allowed / 1e6:,.0f} MB free",
        )


def _clear_grey(image: Any, body: bytes) -> int | None:
    """The grey level that a PNG declares as transparent, which OpenCV ignores; None if there is none."""
    level = image.info.get("transparency")
    if image.format != "PNG" or image.mode not in ("1", "L", "I", "I;16") or not isinstance(level, int):
        return None
    bits = body[24]
    return level if bits >= 8 or image.mode == "1" else level * 255 // ((1 << bits) - 1)
