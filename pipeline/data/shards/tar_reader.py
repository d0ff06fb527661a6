"""The samples of webdataset tars, read in one pass, with what their captions and images are."""

from __future__ import annotations

import base64
import io
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import BinaryIO

from PIL import Image

from pipeline import pictures
from pipeline.errors import UserError
from pipeline.pictures import ImageError
from pipeline.pictures.pixels import WHITE, Colour, read_rgb
from pipeline.tars import SPARSE, headers, read_payload, skip_payload
from pipeline.tars import DamagedTar as DamagedTar

IMAGE_SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "ppm"})
"""Of the members that training reads."""
_MESSAGES = {
    pictures.TOO_MANY_PIXELS: "image has too many pixels",
    pictures.TOO_MANY_SCANS: "image has too many scans",
}
ANY_TEXT = 0xE220A8397B1DCDAF
"""Number by which one of several captions is read outside of training, which draws it."""
MemberPlace = tuple[int, bytes, int, int]
"""Number of the sample, suffix, first byte and size of a member."""


class CorruptSample(ValueError):
    """The sample cannot be used; it is counted under the message."""


@dataclass(frozen=True, slots=True)
class TarRecord:
    """One sample as stored: encoded image and caption, None if absent. `problem` says why it could not be read."""

    image: bytes | None = None
    caption: bytes | None = None
    problem: str = ""
    key: str = field(default="", compare=False)
    """The members' common name; empty if the sample was read by an index."""
    repeated: int = 0
    """Members that are ignored because the sample has one of the same suffix; counted by the parser only."""


def read_records(
    file: BinaryIO,
    *,
    skip: int = 0,
    caption_suffix: str = "txt",
    strict: bool = False,
    on_unended: Callable[[], None] = lambda: None,
    index: list[MemberPlace] | None = None,
) -> Iterator[TarRecord]:
    """The samples of a tar, starting at number `skip`; DamagedTar after those before a cut or damage.

    Consecutive members whose names are equal up to the first dot form one sample, whose first image counts.

    Args:
        file: The tar.
        skip: Number of the first sample.
        caption_suffix: Of the member with the caption.
        strict: Refuse what readers would not see, such as links.
        on_unended: Called if the tar ends without the zeros that writers put there.
        index: Takes the place of every member, for `storage.save_index`.
    """
    parts = _parts(file, strict=strict, on_unended=on_unended)
    for number, (key, members) in enumerate(itertools.groupby(parts, key=itemgetter(0))):
        image: bytes | None = None
        caption: bytes | None = None
        suffixes: list[str] = []
        try:
            for _, suffix, _, size, offset in members:
                suffixes.append(suffix)
                if index is not None:
                    index.append((number, suffix.encode("utf-8", "surrogateescape"), offset, size))
                if number >= skip and suffix == caption_suffix:
                    caption = read_payload(file, size)
                elif number >= skip and suffix in IMAGE_SUFFIXES and image is None:
                    image = read_payload(file, size)
                else:
                    skip_payload(file, size)
        except DamagedTar:
            if image is not None and caption is not None:
                yield TarRecord(image, caption, key=key)
            raise
        if number >= skip:
            yield TarRecord(image, caption, key=key, repeated=len(suffixes) - len(set(suffixes)))


def _parts(
    file: BinaryIO, *, strict: bool = False, on_unended: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, str, str, int, int]]:
    """`(key, suffix, name, size, first byte)` of each member of a sample; DamagedTar also for sparse ones and, if
    `strict`, those without content of their own.
    """
    for name, size, offset, kind in headers(file, strict=strict, on_unended=on_unended):
        # Webdataset's rule, which ignores `README` and macOS's `._0.jpg`.
        is_part = name.rpartition("/")[2].find(".") > 0
        if kind == SPARSE:
            raise DamagedTar(f"holds {name!r:.99} as a sparse file: write the shard again without tar's --sparse")
        if is_part and not kind:
            yield (*split_name(name), name, size, offset)
        elif is_part and strict:
            raise DamagedTar(
                f"holds {name!r:.99} as {kind}, which readers of webdataset pass over: store the files "
                "themselves (GNU tar: --dereference --hard-dereference)"
            )
        else:
            skip_payload(file, size)


