"""Why a URL gave no sample: one short name per cause, the same in every record, manifest and report."""

from __future__ import annotations

import re

from pipeline import pictures

MEANINGS: dict[str, str] = {
    "http 403": "forbidden",
    "http 404": "not found",
    "http 410": "gone for good",
    "http 429": "asked too often",
    "http 503": "temporarily unavailable",
}
"""What the report says about each reason."""


def _reason(name: str, meaning: str) -> str:
    MEANINGS[name] = meaning
    return name


TIMEOUT = _reason("timeout", "no answer, or not all of it, in time")
DNS = _reason("dns", "the host name does not resolve")
CONNECTION = _reason("connection", "refused, reset or closed without an answer")
TLS = _reason("tls", "the certificate or the encryption failed")
CUT_OFF = _reason("cut off", "fewer bytes received than announced")
REDIRECTS = _reason("redirects", "too many redirects, or a loop")
BAD_HEADERS = _reason("bad headers", "a line of the response's headers cannot be read, and may have been an opt-out")
BAD_URL = _reason("bad url", "not a URL that can be requested")
REFUSED_SCHEME = _reason("refused scheme", "neither http nor https")
REFUSED_ADDRESS = _reason("refused address", "private, loopback or another special address")
OPTED_OUT = _reason("opted out", "the owner's headers say not to use it (X-Robots-Tag)")
REMOVED = _reason("removed", "on this set's removal list")
EMPTY = _reason("empty", "an answer without a body")
NOT_AN_IMAGE = _reason(pictures.NOT_AN_IMAGE, "a page or another file where an image should be")
UNSUPPORTED = _reason(pictures.UNSUPPORTED, "HEIC, JPEG XL, EPS or another format that is not read")
TRUNCATED = _reason(pictures.TRUNCATED, "an image file that stops before its end")
TOO_MANY_BYTES = _reason("too many bytes", "larger than guard.max_bytes")
TOO_MANY_PIXELS = _reason(pictures.TOO_MANY_PIXELS, "larger than guard.max_pixels")
TOO_MANY_SCANS = _reason(pictures.TOO_MANY_SCANS, "a JPEG that would take minutes to decode")
TOO_SMALL = _reason("too small", "smaller than image.min_size")
EXTREME_ASPECT = _reason("extreme aspect ratio", "longer than image.max_aspect_ratio")
HASH_MISMATCH = _reason("hash mismatch", "no longer the file that was published")
NO_HASH = _reason("no hash", "the table has no hash for it, so it cannot be verified")
UNDECODABLE = _reason(pictures.UNDECODABLE, "the image decoder failed")
NOT_ENCODED = _reason("not encoded", "the image could not be encoded")
TOO_LITTLE_MEMORY = _reason("too little memory", "decoding it needs more memory than the machine had left")
TOO_SLOW = _reason("too slow to decode", "decoding it took longer than 30 seconds, twice")
QUARANTINED = _reason("quarantined", "decoding it killed its process twice")
NO_CAPTION = _reason("no caption", "the table has no text for it")
INTERNAL = _reason("internal error", "lost to a bug in neuclip")

# Added to messages about downloads that give hardly any samples.
HINTS = {
    REFUSED_ADDRESS: "loopback and private addresses need guard.allow_addresses, in a new output folder",
    HASH_MISMATCH: "source.hash must name hashes of the files as served; null verifies none, in a new output folder",
}

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


def meaning_of(reason: str) -> str:
    """A reason in words."""
    return MEANINGS.get(reason, "the server's answer" if _HTTP.match(reason) else "")


def of_message(message: str) -> str:
    """The reason in the error message of a row.

    All our own messages begin with their reason. The only other message that img2dataset passes on is the error of
    `urllib.request.Request` for a URL that it cannot parse.
    """
    head = message.partition(":")[0]
    return head if head in MEANINGS or _HTTP.match(head) else BAD_URL
