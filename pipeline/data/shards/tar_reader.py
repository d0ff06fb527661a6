"""Read webdataset tars sequentially: one pass over the headers; payloads are read only if they are needed.

Supports USTAR, PAX and GNU long names, the formats that webdataset, img2dataset and our own ingestion write. About five
times as fast per sample as Python's tarfile, which builds an object for each member. A sample's caption is a member of
the tar, or in a field of its JSON member (`CaptionField`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from pipeline.data.order.hashing import draw
from pipeline.errors import UserError
from pipeline.files import PADDING, zeros_next

BLOCK = 512
IMAGE_SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "ppm"})
"""Of the members that training reads."""
FORMAT_SUFFIXES = (
    "jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "avif", "jp2", "heic", "heif",
)  # fmt: skip
"""Of files in `pixels.FORMATS`."""
LARGEST = 2**53
"""Larger sizes are damage; seeking to some of them would raise OverflowError."""
LARGEST_PAYLOAD, PIECE = 1 << 30, 1 << 24
"""Bytes of an image or caption, above which it is damage, and of a read: a file may be shorter than its header says."""
LARGEST_EXTENSION = 1 << 20
"""Bytes of a PAX header or long name; larger ones are damage, and would take long to parse."""
REGULAR, PAX, PAX_GLOBAL, GNU_LONG_NAME, SPARSE = b"0\x007", b"x", b"g", b"L", b"S"
SPECIAL = {b"1": "a link", b"2": "a link", b"3": "a device", b"4": "a device", b"6": "a pipe", b"M": "a part of a file"}
"""Members without content of their own, which readers of webdataset pass over."""


class DamagedTar(ValueError):
    """The tar is truncated or a header is invalid; the samples after that point cannot be read."""


class CorruptSample(ValueError):
    """The sample cannot be used; it is counted under the message."""


@dataclass(frozen=True, slots=True)
class TarRecord:
    """One sample as stored: encoded image and caption, None if absent. `problem` says why it could not be read."""

    image: bytes | None = None
    caption: bytes | None = None
    problem: str = ""
    key: str = ""
    """The members' common name."""
    repeated: int = 0
    """Members that are ignored because the sample has one of the same name; counted if the reading is strict."""


def read_records(
    file: BinaryIO,
    *,
    skip: int = 0,
    caption_suffix: str = "txt",
    strict: bool = False,
    on_unended: Callable[[], None] = lambda: None,
) -> Iterator[TarRecord]:
    """The samples of a tar, starting at number `skip`.

    Consecutive members whose names are equal up to the first dot form one sample, whose first image counts.

    Args:
        file: The tar.
        skip: Number of the first sample.
        caption_suffix: Of the member with the caption.
        strict: Refuse what readers would not see: links, and anything behind the zeros that end the tar.
        on_unended: Called if the tar ends behind a whole member, without the zeros that writers put there: perhaps it
            was cut between two members, and nothing else says so.

    Raises:
        DamagedTar: The tar is truncated or damaged; raised after the samples before the damage were yielded.
    """
    current, number, names, repeated = "", -1, set[str](), 0
    image: bytes | None = None
    caption: bytes | None = None
    try:
        for name, size, _ in _members(file, strict=strict, on_unended=on_unended):
            sample, suffix = split_name(name)
            if sample != current:
                if number >= skip:
                    yield TarRecord(image=image, caption=caption, key=current, repeated=repeated)
                current, number, image, caption = sample, number + 1, None, None
                names, repeated = set(), 0
            if strict:
                repeated += suffix in names
                names.add(suffix)
            if number >= skip and suffix == caption_suffix:
                caption = _payload(file, size)
            elif number >= skip and suffix in IMAGE_SUFFIXES and image is None:
                image = _payload(file, size)
            else:
                _skip(file, size)
    except DamagedTar:
        if image is not None and caption is not None:
            yield TarRecord(image=image, caption=caption, key=current)
        raise
    if number >= skip:
        yield TarRecord(image=image, caption=caption, key=current, repeated=repeated)


def record_offset(file: BinaryIO, number: int) -> int:
    """The byte at which sample `number` starts; reads headers only.

    Raises:
        DamagedTar: The tar holds fewer samples, or is damaged before this one.
    """
    count = 0
    for count, (_, start) in enumerate(samples(file), 1):
        if count > number:
            return start
    raise DamagedTar(f"has {count} samples, so there is no sample {number}")


