"""One pair of a source, and what every kind of source offers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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


def checked(pair: Pair) -> Pair:
    """The pair, or the reason why its captions cannot be used."""
    if pair.problem:
        return pair
    if not pair.captions:
        return Pair(pair.place, problem=reasons.NO_CAPTION)
    try:
        for caption in pair.captions:
            caption.encode("utf-8")
    except UnicodeEncodeError as error:
        return Pair(pair.place, problem=NOT_UTF8, detail=str(error))
    return pair