def keys(file: BinaryIO) -> Iterator[str]:
    """The key of each sample, from headers only; DamagedTar if the tar is truncated or damaged."""
    return (key for key, _ in itertools.groupby(members(file), key=lambda member: split_name(member[0])[0]))


def members(
    file: BinaryIO, *, wanted: Callable[[str], bool] = lambda suffix: False, strict: bool = False
) -> Iterator[tuple[str, bytes]]:
    """The name of each member and, if its suffix is `wanted`, its payload, else nothing; `strict` and errors as in
    `read_records`.
    """
    for _, suffix, name, size, _ in _parts(file, strict=strict):
        payload = read_payload(file, size) if wanted(suffix) else b""
        if not payload:
            skip_payload(file, size)
        yield name, payload


def split_name(name: str) -> tuple[str, str]:
    """`a/b.c.JPG` -> `("a/b", "c.jpg")`: webdataset's rule, the first dot of the last part."""
    folder, slash, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return folder + slash + stem, suffix.lower()


@dataclass(frozen=True)
class CaptionField:
    """The setting `data.caption`: suffix of the member and, if that is JSON, the name of the field."""

    suffix: str = "txt"
    field: str | None = None

    @classmethod
    def parse(cls, text: str, *, option: str = "") -> CaptionField:
        """Parse `txt`, another suffix or `json:FIELD`, or raise a UserError, which names the command's `option`."""
        suffix, colon, field = text.partition(":")
        valid = suffix == "json" and field if colon else suffix and not suffix.startswith(".") and "/" not in suffix
        if not valid or suffix.lower() in IMAGE_SUFFIXES:
            given = f"{option} {text!r}".strip()
            raise UserError(f"{given} is neither the suffix of a caption, such as txt, nor json:FIELD")
        return cls(suffix.lower(), field if colon else None)

    def __str__(self) -> str:
        return self.suffix if self.field is None else f"{self.suffix}:{self.field}"

    def read(self, record: TarRecord, *, number: int = ANY_TEXT) -> str:
        """The caption of a sample, that at `number`, modulo their count, where a JSON field holds several texts.

        CorruptSample if it is missing, empty or not UTF-8.
        """
        if record.caption is None:
            raise CorruptSample("caption is missing")
        try:
            text = record.caption.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptSample("caption is not UTF-8") from error
        if self.field is not None:
            try:
                value = json.loads(text).get(self.field)
            except (ValueError, AttributeError, RecursionError) as error:
                raise CorruptSample("caption's JSON cannot be read") from error
            texts = [t for t in (value if isinstance(value, list) else [value]) if isinstance(t, str) and t.strip()]
            if not texts:
                raise CorruptSample("caption is missing")
            return texts[number % len(texts)]
        if not text.strip():
            raise CorruptSample("caption is empty")
        return text


def rgb_image(data: bytes, *, max_pixels: int | None = None, background: Colour = WHITE) -> Image.Image:
    """`pixels.read_rgb`, with CorruptSample for an image that cannot be used."""
    with counted_errors():
        return read_rgb(data, max_pixels=max_pixels, background=background)


def thumbnail_url(image: Image.Image, size: tuple[int, int]) -> str:
    """A data URL of an image, reduced in place to fit into `size`."""
    image.thumbnail(size)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


@contextmanager
def counted_errors() -> Iterator[None]:
    """Raise an ImageError of this block as the CorruptSample under whose message samples are counted."""
    try:
        yield
    except ImageError as error:
        raise CorruptSample(_MESSAGES.get(error.reason, "image cannot be decoded")) from error
