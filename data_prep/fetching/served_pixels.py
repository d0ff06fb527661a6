"""Decoding of served images to 8 bits per channel, without alpha, in bounded memory."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from data_prep import reasons
from data_prep.fetching.memory import memory_at_hand
from data_prep.reasons import FetchError
from pipeline.pixels import ImageError, eight_bits, load, open_image, orientation, strict_jpeg

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
    """Decode a served image that `check_image` has accepted.

    Transparency is blended with white, 16-bit channels are scaled to 8 bits.

    Args:
        body: The file.
        processes: Number of processes on this machine that may decode at the same time.

    Raises:
        FetchError: undecodable, or too little memory.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about sizes, which are checked, and unusual metadata
            with open_image(body) as image:
                kind = image.format or ""
                _check_memory(image, body, processes)
                turned = orientation(image, body)
                clear = _clear_grey(image, body)
                # For TIFF, OpenCV premultiplies alpha, applies the orientation, and does not support all modes; for
                # PPM, it does not scale the values. Of damaged BMP, GIF and AVIF it refuses others than Pillow.
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
