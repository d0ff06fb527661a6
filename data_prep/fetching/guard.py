"""What may be fetched: URLs, the addresses that may be connected to, and rules for responses, such as opt-outs.

Of a name, the address that was checked is used, whatever the name resolves to then. A rule is a function with `@rule`,
which raises a FetchError with a reason from `data_prep/reasons.py`. It sees the URL and the headers of every response
and redirect before the body is read, in every worker of every distributor.

Opt-outs are in `X-Robots-Tag` headers. A header holds comma-separated directives, some of which have values
(`unavailable_after: 25 Jun 2010 15:00 GMT`), and may hold sections for named crawlers (`otherbot: noindex, nofollow`).
Several headers are combined; proxies join them with commas. The strictest applicable directive wins. Misspelt headers
(`X_Robots_Tag`, `Robots`) and directives (`no-ai`, full-width letters) count, too: what their owners want is clear.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import unicodedata
import urllib.parse
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email import errors
from email.message import Message
from email.utils import parsedate_to_datetime

from data_prep import reasons
from data_prep.download_config import GuardConfig
from data_prep.reasons import FetchError

# Special addresses that Python 3.11 considers global.
_SPECIAL = [
    ipaddress.ip_network(text)
    for text in (
        "168.63.129.16/32",  # a cloud's metadata service
        "192.0.0.0/24",  # protocol assignments, metadata services among them
        "192.88.99.0/24",  # 6to4 relays, deprecated (RFC 7526)
        "64:ff9b:1::/48",  # NAT64 of a network's own (RFC 8215): the address does not say where it leads
        "100:0:0:1::/64",  # dummy prefix (RFC 9780)
        "3fff::/20",  # documentation (RFC 9637)
        "5f00::/16",  # segment routing (RFC 9602)
    )
]
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Python considers some multicast, reserved (::/96) and site-local ones global, too.
_KINDS = ("unspecified", "loopback", "link_local", "site_local", "multicast", "private", "reserved")


class AddressFilter:
    """Decides whether an address may be connected to."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = [ipaddress.ip_network(text, strict=False) for text in allowed]

    def check(self, text: str) -> None:
        """Refuse an IP address that is special and not explicitly allowed.

        Raises:
            FetchError: The address is refused.
        """
        address = ipaddress.ip_address(text.partition("%")[0])
        if any(address in network for network in self._allowed):
            return
        if isinstance(address, ipaddress.IPv6Address):  # perhaps with an IPv4 address in it
            nat64 = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
            teredo = address.teredo[1] if address.teredo else None
            if inner := nat64 or address.ipv4_mapped or address.sixtofour or teredo:
                self.check(str(inner))
                return
        is_special = not address.is_global or any(address in network for network in _SPECIAL)
        kind = next((kind for kind in _KINDS if getattr(address, f"is_{kind}", False)), None)
        if is_special or kind:
            what = kind.replace("_", "-") if kind else "not a public address"
            raise FetchError(reasons.REFUSED_ADDRESS, f"{address} is {what}")


def checked_url(url: str, *, what: str = "") -> urllib.parse.SplitResult:
    """The parts of a URL as it is sent.

    Credentials found on the web are not used.

    Raises:
        FetchError: It is not a URL that can be requested (bad url, refused scheme).
    """
    try:
        parts = urllib.parse.urlsplit(url)
        if not url.isascii() or " " in url:  # host names in IDNA, other characters percent-encoded
            host, colon, port = parts.netloc.partition(":")
            if not parts.netloc.isascii():  # so it is no IPv6 address, whose colons do not separate a port
                host = host.encode("idna").decode()
            path, query = (urllib.parse.quote(part, safe="%/:=&?~#+!$,;'@()*[]|") for part in (parts.path, parts.query))
            sent = parts._replace(netloc=host + colon + port, path=path, query=query, fragment="")
            parts = urllib.parse.urlsplit(sent.geturl())  # which refuses what has become of an odd host
        if not parts.scheme:
            raise ValueError(f"unknown url type: {url!r:.80}")
        if parts.scheme not in ("http", "https"):
            raise FetchError(reasons.REFUSED_SCHEME, f"{what}{parts.scheme}")
        if "@" in parts.netloc:
            raise ValueError("a user name before the host")
        if not parts.hostname or parts.port == 0:
            raise ValueError("no host, or port 0")
    except ValueError as error:
        raise FetchError(reasons.BAD_URL, str(error)) from error
    return parts


