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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image, ImageColor, UnidentifiedImageError
from pydantic import AfterValidator

from pipeline.pictures import NOT_AN_IMAGE, TOO_MANY_PIXELS, TRUNCATED, UNDECODABLE, UNSUPPORTED, ImageError, jpeg

Colour = tuple[int, int, int]
WHITE: Colour = (255, 255, 255)
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "HEIF")
"""The formats that are read, by Pillow's names; AVIF needs Pillow 11.3, and HEIF (HEIC) the package pillow-heif."""
_MAX_FILE_BYTES = 2**31
"""The largest picture that Pillow opens has 1.4 GB with eight bytes per pixel."""
_REFUSED = {
    rb"....ftyp(?:hei[cmsx]|hev[cmsx]|mif[12]|msf1|miaf|avc[is])": "HEIC, which needs: pip install 'neuclip[heif]'",
    rb"\xff\x0a|\0\0\0\x0cJXL ": "JPEG XL",
    rb"%!PS|\xc5\xd0\xd3\xc6": "EPS",
    rb"%PDF": "PDF",
    rb"8BPS": "Photoshop",
    rb"\0\0\x01\0": "ICO",
    rb"II\xbc\x01": "JPEG XR",
    rb"\x76\x2f\x31\x01": "OpenEXR",
}
"""Formats that are recognised, to be refused by name."""
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


def colour_of(text: str) -> Colour:
    """A colour by its name, such as white, or as #f0f0f0; ValueError if it is none."""
    try:
        red, green, blue = ImageColor.getrgb(text)[:3]
    except ValueError:
        raise ValueError(f"{text!r} is not a colour such as white or #f0f0f0") from None
    return red, green, blue


ColourName = Annotated[str, AfterValidator(lambda text: colour_of(text) and text)]
"""Of a setting."""


def colour_name(colour: Colour) -> str:
    """A colour as `colour_of` reads it."""
    return "white" if colour == WHITE else "#{:02x}{:02x}{:02x}".format(*colour)


def read_file(path: str | Path) -> bytes:
    """The bytes of an image's file, whose name may come from somebody else's table; OSError if it is no regular file
    (a device's data never end), larger than any image, or cannot be read.
    """
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if about.st_size > _MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"{about.st_size:,} bytes, more than an image has", str(path))
    return Path(path).read_bytes()


def read_rgb(
    data: bytes, *, max_pixels: int | None = None, background: Colour | None = WHITE, turned: bool = False
) -> Image.Image:
    """Decode an image to 8-bit RGB, `turned` as a viewer shows it or, for training and official tasks, as stored.

    Besides `max_pixels`, Pillow's own limit applies, twice `Image.MAX_IMAGE_PIXELS`. Its warnings about large sizes and
    odd metadata are passed on: only the caller knows whether other threads run, whose warnings a filter here would
    change. `background` is as in `to_rgb`.

    Raises:
        ImageError: See `open_image`, `load` and `eight_bits`.
    """
    with open_image(data, max_pixels=max_pixels) as image:
        load(image, data)
        picture = to_rgb(image, background)
        return upright(picture, orientation(image, data)) if turned else picture


def open_image(data: bytes, *, max_pixels: int | None = None) -> Image.Image:
    """Open an image of one of `FORMATS`, from its header only.

    ImageError if it is none, or has a damaged header, too many pixels or too many scans.
    """
    jpeg.check_scans(data)
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
    if image.format == "PNG":  # Pillow scales its pixels to 8 bits, but not its transparent colour
        clear, stored_as = image.info.get("transparency"), image.tile[0][3] if image.tile else ""
        if stored_as in ("L;2", "L;4") and isinstance(clear, int):
            image.info["transparency"] = clear * 255 // ((1 << int(stored_as[2:])) - 1)
        elif stored_as == "RGB;16B" and isinstance(clear, tuple):
            image.info["transparency"] = tuple(value >> 8 for value in clear)
    return image


def orientation(image: Image.Image, data: bytes = b"") -> int:
    """How an image is stored: its EXIF orientation from 1, upright, to 8. That in XMP is ignored, as by browsers.

    Damaged metadata and other values count as upright, and so do TIFF and HEIC, which their decoders turn. EXIF data
    may follow the pixels: without the file's `data`, an opened image must be loaded.
    """
    if image.format in ("TIFF", "HEIF"):
        return 1
    try:
        if "exif" not in image.info and b"eXIf" in data[-(1 << 16) :]:
            image.load()
        exif = Image.Exif()  # not `getexif`, which falls back on XMP
        exif.load(image.info.get("exif", b""))
        value = exif.get(_ORIENTATION, 1)
    except Exception:  # damaged metadata raises exceptions of many types
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """The image as a viewer shows it."""
    return image.transpose(_TURNS[orientation]) if orientation in _TURNS else image


