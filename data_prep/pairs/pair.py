"""One pair of a source: which column holds its image and which its caption, and the image on its way into a shard.

The image is checked by decoding, rotated upright, and resized if requested. `PairSource` is what every kind of source
offers.
"""

from __future__ import annotations

import ast
import io
import json
import math
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from data_prep import reasons
from data_prep.fetching.served_image import check_image, extension
from data_prep.reasons import FetchError
from pipeline.config import suggest
from pipeline.errors import UserError
from pipeline.pixels import ImageError, load, open_image, orientation, read_file, to_rgb, upright

IMAGE_NAMES = (
    "image", "image_path", "image_file", "image_name", "filepath", "file_path", "file_name", "filename", "path", "file",
    "img", "img_path", "jpg", "jpeg", "png", "webp",
)  # fmt: skip
CAPTION_NAMES = (
    "caption", "captions", "text", "texts", "txt", "title", "description", "alt_text", "alt", "sentence", "sentences",
    "raw", "comment", "prompt", "label_text",
)  # fmt: skip
URL_NAMES = ("url", "image_url", "img_url", "urls", "link")


@dataclass(frozen=True)
class SourceOptions:
    """How to read a source; options that do not apply to its kind are refused."""

    image: str | None = None
    """Column of the image; None finds it."""
    caption: str | None = None
    """Column, suffix or JSON field of the caption; None finds it."""
    images: Path | None = None
    """Folder that image paths start from; None takes that of the table, or one near COCO's file."""
    captions: str | None = None
    """"one": a text file of several lines, or a list in one text, is one caption; None: it is several."""
    header: tuple[str, ...] = ()
    """Column names of a table without a line of names."""
    split: str | None = None
    """Split of a data set; None takes the only one, or train."""
    subset: str | None = None
    """Configuration of a data set on the hub."""
    revision: str | None = None
    """Commit or branch on the hub."""


def choose_columns(
    present: Iterable[str], options: SourceOptions, *, where: str, texts: Iterable[str] | None = None, note: str = ""
) -> tuple[str, str]:
    """The columns of image and caption.

    Args:
        present: The existing columns.
        options: Those that the user has chosen.
        where: What the columns belong to, for messages.
        texts: The columns that can hold a caption, if the source knows their types.
        note: A further sentence for the message that no column is found.

    Raises:
        UserError: A named column does not exist, none is found, or several match.
    """
    names, image, caption = list(present), options.image, options.caption
    if twice := sorted({name for name in (*(texts or ()), image, caption) if name and names.count(name) > 1}):
        raise UserError(f"{where} has several columns called {twice[0]!r}: rename all but one of them.")
    found_image = image if image is not None else _find(names, IMAGE_NAMES)
    if found_image is None and (url := _find(names, URL_NAMES)):
        raise UserError(
            f"{where} has URLs (column {url!r}) and no images: `neuclip download output=FOLDER source.table=FILE "
            f"source.url={url}` fetches them and makes the shards."
        )
    allowed = [name for name in (names if texts is None else texts) if name != found_image]
    found_caption = caption if caption is not None else _find(allowed, CAPTION_NAMES)
    for kind, option, name in (("image", "--image", found_image), ("caption", "--caption", found_caption)):
        if name is None:
            unfit = set(names) - {found_image, *allowed} if kind == "caption" else set[str]()
            listed = ", ".join(f"{name} (not text)" if name in unfit else name for name in names)
            raise UserError(
                f"{where} has no column with a usual name for the {kind}: name it with {option}. "
                f"Columns: {listed}. {note}".rstrip()
            )
        if name not in names:
            raise UserError(f"{where} has no column {name!r} ({option}). {suggest(name, tuple(names))}")
    assert found_image is not None
    assert found_caption is not None
    return found_image, found_caption


def _find(names: Sequence[str], usual: Sequence[str]) -> str | None:
    """The column whose name comes first among the usual ones; "Image Path" and "image-path" are image_path."""
    folded = {re.sub(r"[\s-]+", "_", name.strip().lower()): name for name in reversed(names)}
    return next((folded[name] for name in usual if name in folded), None)


MISSING_FILE = "image file missing"
MALFORMED_ROW = "malformed row"
NOT_UTF8 = "caption is not UTF-8"


