"""Why a URL gave no sample: one short name per cause, the same in every record, manifest and report."""

from __future__ import annotations

import re

from pipeline import pictures

TIMEOUT = "timeout"
DNS = "dns"
CONNECTION = "connection"
TLS = "tls"
CUT_OFF = "cut off"
REDIRECTS = "redirects"
BAD_HEADERS = "bad headers"
BAD_URL = "bad url"
REFUSED_SCHEME = "refused scheme"
REFUSED_ADDRESS = "refused address"
OPTED_OUT = "opted out"
REMOVED = "removed"
EMPTY = "empty"
NOT_AN_IMAGE = pictures.NOT_AN_IMAGE
UNSUPPORTED = pictures.UNSUPPORTED
TRUNCATED = pictures.TRUNCATED
TOO_MANY_BYTES = "too many bytes"
TOO_MANY_PIXELS = pictures.TOO_MANY_PIXELS
TOO_MANY_SCANS = pictures.TOO_MANY_SCANS
TOO_SMALL = "too small"
EXTREME_ASPECT = "extreme aspect ratio"
HASH_MISMATCH = "hash mismatch"
NO_HASH = "no hash"
UNDECODABLE = pictures.UNDECODABLE
NOT_ENCODED = "not encoded"
TOO_LITTLE_MEMORY = "too little memory"
TOO_SLOW = "too slow to decode"
QUARANTINED = "quarantined"
NO_CAPTION = "no caption"
INTERNAL = "internal error"
MEANINGS = {
    "timeout": "no answer, or not all of it, in time",
    "dns": "the host name does not resolve",
    "connection": "refused, reset or closed without an answer",
    "tls": "the certificate or the encryption failed",
    "cut off": "fewer bytes received than announced",
    "redirects": "too many redirects, or a loop",
    "bad headers": "a line of the response's headers cannot be read, and may have been an opt-out",
    "bad url": "not a URL that can be requested",
    "refused scheme": "neither http nor https",
    "refused address": "private, loopback or another special address",
    "opted out": "the owner's headers say not to use it (X-Robots-Tag)",
    "removed": "on this set's removal list",
    "empty": "an answer without a body",
    "not an image": "a page or another file where an image should be",
    "truncated": "an image file that stops before its end",
    "too many bytes": "larger than guard.max_bytes",
    "too many pixels": "larger than guard.max_pixels",
    "too many scans": "a JPEG that would take minutes to decode",
    "unsupported format": "HEIC, JPEG XL, EPS or another format that is not read",
    "too small": "smaller than image.min_size",
    "extreme aspect ratio": "longer than image.max_aspect_ratio",
    "no hash": "the table has no hash for it, so it cannot be verified",
    "hash mismatch": "no longer the file that was published",
    "undecodable": "the image decoder failed",
    "not encoded": "the image could not be encoded",
    "too little memory": "decoding it needs more memory than the machine had left",
    "quarantined": "decoding it killed its process twice",
    "too slow to decode": "decoding it took longer than 30 seconds, twice",
    "no caption": "the table has no text for it",
    "internal error": "lost to a bug in neuclip",
    "http 403": "forbidden",
    "http 404": "not found",
    "http 410": "gone for good",
    "http 429": "asked too often",
    "http 503": "temporarily unavailable",
}
"""What the report says about each reason."""

# Added to messages about downloads that give hardly any samples.
HINTS = {
    REFUSED_ADDRESS: "loopback and private addresses are fetched only when guard.allow_addresses lists them",
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
