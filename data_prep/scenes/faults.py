"""Simulated failures of URLs: a pure function of (config, index), so that the expected failures can be counted."""

from __future__ import annotations

import enum
import functools
import hashlib
import io
from collections import Counter
from collections.abc import Iterable

from PIL import Image

from data_prep.scenes.draws import Draws
from data_prep.scenes.render import jpeg
from data_prep.scenes.scenes_config import ScenesConfig

OVERSIZE_SIDE = 6_000  # pixels; a few hundred kB as JPEG, 108 MB once decoded


class Fault(enum.StrEnum):
    """What the server does with a URL. The values are the keys of `FaultRates`."""

    NOT_FOUND = "not_found"  # 404
    FORBIDDEN = "forbidden"  # 403
    GONE = "gone"  # 410
    TRUNCATED = "truncated"  # a JPEG that stops half-way, published in this state: the hash matches, decoding fails
    INCOMPLETE = "incomplete"  # the connection closes before the announced length
    HTML = "html"  # 200 with a page instead of an image
    WRONG_HASH = "wrong_hash"  # a valid image of a scene other than the published one
    OVERSIZE = "oversize"  # a valid JPEG of huge dimensions
    DISCONNECT = "disconnect"  # the connection closes without an answer
    TRANSIENT = "transient"  # 503 to the first request, then normal
    SLOW = "slow"  # normal, after up to `slow_seconds`
    STALL = "stall"  # no answer for `stall_seconds`, which exceeds the client's time-out
    NOAI = "noai"  # normal, with `X-Robots-Tag: noai`: the owner does not want it used for training
    NONE = "none"


# Faults of URLs that never give a usable sample, regardless of the client. OVERSIZE fails if the client limits the
# image area, STALL if its time-out is shorter than `stall_seconds`, NOAI if it honours opt-outs.
ALWAYS_FAILS = frozenset(
    {
        Fault.NOT_FOUND,
        Fault.FORBIDDEN,
        Fault.GONE,
        Fault.TRUNCATED,
        Fault.INCOMPLETE,
        Fault.HTML,
        Fault.WRONG_HASH,
        Fault.DISCONNECT,
    }
)


def fault_of(config: ScenesConfig, index: int) -> Fault:
    """The one fault of a URL, or `Fault.NONE`."""
    left = Draws(config.seed, index, "fault").unit()
    for name, rate in vars(config.faults).items():
        left -= rate
        if left < 0:
            return Fault(name)
    return Fault.NONE


def count_faults(config: ScenesConfig, indices: Iterable[int]) -> Counter[Fault]:
    """Number of URLs with each fault."""
    return Counter(fault_of(config, index) for index in indices)


def published(config: ScenesConfig, index: int) -> bytes:
    """The bytes whose SHA-256 is in the URL table."""
    fault = fault_of(config, index)
    if fault is Fault.TRUNCATED:
        return _cut(jpeg(config, index))
    if fault is Fault.OVERSIZE:
        return _oversize()
    return jpeg(config, index)


def served(config: ScenesConfig, index: int) -> bytes:
    """The body that the server sends when it answers with 200."""
    fault = fault_of(config, index)
    if fault is Fault.WRONG_HASH:
        return jpeg(config, index + 1)
    if fault is Fault.HTML:
        return b"<!doctype html><title>Moved</title><p>This picture is no longer available.</p>\n"
    return published(config, index)


def sha256(config: ScenesConfig, index: int) -> str:
    return hashlib.sha256(published(config, index)).hexdigest()


def _cut(body: bytes) -> bytes:
    return body[: len(body) // 3]


@functools.cache
def _oversize() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (OVERSIZE_SIDE, OVERSIZE_SIDE), (90, 120, 160)).save(buffer, "JPEG", quality=40)
    return buffer.getvalue()
