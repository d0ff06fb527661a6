"""Opt-outs in `X-Robots-Tag` headers.

A header holds comma-separated directives, some of which have values (`unavailable_after: 25 Jun 2010 15:00 GMT`),
and may hold sections for named crawlers (`otherbot: noindex, nofollow`). Several headers are combined; proxies join
them with commas. The strictest applicable directive wins.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from email import errors
from email.message import Message
from email.utils import parsedate_to_datetime

from data_prep import reasons
from data_prep.fetching.rules import rule
from data_prep.reasons import FetchError
from data_prep.settings.download_config import GuardConfig

# The parser takes the headers for a whole message, whose type may be `multipart`.
_OF_BODIES = (
    errors.NoBoundaryInMultipartDefect,
    errors.StartBoundaryNotFoundDefect,
    errors.MultipartInvariantViolationDefect,
    errors.InvalidMultipartContentTransferEncodingDefect,
)
_WITH_VALUE = frozenset({"max-snippet", "max-image-preview", "max-video-preview"})
# Names that a colon does not turn into a crawler's: `noindex: true` is taken for `noindex`.
_DIRECTIVES = frozenset({*_WITH_VALUE, "unavailable_after", "none", "noai", "noimageai", "noindex", "noimageindex"}) | {
    *("all", "index", "follow", "nofollow", "noarchive", "nocache", "nosnippet", "notranslate", "noodp", "noydir"),
    *("indexifembedded", "nositelinkssearchbox"),
}
_EVERYONE = ("*", "robots")
_CRAWLER = re.compile(r"^(?:\*|[a-z][a-z0-9_.-]*(?:/[a-z0-9_.-]*)?)$")
# Some servers put directives in quotes or brackets.
_ODD = re.compile(r"[^a-z0-9\s*._/:;,=+-]")
_WORD = re.compile(r"[a-z-]+")
_ZONE = re.compile(r"\s+[A-Z]{2,5}$")
_DATES = ("%d %b %Y", "%d %B %Y", "%b %d %Y", "%B %d %Y", "%b %d, %Y", "%B %d, %Y")


@rule
def check_opt_out(url: str, headers: Message, guard: GuardConfig) -> None:
    """Refuse a response whose headers opt out, or of which some cannot be read: they may have opted out.

    http.client takes a line without a colon for the end of the headers.
    """
    whole, *parts = headers.walk()
    texts = (part.get_payload() for part in (whole, *parts))
    rest = [*(part.keys() for part in parts), *(text for text in texts if isinstance(text, str))]
    if any(rest) or any(not isinstance(defect, _OF_BODIES) for defect in headers.defects):
        raise FetchError(reasons.BAD_HEADERS, "a line of them is not `name: value`")
    if is_opted_out(headers, user_agent=guard.user_agent, opt_outs=guard.opt_outs):
        raise FetchError(reasons.OPTED_OUT, "X-Robots-Tag")


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
    applies = True
    parts = [part.strip() for part in re.split("[,;]", _ODD.sub(" ", line.lower()))]
    for place, part in enumerate(parts):
        name, colon, value = (text.strip() for text in part.partition(":"))
        if name == "x-robots-tag":  # the header's name once more
            name, colon, value = value, "", ""
        if colon and name not in _DIRECTIVES and _CRAWLER.match(name):
            applies = name in _EVERYONE or name.partition("/")[0] == user_agent
            name, _, value = (text.strip() for text in value.partition(":"))
        if not applies or (colon and name in _WITH_VALUE):
            continue
        if name == "unavailable_after":  # a date may hold a comma, after the weekday or before the year
            texts = (value, ", ".join([value, *parts[place + 1 : place + 2]]))
            yield "noindex" if any(_is_past(text.upper()) for text in texts) else ""
            continue
        # Servers separate directives with spaces or colons, or write `noai=1`.
        for word in _WORD.findall(f"{name} {value}"):
            yield "noindex" if word == "none" else word


def _is_past(text: str) -> bool:
    """Whether a text is a date in the past, in any of the forms that servers send."""
    date = next(_readings(text), None)
    return date is not None and (date if date.tzinfo else date.replace(tzinfo=UTC)) < datetime.now(UTC)


def _readings(text: str) -> Iterator[datetime]:
    plain = _ZONE.sub("", text)
    tries = [(parsedate_to_datetime, text), (datetime.fromisoformat, text), (datetime.fromisoformat, plain)]
    for parse, given in tries:
        with contextlib.suppress(TypeError, ValueError, IndexError):
            yield parse(given)
    for form in _DATES:
        with contextlib.suppress(ValueError):
            yield datetime.strptime(plain, form)