def samples(
    file: BinaryIO, *, strict: bool = False, on_unended: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, int]]:
    """Key and first byte of each sample; reads headers only. `strict` and `on_unended` are those of `read_records`.

    Raises:
        DamagedTar: The tar is truncated or damaged.
    """
    current = ""
    for name, size, start in _members(file, strict=strict, on_unended=on_unended):
        sample, _ = split_name(name)
        if sample != current:
            yield sample, start
        current = sample
        _skip(file, size)


def members(
    file: BinaryIO, *, wanted: Callable[[str], bool] = lambda suffix: False, strict: bool = False
) -> Iterator[tuple[str, bytes]]:
    """The name of each member and, if its suffix is `wanted`, its payload, else nothing; `strict` as in `read_records`.

    Raises:
        DamagedTar: The tar is truncated or damaged.
    """
    for name, size, _ in _members(file, strict=strict):
        payload = _payload(file, size) if wanted(split_name(name)[1]) else b""
        if not payload:
            _skip(file, size)
        yield name, payload


def split_name(name: str) -> tuple[str, str]:
    """`a/b.c.JPG` -> `("a/b", "c.jpg")`: webdataset's rule, the first dot of the last part."""
    folder, slash, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return folder + slash + stem, suffix.lower()


def _members(
    file: BinaryIO, *, strict: bool = False, on_unended: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, int, int]]:
    """`(name, size, first byte)` of each regular member; the caller must read or skip its padded payload."""
    override: dict[str, str] = {}
    start = position = 0
    end = _bytes_left(file)
    while True:
        header = file.read(BLOCK)
        if header.count(0) == len(header):
            if not header:
                on_unended()
            elif strict:
                _check_end(file)
            return
        name, size, kind = _parse(header)
        position += BLOCK
        if kind == PAX:
            override = _pax(_extension(file, size))
        elif kind == PAX_GLOBAL:
            _extension(file, size)
        elif kind == GNU_LONG_NAME:
            override = {"path": _extension(file, size).rstrip(b"\0").decode("utf-8", "surrogateescape")}
        else:
            size = _parsed_size(override["size"]) if "size" in override else size
            name = override.get("path", name)
            if end is not None and position + size + -size % BLOCK > end:  # a seek would go there without an error
                raise DamagedTar("ends inside a file")
            if kind == SPARSE or any(keyword.startswith("GNU.sparse.") for keyword in override):
                raise DamagedTar(f"holds {name!r:.99} as a sparse file: write the shard again without tar's --sparse")
            override = {}
            # Webdataset's rule, which ignores `README` and macOS's `._0.jpg`.
            is_part = name.rpartition("/")[2].find(".") > 0
            if is_part and kind in REGULAR:
                yield name, size, start
            elif is_part and strict and kind in SPECIAL:
                raise DamagedTar(
                    f"holds {name!r:.99} as {SPECIAL[kind]}, which readers of webdataset pass over: store the files "
                    "themselves (GNU tar: --dereference --hard-dereference)"
                )
            else:
                _skip(file, size)
        position += size + -size % BLOCK
        if kind not in (PAX, PAX_GLOBAL, GNU_LONG_NAME):
            start = position


def _check_end(file: BinaryIO) -> None:
    zeros, more = zeros_next(file)
    if more:
        raise DamagedTar(
            "has zeros where a file should begin, and more behind them: a part of it was overwritten, or two "
            "archives were joined, which have to be separate shards"
        )
    if zeros > PADDING:
        raise DamagedTar(f"ends in {zeros:,} zero bytes, more than any padding: was its download not finished?")


def _bytes_left(file: BinaryIO) -> int | None:
    """How much follows in a file, or None for a stream that cannot seek."""
    if not file.seekable():
        return None
    here = file.tell()
    left = file.seek(0, 2) - here
    file.seek(here)
    return left


def _parse(header: bytes) -> tuple[str, int, bytes]:
    """Name, payload size and type of a header."""
    if len(header) < BLOCK:
        raise DamagedTar("ends inside a header")
    if header[:2] == b"\x1f\x8b":
        raise DamagedTar("is compressed, so readers cannot seek in it: store it as a plain tar")
    try:
        stored = int(header[148:156].rstrip(b"\0 ") or b"0", 8)
        field = header[124:136]  # octal, or GNU's base-256 encoding for 8 GiB and more
        size = int.from_bytes(field[1:], "big") if field[0] & 0x80 else int(field.strip(b"\0 ") or b"0", 8)
    except ValueError as error:
        raise DamagedTar("has a damaged header") from error
    if not 0 <= size <= LARGEST:
        raise DamagedTar("has a damaged header")
    if stored != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise DamagedTar("has a header with a wrong checksum")
    name = header[:100].partition(b"\0")[0]
    if header[257:262] == b"ustar" and header[345]:
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return name.decode("utf-8", "surrogateescape"), size, header[156:157]


