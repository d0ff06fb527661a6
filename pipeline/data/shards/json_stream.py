"""Read and write a JSON object with one long array without holding it in memory."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

_CHUNK = 1 << 20
_BLANK = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def read_object(file: TextIO, *, items_of: str) -> Iterator[tuple[str, Any]]:
    """The members of the JSON object in a file, in order.

    Args:
        file: the text.
        items_of: the member that is an array; its items are yielded one by one, each with this key.

    Raises:
        ValueError: the file does not hold a JSON object.
    """
    text = _Window(file)
    text.take("{")
    end = text.peek()
    while end != "}":
        key = text.value()
        text.take(":")
        if key != items_of:
            yield key, text.value()
        else:
            text.take("[")
            more = text.peek() != "]"
            if not more:
                text.take("]")
            while more:
                yield key, text.value()
                more = text.take(",]") == ","
        end = text.take(",}")


def write_object(file: TextIO, header: Mapping[str, Any], *, items_of: str, items: Iterable[Any]) -> None:
    """Write a JSON object whose last member, `items_of`, is an array; the text of `json.dumps(..., indent=1)`."""
    start, end = json.dumps({**header, items_of: []}, indent=1).rsplit("[]", 1)
    file.write(start + "[")
    separator = "\n"
    for item in items:
        file.write(separator + textwrap.indent(json.dumps(item, indent=1), "  "))
        separator = ",\n"
    file.write(("]" if separator == "\n" else "\n ]") + end + "\n")


class _Window:
    """The part of a text file that is being parsed."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at = file, "", 0

    def peek(self) -> str:
        """The next character that is not blank."""
        while True:
            found = _BLANK.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                raise ValueError("the file ends too early")

    def take(self, expected: str) -> str:
        """Pass over the next character, which must be one of `expected`."""
        found = self.peek()
        if found not in expected:
            raise ValueError(f"there is {found!r} in place of {' or '.join(expected)}")
        self._at += 1
        return found

    def value(self) -> Any:
        """Parse the next value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError:
                if not self._read():
                    raise
                continue
            if end == len(self._text) and self._read():  # the digits of a number may go on
                continue
            self._at = end
            return value

    def _read(self) -> bool:
        chunk = self._file.read(_CHUNK)
        self._text, self._at = self._text[self._at :] + chunk, 0
        return bool(chunk)
