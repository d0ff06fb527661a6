"""Where a sample's caption is: in a member of the tar, or in a field of its JSON member."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pipeline.data.order.hashing import draw
from pipeline.data.shards.tar_reader import IMAGE_SUFFIXES, CorruptSample, TarRecord


@dataclass(frozen=True)
class CaptionField:
    """The setting `data.caption`: suffix of the member and, if that is JSON, the name of the field."""

    suffix: str = "txt"
    field: str | None = None

    @classmethod
    def parse(cls, text: str) -> CaptionField:
        """Parse `txt`, another suffix, or `json:FIELD`.

        Raises:
            ValueError: `text` is none of these.
        """
        suffix, colon, field = text.partition(":")
        valid = suffix == "json" and field if colon else suffix and not suffix.startswith(".") and "/" not in suffix
        if not valid or suffix.lower() in IMAGE_SUFFIXES:
            raise ValueError(f"{text!r} is neither the suffix of a caption, such as txt, nor json:FIELD")
        return cls(suffix.lower(), field if colon else None)

    def __str__(self) -> str:
        return self.suffix if self.field is None else f"{self.suffix}:{self.field}"

    def read(self, record: TarRecord, *, state: int = 0) -> str:
        """The caption of a sample.

        Args:
            record: The stored sample.
            state: Hash key that draws one text where a JSON field holds several.

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