@dataclass(frozen=True, slots=True)
class Pair:
    """One row of a source. For a row that cannot become a sample, `problem` (a reason) and `detail` say why."""

    place: str
    """Human-readable location of the row: file and row."""
    image: bytes | str = b""
    """The encoded image, or the path of its file."""
    captions: tuple[str, ...] = ()
    problem: str = ""
    detail: str = ""
    about: Mapping[str, str] = field(default_factory=dict)
    """Further entries of the sample's JSON, such as its licence."""


class PairSource(Protocol):
    """Rows in a fixed order that any process can read from any position; instances can be pickled."""

    @property
    def rows(self) -> int:
        """Number of rows, including those that will be dropped."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What identifies the source in the manifest: its kind, its columns, and a digest of what was found."""

    def read(self, start: int, stop: int) -> Iterator[Pair]:
        """Exactly the rows `[start, stop)`."""


def captions_in(value: Any) -> tuple[str, ...]:
    """The texts of a caption field: one text, or a list of texts (or of mappings that hold one, as COCO has them).

    A number is the text that it would be in a CSV file.
    """
    found = []
    for item in value if isinstance(value, list | tuple) else [value]:
        text = item.get("raw", item.get("caption", item.get("text"))) if isinstance(item, Mapping) else item
        if isinstance(text, int | float) and not isinstance(text, bool) and abs(text) < math.inf:
            text = str(text)
        if isinstance(text, str) and text.strip():
            found.append(" ".join(text.split()))
    return tuple(found)


def captions_of_list(text: str) -> tuple[str, ...]:
    """The captions of a text that is a JSON or Python list of them, such as `["a dog", "a brown dog"]`; else itself.

    The commas may be missing, as in texts of numpy arrays.
    """
    if not (text.startswith("[") and text.endswith("]")):
        return (text,)
    for parse in (json.loads, ast.literal_eval):
        try:
            found = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, list) and all(isinstance(item, str) for item in found):
            return captions_in(found if parse is json.loads else _literals(text))
    return (text,)


def _literals(text: str) -> list[str]:
    """The string literals of a Python list; numpy writes no commas between them, which Python would join."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [ast.literal_eval(token.string) for token in tokens if token.type == tokenize.STRING]


def not_utf8(error: UnicodeEncodeError | UnicodeDecodeError) -> str:
    """Which byte, or half of a character, makes a text no UTF-8, and what to do."""
    found = error.object[error.start]
    byte = found if isinstance(found, int) else ord(found) - 0xDC00  # `surrogateescape` reads a byte as a surrogate
    if not 0x80 <= byte <= 0xFF:
        return f"the surrogate U+{byte + 0xDC00:04X}, which is half of a character: the program that wrote it cut one"
    return f"byte 0x{byte:02X}; if the text is in Latin-1: iconv -f latin1 -t utf-8 FILE"


def checked(pair: Pair, *, lists: bool = True) -> Pair:
    """The pair, or the reason why its captions cannot be used; with `lists`, see `captions_of_list`."""
    if pair.problem:
        return pair
    if lists:
        captions = dict.fromkeys(text for caption in pair.captions for text in captions_of_list(caption))
        pair = replace(pair, captions=tuple(captions))
    if not pair.captions:
        return Pair(pair.place, problem=reasons.NO_CAPTION)
    try:
        for caption in pair.captions:
            caption.encode("utf-8")
    except UnicodeEncodeError as error:
        return Pair(pair.place, problem=NOT_UTF8, detail=not_utf8(error))
    return pair


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
        with warnings.catch_warnings(action="ignore"), open_image(body) as image:
            return _store(image, body, options)
    except ImageError as error:
        raise FetchError(error.reason, error.detail) from error


def _store(image: Image.Image, body: bytes, options: ImageOptions) -> StoredImage:
    kind, size = image.format, options.size or min(image.size)
    turned = orientation(image, body)
    shrinks = min(image.size) > size
    load(image, body)
    if not shrinks and turned == 1 and kind in _STORED and not options.raw:
        return StoredImage(extension(body, str(kind).lower()), body, *image.size)
    picture = upright(to_rgb(image), turned)
    if shrinks:
        scale = size / min(picture.size)
        width, height = (max(size, round(side * scale)) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
    buffer, suffix = io.BytesIO(), "ppm" if options.raw else "jpg"
    picture.save(buffer, "PPM" if options.raw else "JPEG", quality=options.quality)
    return StoredImage(suffix, buffer.getvalue(), *picture.size)