def load(image: Image.Image, data: bytes) -> None:
    """Decode the pixels of an opened image, or raise ImageError: also where a JPEG's data end before its pixels, since
    decoders make the rest grey.
    """
    with _decoding():
        image.load()
    if image.format in ("JPEG", "MPO"):
        last = _values(image.getpixel((image.width - 1, image.height - 1)))
        # A decoder sets pixels without data to the middle of the range; of several scans, it may only lack details.
        if all(value in (127, 128) for value in last) or jpeg.count_scans(data, limit=1) > 1:
            jpeg.decode_strictly(data, smallest=True)


def to_rgb(image: Image.Image, background: Colour | None = WHITE) -> Image.Image:
    """Convert an image of any mode to RGB, with a background behind what is transparent in it.

    None takes the colours under what is transparent, as PIL's `convert` and the official tasks do.

    Raises:
        ImageError: See `eight_bits`; also if the pixels of an opened file cannot be decoded.
    """
    if background is not None and (layer := transparent_layer(image)) is not None:
        picture = Image.new("RGB", layer.size, background)
        picture.paste(layer, mask=layer)
        return picture
    image = eight_bits(image)
    with _decoding():
        if image.mode == "P" and "transparency" in image.info:  # else Pillow warns of several transparent colours
            image = image.convert("RGBA")
        return image.convert("LA").convert("RGB") if image.mode == "La" else image.convert("RGB")


def transparent_layer(image: Image.Image) -> Image.Image | None:
    """An image as RGBA if any of its pixels is not opaque, by its alpha, its palette or a PNG's transparent colour."""
    if not is_transparent(image):
        return None
    with _decoding():
        if _is_deep(image):
            clear = Image.fromarray(np.where(np.asarray(image) == image.info["transparency"], 0, 255).astype(np.uint8))
            layer = eight_bits(image).convert("RGBA")
            layer.putalpha(clear)
        else:
            layer = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
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
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        return True
    return "transparency" in image.info and (image.mode in ("1", "L", "P", "RGB") or _is_deep(image))


def is_single_colour(image: Image.Image) -> bool:
    """Whether all pixels are equal."""
    ranges: Any = image.getextrema()
    return all(low == high for low, high in (ranges if isinstance(ranges[0], tuple) else (ranges,)))


def eight_bits(image: Image.Image) -> Image.Image:
    """An image with 16 bits per pixel as 8-bit grey, and one with 8 or fewer bits per channel as it is.

    Pillow alone would clip 16 bits to white.

    Raises:
        ImageError: 32-bit, signed or floating-point pixels, whose range is not known.
    """
    tags: dict[int, Any] = getattr(image, "tag_v2", {}) if image.format == "TIFF" else {}
    is_deep = _is_deep(image)
    is_signed = any(kind not in _TIFF_UNSIGNED for kind in _values(tags.get(_TIFF_SAMPLE_FORMAT)))
    if is_signed or (image.mode in ("I", "F") and not is_deep):
        kind = "signed or floating-point pixels" if is_signed else f"pixels of mode {image.mode}"
        raise ImageError(UNDECODABLE, f"{kind} have no agreed range")
    if not is_deep:
        return image
    with _decoding():
        pixels = np.asarray(image).astype(np.uint32)
    largest = (1 << next(iter(_values(tags.get(_TIFF_BITS))), 16)) - 1
    if tags.get(_TIFF_INTERPRETATION) == _TIFF_WHITE_IS_ZERO:
        pixels = largest - pixels
    return Image.fromarray(((pixels * 255 + largest // 2) // largest).astype(np.uint8))


def _is_deep(image: Image.Image) -> bool:
    """Whether an image has 16 bits per pixel; Pillow has those of PGM in a mode of 32 bits."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG"))


@contextmanager
def _decoding() -> Iterator[None]:
    """Raise what Pillow raises in this block as an ImageError."""
    try:
        yield
    except ImageError:
        raise
    except Exception as error:  # of many types
        if "image file is truncated" in str(error):
            raise ImageError(TRUNCATED, str(error)) from error
        raise ImageError(UNDECODABLE, f"{type(error).__name__} {error}") from error


def _values(value: Any) -> tuple[Any, ...]:
    """A TIFF tag or pixel, which may be one number or several, as a tuple."""
    return () if value is None else tuple(value) if isinstance(value, tuple | list) else (value,)


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    with suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    return tuple(name for name in FORMATS if name in Image.OPEN)
