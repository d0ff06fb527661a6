"""Opt-outs in `X-Robots-Tag` headers.

A header holds comma-separated directives, some of which have values (`unavailable_after: 25 Jun 2010 15:00 GMT`),
and may hold sections for named crawlers (`otherbot: noindex, nofollow`). Several headers are combined; proxies join
them with commas. The strictest applicable directive wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime

_WITH_VALUE = frozenset({"max-snippet", "max-image-preview", "max-video-preview"})
_CRAWLER = re.compile(r"^(?:\*|[a-z][a-z0-9_.-]*(?:/[a-z0-9_.-]*)?)$")
_UNAVAILABLE = re.compile(r"unavailable_after\s*:\s*(?:[a-z]{3,9},?\s+)?([^,;]*)")


def is_opted_out(headers: Message, *, user_agent: str, opt_outs: Iterable[str]) -> bool:
    """Whether the headers of a response forbid its use.

    Args:
        headers: The headers of the response.
        user_agent: Our name, which a section may address.
        opt_outs: The directives that count.
    """
    wanted = {directive.lower() for directive in opt_outs}
    lines = headers.get_all("X-Robots-Tag", [])
    return bool(wanted) and any(not wanted.isdisjoint(_directives(str(line), user_agent.lower())) for line in lines)


def _directives(line: str, user_agent: str) -> Iterator[str]:
    """The directives of one header that apply to us, in lower case; `none` and a date that is over as `noindex`."""
    applies, line = True, line.lower()
    for part in re.finditer(r"[^,;]+", line):
        name, colon, value = (text.strip() for text in part[0].partition(":"))
        if colon and name not in _WITH_VALUE and name != "unavailable_after" and _CRAWLER.match(name):
            applies = name == "*" or name.partition("/")[0] == user_agent
            name = value.partition(":")[0].strip()
        if not applies or (colon and name in _WITH_VALUE):
            continue
        if name == "unavailable_after":
            date = _UNAVAILABLE.search(line, part.start())  # a date with a weekday continues after the next comma
            name = "noindex" if date and _is_past(date[1].strip().upper()) else ""
        yield "noindex" if name == "none" else name


def _is_past(text: str) -> bool:
    for parse in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            date = parse(text)
        except (TypeError, ValueError, IndexError):
            continue
        return (date if date.tzinfo else date.replace(tzinfo=UTC)) < datetime.now(UTC)
    return False
