"""One pair of a source, and what every kind of source offers."""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from data_prep import reasons

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
    """The texts of a caption field: one text, or a list of texts (or of mappings that hold one, as COCO has them)."""
    found = []
    for item in value if isinstance(value, list | tuple) else [value]:
        text = item.get("raw", item.get("caption", item.get("text"))) if isinstance(item, Mapping) else item
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
    """Which byte makes a text no UTF-8, and what to do."""
    found = error.object[error.start]
    byte = found if isinstance(found, int) else ord(found) & 0xFF  # a surrogate stands for the byte
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
