"""One pair of a source: which column holds its image and which its caption, and the image on its way into a shard.

The image is checked by decoding, rotated upright, put on white if it is transparent, and resized if requested.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import math
import re
import unicodedata
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from data_prep.fetching.served_image import check_image, extension
from data_prep.reasons import FetchError
from pipeline.config import suggest
from pipeline.errors import UserError
from pipeline.pictures import ImageError, pixels

IMAGE_NAMES = (
    "image", "image_path", "image_file", "image_name", "filepath", "file_path", "file_name", "filename", "path", "file",
    "img", "img_path", "jpg", "jpeg", "png", "webp",
)  # fmt: skip
CAPTION_NAMES = (
    "caption", "captions", "text", "texts", "txt", "title", "description", "alt_text", "alt", "sentence", "sentences",
    "raw", "blip_caption", "comment", "prompt", "label_text", "conversations",
)  # fmt: skip
_BLANK = ("Cc", "Cf", "Zs", "Zl", "Zp")
URL = re.compile(r"\s*(https?|ftp|s3|gs)://", re.IGNORECASE)
URL_NAMES = ("url", "image_url", "img_url", "urls", "image_urls", "link")


@dataclass(frozen=True)
class PairOptions:
    """The options of `neuclip pairs`, as its help describes them; one that does not apply to a source is refused."""

    image: str | None = None
    caption: tuple[str, ...] = ()
    caption_template: tuple[str, ...] = ()
    images: Path | None = None
    captions: str | None = None
    """"one", or None for several."""
    header: tuple[str, ...] = ()
    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    allow_outside: bool = False
    size: int | None = None
    """Shorter side in pixels."""
    shard_size: int | None = None
    """Rows."""
    processes: int = 1


def choose_columns(
    present: Iterable[str], options: PairOptions, *, where: str, texts: Iterable[str] | None = None, note: str = ""
) -> tuple[str, tuple[str, ...]]:
    """The columns of image and captions among those that are `present`.

    `texts` are those that can hold a caption, if the source knows their types; `where` and `note` are for messages.

    Raises:
        UserError: A named column does not exist, none is found, or several match.
    """
    names = list(present)
    used = (*(texts or ()), options.image or "", *options.caption)
    if twice := sorted({name for name in used if names.count(name) > 1}):
        raise UserError(f"{where} has several columns called {twice[0]!r}: rename all but one of them.")
    image = options.image if options.image is not None else _find(names, IMAGE_NAMES)
    if image is None and (url := _find(names, URL_NAMES)):
        raise UserError(has_urls(where, url))
    allowed = [name for name in (names if texts is None else texts) if name != image]
    captions = options.caption or tuple(filter(None, [_find(allowed, CAPTION_NAMES)]))
    for kind, given in (("image", [image] if image is not None else []), ("caption", captions)):
        if not given:
            unfit = set(names) - {image, *allowed} if kind == "caption" else set[str]()
            listed = ", ".join(f"{name[:60]} (not text)" if name in unfit else name[:60] for name in names[:40])
            raise UserError(
                f"{where} has no column with a usual name for the {kind}: name it with --{kind}. "
                f"Columns: {listed}. {note}".rstrip()
            )
        if missing := [name for name in given if name not in names]:
            raise UserError(f"{where} has no column {missing[0]!r} (--{kind}). {suggest(missing[0], tuple(names))}")
    assert image is not None
    return image, tuple(captions)


def has_urls(where: str, column: str) -> str:
    """What to do with a table of URLs."""
    return (
        f"{where} has URLs (column {column!r}) and no images: `neuclip download output=FOLDER source.table=FILE "
        f"source.url={column}` fetches them and makes the shards."
    )


def _find(names: Sequence[str], usual: Sequence[str]) -> str | None:
    """The column whose name comes first among the usual ones; "Image Path" and "image-path" are image_path."""
    folded = {re.sub(r"[\s-]+", "_", name.strip().lower()): name for name in reversed(names)}
    return next((folded[name] for name in usual if name in folded), None)


MISSING_FILE = "image file missing"
MALFORMED_ROW = "malformed row"
NOT_UTF8 = "caption is not UTF-8"


def shortened(text: str) -> str:
    """A value of a user's, short enough for a message."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def captions_in(value: Any) -> tuple[str, ...]:
    """The texts of a caption field: one text, or a list of texts (or of mappings that hold one, as COCO has them).

    A number is the text that it would be in a CSV file. Of a conversation, the answers count. Texts of blanks, control
    characters and characters of no width are none.
    """
    texts = []
    for item in value if isinstance(value, list | tuple) else [value]:
        text = item
        if isinstance(item, Mapping):
            text = next((item[name] for name in ("raw", "caption", "text", "value") if name in item), None)
            text = None if item.get("from") in ("human", "user", "system") else text
        if isinstance(text, int | float) and not isinstance(text, bool) and abs(text) < math.inf:
            text = str(text)
        if isinstance(text, str) and any(unicodedata.category(c) not in _BLANK for c in text):
            texts.append(" ".join(text.split()))
    return tuple(texts)


