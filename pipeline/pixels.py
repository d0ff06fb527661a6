"""The only module that opens images: which formats are read, what is refused, and how every pixel type becomes RGB.

Images are untrusted: they come from the web and from other people's shards. Pillow reads forty formats, one of which
(EPS) starts Ghostscript, and decodes for hours if a JPEG asks for it. Colour profiles are ignored, as by img2dataset,
open_clip and the DataComp benchmark: the numbers in the file are taken for sRGB, so pictures in Adobe RGB or Display P3
look slightly pale.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
"""The formats that are read, by Pillow's names; AVIF needs Pillow 11.3."""
MAX_SCANS = 100
"""Scans of a JPEG; libtiff has the same limit. Encoders write up to about a dozen. A file of 1.5 MB can have 12,000,
each of which takes as long as decoding the picture once."""
ORDINARY_SCANS, MAX_SCANNED_PIXELS = 12, 2**31
"""Above that many scans, the limit of scans x pixels: 12 scans of the largest picture that Pillow opens."""

_MAX_FILE_BYTES = 2**31
"""The largest picture that Pillow opens has 1.4 GB with eight bytes per pixel."""

NOT_AN_IMAGE = "not an image"
UNSUPPORTED = "unsupported format"
TOO_MANY_PIXELS = "too many pixels"
TOO_MANY_SCANS = "too many scans"
TRUNCATED = "truncated"
UNDECODABLE = "undecodable"

# Formats that are recognised, to be refused by name.
_REFUSED = {
    rb"....ftyp(?:hei[cmsx]|hev[cmsx]|mif[12]|msf1|miaf|avc[is])": "HEIC",
    rb"\xff\x0a|\0\0\0\x0cJXL ": "JPEG XL",
    rb"%!PS|\xc5\xd0\xd3\xc6": "EPS",
    rb"%PDF": "PDF",
    rb"8BPS": "Photoshop",
    rb"\0\0\x01\0": "ICO",
    rb"II\xbc\x01": "JPEG XR",
    rb"\x76\x2f\x31\x01": "OpenEXR",
}
# The next marker of a JPEG: its entropy-coded data contains 0xFF only as stuffed zeros, restarts and fill bytes.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_JPEG_WITHOUT_LENGTH = (0x01, 0xD8)
_JPEG_END, _JPEG_SCAN = 0xD9, 0xDA
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_TABLES = frozenset({0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})
"""Segments before the first scan that are not about the frame: tables, application data, comments."""
_TIFF_BITS, _TIFF_INTERPRETATION, _TIFF_SAMPLE_FORMAT = 258, 262, 339
_TIFF_WHITE_IS_ZERO, _TIFF_UNSIGNED = 0, (1, 4)