Rule = Callable[[str, Message, GuardConfig], None]
_RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Register a rule: a function of URL, headers and settings."""
    _RULES.append(function)
    return function


def check_response(url: str, headers: Message, guard: GuardConfig) -> None:
    """Apply all rules to a response or a redirect.

    Raises:
        FetchError: A rule refuses it.
    """
    for check in _RULES:
        check(url, headers, guard)


# The parser takes the headers for a whole message, whose type may be `multipart`.
_OF_BODIES = (
    errors.NoBoundaryInMultipartDefect,
    errors.StartBoundaryNotFoundDefect,
    errors.MultipartInvariantViolationDefect,
    errors.InvalidMultipartContentTransferEncodingDefect,
)
# Directives are compared without hyphens and underscores, see `_joined`.
_WITH_VALUE = frozenset({"maxsnippet", "maximagepreview", "maxvideopreview"})
# Names that a colon does not turn into a crawler's: `noindex: true` is taken for `noindex`.
_DIRECTIVES = frozenset({*_WITH_VALUE, "unavailableafter", "none", "noai", "noimageai", "noindex", "noimageindex"}) | {
    *("all", "index", "follow", "nofollow", "noarchive", "nocache", "nosnippet", "notranslate", "noodp", "noydir"),
    *("indexifembedded", "nositelinkssearchbox"),
}
_EVERYONE = ("*", "robots")
_CRAWLER = re.compile(r"^(?:\*|[a-z][a-z0-9_.-]*(?:/[a-z0-9_.-]*)?)$")
# `X-Robots-Tag`, and what servers write instead.
_HEADER = re.compile(r"(?:x[-_])?robots(?:[-_]?tags?)?", re.IGNORECASE)
# In another header's value, behind a line break that is none in HTTP.
_HEADER_WITHIN = re.compile(r"(?:x[-_])?robots[-_]?tags?\s*:", re.IGNORECASE)
# Some servers put directives in quotes or brackets.
_ODD = re.compile(r"[^a-z0-9\s*._/:;,=+-]")
_WORD = re.compile(r"[a-z_-]+")
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
    values = (value for name, value in headers.items() if not _HEADER.fullmatch(name))
    is_odd = any(rest) or any(not isinstance(defect, _OF_BODIES) for defect in headers.defects)
    if is_odd or any(_HEADER_WITHIN.search(str(value)) for value in values):
        raise FetchError(reasons.BAD_HEADERS, "a line of them is not `name: value`")
    for line in (str(value) for name, value in headers.items() if _HEADER.fullmatch(name)):
        if not set(_directives(line, guard.user_agent.lower())).isdisjoint(guard.opt_outs):
            raise FetchError(reasons.OPTED_OUT, "X-Robots-Tag")


def _joined(directive: str) -> str:
    """`no-ai` and `no_ai` as `noai`."""
    return directive.replace("-", "").replace("_", "")


def _directives(line: str, user_agent: str) -> Iterator[str]:
    """The directives of one header that apply to us, in lower case; `none` and a date that is over as `noindex`."""
    with contextlib.suppress(UnicodeError):  # http.client reads the bytes as Latin-1
        line = line.encode("latin-1").decode()
    line = unicodedata.normalize("NFKC", line).lower()  # full-width letters
    applies = True
    parts = [part.strip() for part in re.split("[,;]", _ODD.sub(" ", line))]
    for place, part in enumerate(parts):
        name, colon, value = (text.strip() for text in part.partition(":"))
        if name != "robots" and _HEADER.fullmatch(name):  # the header's name once more
            name, colon, value = value, "", ""
        if colon and _joined(name) not in _DIRECTIVES and _CRAWLER.match(name):
            applies = name in _EVERYONE or name.partition("/")[0] == user_agent
            name, _, value = (text.strip() for text in value.partition(":"))
        if not applies or (colon and _joined(name) in _WITH_VALUE):
            continue
        if _joined(name) == "unavailableafter":  # a date may hold a comma, after the weekday or before the year
            texts = (value, ", ".join([value, *parts[place + 1 : place + 2]]))
            if any(_is_past(text.upper()) for text in texts):
                yield "noindex"
            continue
        # Servers separate directives with spaces or colons, or write `noai=1`.
        for word in _WORD.findall(f"{name} {value}"):
            yield "noindex" if word == "none" else _joined(word)


def _is_past(text: str) -> bool:
    """Whether a text is a date in the past, in any of the forms that servers send."""
    plain = _ZONE.sub("", text)
    tries: list[tuple[Callable[[str], datetime], str]] = [
        (parsedate_to_datetime, text),
        (datetime.fromisoformat, text),
        (datetime.fromisoformat, plain),
        *((lambda given, form=form: datetime.strptime(given, form), plain) for form in _DATES),
    ]
    for parse, given in tries:
        with contextlib.suppress(TypeError, ValueError, IndexError):
            date = parse(given)
            return (date if date.tzinfo else date.replace(tzinfo=UTC)) < datetime.now(UTC)
    return False
