"""One image on its way into a shard: checked by decoding, rotated upright, and resized if requested."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

from PIL import Image

from data_prep.fetching.served_image import check_image, extension
from data_prep.pairs.pair import MISSING_FILE
from data_prep.reasons import FetchError
from pipeline.pixels import ImageError, load, open_image, orientation, read_file, to_rgb, upright

_STORED = ("JPEG", "PNG", "WEBP")  # formats that training reads; others are re-encoded


@dataclass(frozen=True)
class ImageOptions:
    """How images are stored."""

    size: int | None = None
    """Shorter side in pixels that larger images are reduced to; None keeps them."""
    quality: int = 95
    """Quality of re-encoded JPEGs."""
    raw: bool = False
    """Store every image decoded, as a binary PPM."""
    max_pixels: int = 178_956_970
    """Larger images are dropped (decompression bombs)."""


@dataclass(frozen=True)
class StoredImage:
    """An image as stored in the shard."""

    suffix: str
    body: bytes
    width: int
    height: int


def read_image(image: bytes | str) -> bytes:
    """Read the encoded image.

    Raises:
        FetchError: Its file is missing or unreadable.
    """
    if isinstance(image, bytes):
        return image
    try:
        return read_file(image)
    except FileNotFoundError as error:
        raise FetchError(MISSING_FILE, image) from error
    except OSError as error:
        raise FetchError(MISSING_FILE, f"{image}: {error.strerror}") from error
    except ValueError as error:  # a zero byte
        raise FetchError(MISSING_FILE, f"{image!r}: {error}") from error


def convert(body: bytes, options: ImageOptions) -> StoredImage:
    """The image to store: its own bytes if training can read them unchanged, otherwise a JPEG; or its pixels.

    Images are re-encoded if `options.raw` is set, or if they are larger than `options.size`, have an EXIF rotation
    (training ignores EXIF), or are not JPEG, PNG or WebP.

    Raises:
        FetchError: The body is empty, not an image, truncated, too large, or cannot be decoded.
    """
    check_image(body, content_type="", max_pixels=options.max_pixels)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with open_image(body) as image:
                return _store(image, body, options)
    except ImageError as error:
        raise FetchError(error.reason, error.detail) from error


def _store(image: Image.Image, body: bytes, options: ImageOptions) -> StoredImage:
    kind, (width, height) = image.format, image.size
    turned = orientation(image, body)
    shrinks = options.size is not None and min(width, height) > options.size
    load(image, body)
    if not shrinks and turned == 1 and kind in _STORED and not options.raw:
        return StoredImage(extension(body, str(kind).lower()), body, width, height)
    picture = upright(to_rgb(image), turned)
    if shrinks:
        assert options.size is not None
        scale = options.size / min(picture.size)
        width, height = (max(options.size, round(side * scale)) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
    buffer, suffix = io.BytesIO(), "ppm" if options.raw else "jpg"
    picture.save(buffer, "PPM" if options.raw else "JPEG", quality=options.quality)
    return StoredImage(suffix, buffer.getvalue(), *picture.size)