_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(ValueError):
    """An image cannot be used; `reason` is one of the constants above."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


def read_file(path: str | Path) -> bytes:
    """The bytes of an image's file, whose name may come from somebody else's table: a device's data never end.

    Raises:
        OSError: It cannot be read, is no regular file, or is larger than any image.
    """
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if about.st_size > _MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"{about.st_size:,} bytes, more than an image has", str(path))
    return Path(path).read_bytes()


def read_rgb(data: bytes, *, max_pixels: int | None = None, drop_alpha: bool = False) -> Image.Image:
    """Decode an image to 8-bit RGB, on white and as stored: EXIF orientation is not applied.

    `drop_alpha` takes the colours under what is transparent instead, as PIL's `convert` and the official tasks do.

    Besides `max_pixels`, Pillow's own limit applies, twice `Image.MAX_IMAGE_PIXELS`. Its warnings about large sizes and
    odd metadata are passed on: only the caller knows whether other threads run, whose warnings a filter here would
    change.

    Raises:
        ImageError: See `open_image`, `load` and `eight_bits`.
    """
    with open_image(data, max_pixels=max_pixels) as image:
        load(image, data)
        return to_rgb(image) if drop_alpha else on_white(image)


def read_upright(data: bytes, *, max_pixels: int | None = None) -> Image.Image:
    """`read_rgb`, turned as a viewer shows the image.

    Raises:
        ImageError: As for `read_rgb`.
    """
    with open_image(data, max_pixels=max_pixels) as image:
        load(image, data)
        return upright(on_white(image), orientation(image, data))


def open_image(data: bytes, *, max_pixels: int | None = None) -> Image.Image:
    """Open an image of one of `FORMATS`, from its header only.

    Raises:
        ImageError: Not an image, of another format, or with a damaged header, too many pixels or too many scans.
    """
    check_scans(data)
    try:
        image = Image.open(io.BytesIO(data), formats=_formats())
    except Image.DecompressionBombError as error:
        raise ImageError(TOO_MANY_PIXELS, str(error)) from error
    except UnidentifiedImageError as error:
        refused = next((name for start, name in _REFUSED.items() if re.match(start, data, re.DOTALL)), None)
        raise ImageError(UNSUPPORTED, refused) if refused else ImageError(NOT_AN_IMAGE) from error
    except Exception as error:  # Pillow's plugins raise exceptions of many types on broken files
        raise ImageError(TRUNCATED, f"the image header cannot be read ({error})") from error
    if max_pixels is not None and image.width * image.height > max_pixels:
        image.close()
        raise ImageError(TOO_MANY_PIXELS, f"{image.width} x {image.height}")
    image.info.pop("xmp", None)  # where Pillow would look for the orientation of a TIFF
    return image


def orientation(image: Image.Image, data: bytes = b"") -> int:
    """How an image is stored: its EXIF orientation from 1, upright, to 8. That in XMP is ignored, as by browsers.

    Damaged metadata and values outside of this range count as upright, and so do TIFFs, which Pillow turns itself. EXIF
    data may follow the pixels: without the file's `data`, an opened image must be loaded.
    """
    if image.format == "TIFF":
        return 1
    try:
        if "exif" not in image.info and b"eXIf" in data[-(1 << 16) :]:
            image.load()
        exif = Image.Exif()  # not `getexif`, which falls back on XMP
        exif.load(image.info.get("exif", b""))
        found = exif.get(_ORIENTATION, 1)
    except Exception:  # damaged metadata raises exceptions of many types
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """The image as a viewer shows it."""
    return image.transpose(_TURNS[orientation]) if orientation in _TURNS else image


def load(image: Image.Image, data: bytes) -> None:
    """Decode the pixels of an opened image.

    Raises:
        ImageError: They cannot be decoded, or a JPEG's data end before its pixels: decoders make the rest grey.
    """
    try:
        image.load()
    except Exception as error:
        if "image file is truncated" in str(error):
            raise ImageError(TRUNCATED, str(error)) from error
        raise ImageError(UNDECODABLE, f"{type(error).__name__} {error}") from error
    if image.format in ("JPEG", "MPO") and _may_end_early(image, data):
        strict_jpeg(data, smallest=True)


def on_white(image: Image.Image, background: tuple[int, int, int] = (255, 255, 255)) -> Image.Image:
    """Convert an image to RGB, with what is transparent in it on a background; other images as `to_rgb` does.

    Raises:
        ImageError: As for `to_rgb`.
    """
    layer = transparent_layer(image)
    if layer is None:
        return to_rgb(image)
    return Image.alpha_composite(Image.new("RGBA", layer.size, (*background, 255)), layer).convert("RGB")


def transparent_layer(image: Image.Image) -> Image.Image | None:
    """An image as RGBA if any of its pixels is not opaque, by its alpha, its palette or a PNG's transparent colour.

    Raises:
        ImageError: Its pixels cannot be decoded.
    """
    if not is_transparent(image):
        return None
    try:
        layer = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    except Exception as error:
        raise ImageError(UNDECODABLE, f"{type(error).__name__} {error}") from error
    return layer if layer.getchannel("A").getextrema()[0] != 255 else None


def has_transparency(data: bytes) -> bool:
    """Whether an encoded image has a channel or a colour for transparency, by its header."""
    if data[:2] == b"\xff\xd8":
        return False
    try:
        with open_image(data) as image:
            return is_transparent(image)
    except ImageError:
        return False


def is_transparent(image: Image.Image) -> bool:
    """Whether an opened image has a channel or a colour for transparency, whether or not a pixel has it."""
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or (
        image.mode in ("1", "L", "P", "RGB") and "transparency" in image.info
    )


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB, without alpha: official tasks and photographs.

    Raises:
        ImageError: See `eight_bits`; also if the pixels of an opened file cannot be decoded.
    """
    image = eight_bits(image)
    try:
        if image.mode == "P" and "transparency" in image.info:  # else Pillow warns of several transparent colours
            image = image.convert("RGBA")
        return image.convert("LA").convert("RGB") if image.mode == "La" else image.convert("RGB")
    except Exception as error:
        raise ImageError(UNDECODABLE, f"{type(error).__name__} {error}") from error