_STRING = r"""u?(?:'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")"""
_LIST = re.compile(rf"\[\s*(?:{_STRING}[\s,]*+)*+\]", re.DOTALL)


def captions_of_list(text: str) -> tuple[str, ...]:
    """The captions of a text that is a JSON or Python list of them, such as `["a dog", "a brown dog"]`; else itself.

    The commas may be missing, as in texts of numpy arrays.
    """
    if not _LIST.fullmatch(text):
        return (text,)
    try:
        return captions_in(json.loads(text))
    except ValueError:
        with contextlib.suppress(ValueError, SyntaxError):  # of escapes
            return captions_in([ast.literal_eval(string) for string in re.findall(_STRING, text)])
    return (text,)


def not_utf8(error: UnicodeEncodeError | UnicodeDecodeError) -> str:
    """Which byte, or half of a character, makes a text no UTF-8, and what to do."""
    wrong = error.object[error.start]
    byte = wrong if isinstance(wrong, int) else ord(wrong) - 0xDC00  # `surrogateescape` reads a byte as a surrogate
    if not 0x80 <= byte <= 0xFF:
        return f"the surrogate U+{byte + 0xDC00:04X}, which is half of a character: the program that wrote it cut one"
    if error.start == 0 and byte in b"\xfe\xff":
        return f"byte 0x{byte:02X}, with which UTF-16 begins: iconv -f UTF-16 -t UTF-8 FILE"
    return f"byte 0x{byte:02X}; if the text is in Latin-1: iconv -f latin1 -t utf-8 FILE"


_STORED = ("JPEG", "PNG", "WEBP")  # formats that training reads; others are re-encoded
QUALITY, MAX_PIXELS = 95, 178_956_970
"""Of JPEGs that are made here, and of images: larger ones are dropped (decompression bombs)."""


@dataclass(frozen=True)
class StoredImage:
    """An image as stored in the shard."""

    suffix: str
    body: bytes
    width: int
    height: int
    transparent: bool = False
    """Whether it had transparent pixels."""
    plain: bool = False
    """Whether all pixels have one colour."""


def read_image(row: Any) -> bytes:
    """Read the encoded image of a `listing.PairRow`: a file, or a member of a tar.

    Raises:
        FetchError: Its file is missing or unreadable.
    """
    shown = row.image if len(row.image) <= 200 else f"...{row.image[-197:]}"
    try:
        return read_part(row.image, row.at) if row.at else pixels.read_file(row.image)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        raise FetchError(MISSING_FILE, shown if is_missing else f"{shown}: {error.strerror}") from error
    except ValueError as error:  # a zero byte
        raise FetchError(MISSING_FILE, f"{shown!r}: {error}") from error


def read_part(path: str, at: tuple[int, ...]) -> bytes:
    """The bytes of a file at (offset, size)."""
    offset, size = at
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def convert(body: bytes, size: int | None = None) -> StoredImage:
    """The image to store: its own bytes if training can read them unchanged, otherwise a JPEG.

    Images are re-encoded if their shorter side is larger than `size`, if they have transparent pixels (put on white) or
    an EXIF rotation (training ignores both), or if they are not JPEG, PNG or WebP.

    Raises:
        FetchError: The body is empty, not an image, truncated, too large, or cannot be decoded.
    """
    check_image(body, content_type="", max_pixels=MAX_PIXELS)
    try:
        with warnings.catch_warnings(action="ignore"), pixels.open_image(body) as image:
            kind, turned, least = image.format, pixels.orientation(image, body), size or min(image.size)
            shrinks = min(image.size) > least
            pixels.load(image, body)
            transparent = pixels.transparent_layer(image) is not None
            if not shrinks and turned == 1 and kind in _STORED and not transparent:
                suffix, plain = extension(body, str(kind).lower()), pixels.is_single_colour(image)
                return StoredImage(suffix, body, *image.size, plain=plain)
            picture = pixels.upright(pixels.to_rgb(image), turned)
            if shrinks:
                scale = least / min(picture.size)
                width, height = (max(least, round(side * scale)) for side in picture.size)
                picture = picture.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
            buffer = io.BytesIO()
            picture.save(buffer, "JPEG", quality=QUALITY)
            return StoredImage("jpg", buffer.getvalue(), *picture.size, transparent, pixels.is_single_colour(picture))
    except ImageError as error:
        raise FetchError(error.reason, error.detail) from error