def _parsed_size(text: str) -> int:
    """The size in a PAX record, which replaces that of the header."""
    try:
        size = int(text)
    except ValueError as error:
        raise DamagedTar("has a damaged PAX header") from error
    if not 0 <= size <= LARGEST:
        raise DamagedTar("has a damaged PAX header")
    return size


def _pax(payload: bytes) -> dict[str, str]:
    """The records `length key=value\n` of a PAX header."""
    found: dict[str, str] = {}
    position = 0
    while position < len(payload):
        space = payload.find(b" ", position, position + 20)
        digits = payload[position : max(space, 0)]
        end = position + int(digits) if digits.isdigit() else 0
        if not position < space < end <= len(payload):
            raise DamagedTar("has a damaged PAX header")
        keyword, _, value = payload[space + 1 : end - 1].partition(b"=")
        found[keyword.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        position = end
    return found


def _extension(file: BinaryIO, size: int) -> bytes:
    """The payload of a PAX header or a long name."""
    if size > LARGEST_EXTENSION:
        raise DamagedTar("has a damaged header")
    return _payload(file, size)


def _payload(file: BinaryIO, size: int) -> bytes:
    if size > LARGEST_PAYLOAD:
        raise DamagedTar(f"has a file of {size:,} bytes, which is no image or caption")
    data = file.read(size) if size <= PIECE else b"".join(_pieces(file, size))
    if len(data) < size:
        raise DamagedTar("ends inside a file")
    _skip(file, size, read=size)
    return data


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    """`size` bytes, or as many as there are."""
    while size and (piece := file.read(min(size, PIECE))):
        yield piece
        size -= len(piece)


def _skip(file: BinaryIO, size: int, *, read: int = 0) -> None:
    """Go past a file of `size` bytes and its padding, of which `read` bytes were read."""
    left = size + -size % BLOCK - read
    if file.seekable():
        file.seek(left, 1)
        return
    while left:
        piece = file.read(min(left, 1 << 20))
        if not piece:
            raise DamagedTar("ends inside a file")
        left -= len(piece)


@dataclass(frozen=True)
class CaptionField:
    """The setting `data.caption`: suffix of the member and, if that is JSON, the name of the field."""

    suffix: str = "txt"
    field: str | None = None

    @classmethod
    def parse(cls, text: str, *, option: str = "") -> CaptionField:
        """Parse `txt`, another suffix, or `json:FIELD`, which was given by an option of the command line.

        Raises:
            UserError: `text` is none of these.
        """
        suffix, colon, field = text.partition(":")
        valid = suffix == "json" and field if colon else suffix and not suffix.startswith(".") and "/" not in suffix
        if not valid or suffix.lower() in IMAGE_SUFFIXES:
            given = f"{option} {text!r}".strip()
            raise UserError(f"{given} is neither the suffix of a caption, such as txt, nor json:FIELD")
        return cls(suffix.lower(), field if colon else None)

    def __str__(self) -> str:
        return self.suffix if self.field is None else f"{self.suffix}:{self.field}"

    def read(self, record: TarRecord, *, state: int = 0) -> str:
        """The caption of a sample; the hash key `state` draws one text where a JSON field holds several.

        Raises:
            CorruptSample: The caption is missing, empty or not UTF-8.
        """
        if record.caption is None:
            raise CorruptSample("caption is missing")
        try:
            text = record.caption.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptSample("caption is not UTF-8") from error
        if self.field is not None:
            text = _choose(_field(text, self.field), state)
        if not text.strip():
            raise CorruptSample("caption is empty")
        return text


def _field(text: str, name: str) -> Any:
    try:
        return json.loads(text).get(name)
    except (ValueError, AttributeError, RecursionError) as error:
        raise CorruptSample("caption's JSON cannot be read") from error


def _choose(value: Any, state: int) -> str:
    texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str) and text.strip()]
    if not texts:
        raise CorruptSample("caption is missing")
    return texts[draw(state, 0) % len(texts)]