def eight_bits(image: Image.Image) -> Image.Image:
    """An image with 16 bits per pixel as 8-bit grey, and one with 8 or fewer bits per channel as it is.

    Pillow alone would clip 16 bits to white.

    Raises:
        ImageError: 32-bit, signed or floating-point pixels, whose range is not known.
    """
    tags: dict[int, Any] = getattr(image, "tag_v2", {}) if image.format == "TIFF" else {}
    # Pillow has 16-bit pixels in a 32-bit mode for PGM (scaled to 16 bits) and, before version 11, for PNG.
    is_deep = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG"))
    is_signed = any(kind not in _TIFF_UNSIGNED for kind in _values(tags.get(_TIFF_SAMPLE_FORMAT)))
    if is_signed or (image.mode in ("I", "F") and not is_deep):
        kind = "signed or floating-point pixels" if is_signed else f"pixels of mode {image.mode}"
        raise ImageError(UNDECODABLE, f"{kind} have no agreed range")
    if not is_deep:
        return image
    import numpy as np

    try:
        pixels = np.asarray(image).astype(np.uint32)
    except Exception as error:
        raise ImageError(UNDECODABLE, f"{type(error).__name__} {error}") from error
    largest = (1 << next(iter(_values(tags.get(_TIFF_BITS))), 16)) - 1
    if tags.get(_TIFF_INTERPRETATION) == _TIFF_WHITE_IS_ZERO:
        pixels = largest - pixels
    grey = Image.fromarray(((pixels * 255 + largest // 2) // largest).astype(np.uint8))
    grey.info = dict(image.info)
    return grey


def check_scans(data: bytes) -> None:
    """Refuse a JPEG with more than `MAX_SCANS` scans, or fewer if it is large; other data pass.

    Raises:
        ImageError: It has too many.
    """
    if data[:2] != b"\xff\xd8" or _has_one_scan(data) or _scans(data, limit=ORDINARY_SCANS) <= ORDINARY_SCANS:
        return
    limit = min(MAX_SCANS, max(ORDINARY_SCANS, MAX_SCANNED_PIXELS // max(1, _frame_pixels(data))))
    if _scans(data, limit=limit) > limit:
        raise ImageError(TOO_MANY_SCANS, f"more than {limit}")


def is_plain_jpeg(data: bytes) -> bool:
    """Whether a JPEG has 8 bits a channel, one scan, which is not progressive, and an end."""
    return _has_one_scan(data) and jpeg_has_end(data)


def jpeg_has_end(data: bytes) -> bool:
    """Whether the markers of a JPEG lead to its end; thumbnails, which have ends of their own, are skipped."""
    return any(marker == _JPEG_END for marker, _ in _jpeg_markers(data))


def jpeg_header(data: bytes) -> tuple[int, int, str]:
    """Height and width in pixels and the colour space of a JPEG, as libjpeg-turbo names it.

    Raises:
        ValueError: libjpeg-turbo cannot read it.
    """
    import simplejpeg

    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except KeyError as error:  # a chroma subsampling that it has no name for, such as 4:4:1
        raise ValueError(f"chroma subsampling {error}") from error
    return height, width, colorspace


def strict_jpeg(data: bytes, *, smallest: bool = False) -> Any:
    """The pixels of a JPEG by libjpeg-turbo: grey `[h, w]` or BGR `[h, w, 3]`, uint8.

    None for four channels, and if libjpeg-turbo complains about anything that other decoders may correct. `smallest`
    decodes it in an eighth of its size, which takes half as long.

    Raises:
        ImageError: The entropy-coded data end before the pixels, which other decoders do not report.
    """
    import simplejpeg

    try:
        kind = jpeg_header(data)[2]
        colorspace = "BGR" if kind in ("YCbCr", "RGB") else "Gray" if kind == "Gray" else "CMYK"
        least = {"min_height": 1, "min_width": 1, "min_factor": 8} if smallest or colorspace == "CMYK" else {}
        array = simplejpeg.decode_jpeg(data, colorspace=colorspace, strict=True, **least)
    except ValueError as error:
        if "remature end" in str(error):
            raise ImageError(TRUNCATED, "the data of this JPEG end before its pixels") from error
        return None
    return {"BGR": array, "Gray": array[..., 0]}.get(colorspace)


def _may_end_early(image: Image.Image, data: bytes) -> bool:
    """Whether the data of a JPEG may end before its pixels, so that it is worth half a decode to know.

    A decoder sets pixels without data to the middle of each channel's range. If there are several scans, it may only
    lack details of the pixels.
    """
    last: Any = image.getpixel((image.width - 1, image.height - 1))
    return all(value in (127, 128) for value in _values(last)) or _scans(data, limit=1) > 1


def _scans(data: bytes, *, limit: int) -> int:
    """The scans of a JPEG, counted up to `limit` + 1."""
    if _has_one_scan(data):
        return 1
    if (bound := data.count(b"\xff\xda\x00")) <= limit:  # much faster than the markers; thumbnails count, too
        return bound
    scans = 0
    for marker, _ in _jpeg_markers(data):
        scans += marker == _JPEG_SCAN
        if marker == _JPEG_END or scans > limit:
            break
    return scans


def _has_one_scan(data: bytes) -> bool:
    """Whether a JPEG's header is an ordinary one of 8 bits, whose first scan has all components and is not progressive.

    Decoders refuse further scans after it. Much faster than counting, which goes through the whole file.
    """
    components, place, end = -1, 2, len(data) - 10
    while place < end and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == _JPEG_SCAN:
            return data[place + 4] == components
        if marker == 0xC0 or marker == 0xC1:  # baseline, extended
            components = data[place + 9] if data[place + 4] == 8 else -1
        elif marker not in _JPEG_TABLES:
            return False
        place += 2 + (data[place + 2] << 8 | data[place + 3])
    return False


def _jpeg_markers(data: bytes) -> Iterator[tuple[int, int]]:
    """The markers of a JPEG, each with the position of what follows it."""
    place = 2
    while found := _JPEG_MARKER.search(data, place):
        marker, place = data[found.end() - 1], found.end()
        yield marker, place
        if marker not in (*_JPEG_WITHOUT_LENGTH, _JPEG_END):
            place += int.from_bytes(data[place : place + 2], "big")


def _frame_pixels(data: bytes) -> int:
    """The pixels of a JPEG by its first frame header; 0 without one."""
    for marker, place in _jpeg_markers(data):
        if marker in _JPEG_FRAMES:
            return int.from_bytes(data[place + 3 : place + 5], "big") * int.from_bytes(
                data[place + 5 : place + 7], "big"
            )
        if marker in (_JPEG_SCAN, _JPEG_END):
            break
    return 0


def _values(value: Any) -> tuple[Any, ...]:
    """A TIFF tag or pixel, which may be one number or several, as a tuple."""
    return () if value is None else tuple(value) if isinstance(value, tuple | list) else (value,)


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)
