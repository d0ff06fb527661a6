"""Why a URL gave no sample: one short name per cause, the same in every record, manifest and report."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import urllib.error

TIMEOUT = "timeout"
DNS = "dns"
CONNECTION = "connection"
TLS = "tls"
CUT_OFF = "cut off"
REDIRECTS = "redirects"
BAD_URL = "bad url"
REFUSED_SCHEME = "refused scheme"
REFUSED_ADDRESS = "refused address"
OPTED_OUT = "opted out"
REMOVED = "removed"
EMPTY = "empty"
NOT_AN_IMAGE = "not an image"
TRUNCATED = "truncated"
TOO_MANY_BYTES = "too many bytes"
TOO_MANY_PIXELS = "too many pixels"
TOO_SMALL = "too small"
EXTREME_ASPECT = "extreme aspect ratio"
HASH_MISMATCH = "hash mismatch"
UNDECODABLE = "undecodable"
NOT_ENCODED = "not encoded"
TOO_LITTLE_MEMORY = "too little memory"
QUARANTINED = "quarantined"
NO_CAPTION = "no caption"
INTERNAL = "internal error"
KNOWN = frozenset(value for name, value in globals().items() if name.isupper() and isinstance(value, str))

# Added to messages about refused addresses.
ALLOW_HINT = "loopback and private addresses are fetched only when guard.allow_addresses lists them"

# Failures that may be transient: a retry requests only these again.
TRANSIENT = frozenset({TIMEOUT, DNS, CONNECTION, CUT_OFF, TOO_LITTLE_MEMORY, INTERNAL})
TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})

_HTTP = re.compile(r"http \d{3}$")


class FetchError(Exception):
    """A URL gave no image: `str()` is "reason: detail", which img2dataset stores as the row's error message."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def is_transient(reason: str) -> bool:
    """Whether a later retry may succeed."""
    return reason in TRANSIENT or (bool(_HTTP.match(reason)) and int(reason[5:]) in TRANSIENT_STATUS)


def of_message(message: str) -> str:
    """The reason in the error message of a row.

    All our own messages begin with their reason. The only other message that img2dataset passes on is the error of
    `urllib.request.Request` for a URL that it cannot parse.
    """
    head = message.partition(":")[0]
    return head if head in KNOWN or _HTTP.match(head) else BAD_URL


def of_exception(error: BaseException) -> FetchError:
    """Convert a network error to a FetchError; `urllib` wraps the cause in URLError."""
    if isinstance(error, FetchError):
        return error
    if isinstance(error, urllib.error.HTTPError):
        text = str(error.reason).split("\n")[0]
        if 300 <= error.code < 400:
            return FetchError(REFUSED_SCHEME if "not allowed" in text else REDIRECTS, text)
        return FetchError(f"http {error.code}", text)
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, FetchError):
        return cause
    kinds: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
        (TimeoutError, TIMEOUT),
        (socket.gaierror, DNS),
        (ssl.SSLError, TLS),
        (http.client.IncompleteRead, CUT_OFF),
        (http.client.InvalidURL, BAD_URL),
        ((OSError, http.client.HTTPException), CONNECTION),
        ((ValueError, UnicodeError), BAD_URL),
    )
    for kind, reason in kinds:
        if isinstance(cause, kind):
            return FetchError(reason, f"{type(cause).__name__} {cause}".strip())
    return FetchError(CONNECTION, f"{type(error).__name__} {error}")
