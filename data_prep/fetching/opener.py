"""The opener that img2dataset's `urlopen` calls go through: guarded, polite, and limited in bytes and seconds."""

from __future__ import annotations

import io
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Any

from data_prep import reasons
from data_prep.fetching.guard import AddressFilter, check_response
from data_prep.fetching.served_image import check_image
from data_prep.fetching.url_handlers import SCHEMES, Deadlines, ascii_url, check_authority, director_for
from data_prep.reasons import FetchError
from data_prep.settings.download_config import GuardConfig

_CHUNK = 1 << 16
MAX_BACKOFF = 30.0
"""Seconds for which a host is left alone at most."""


@dataclass
class _Host:
    """What this process knows about one host: free connections, and the end of its back-off."""

    slots: threading.Semaphore
    strikes: int = 0
    quiet_until: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Opener:
    """Replaces urllib's global opener (`urllib.request.install_opener`).

    Args:
        guard: What is refused. Opt-outs are read from the headers of every response, before its body.
        connections: Concurrent requests of this process to one host (the host of the row's URL).
        retries: Further attempts after a transient failure, each after the host's back-off.
        total_seconds: For one attempt, from connecting to the last byte, redirects included. A server that sends its
            handshake, headers or body byte by byte is abandoned.
    """

    def __init__(self, guard: GuardConfig, *, connections: int, retries: int, total_seconds: float) -> None:
        self._guard = guard
        self._retries = retries
        self._total_seconds = total_seconds
        self._deadlines = Deadlines(total_seconds, AddressFilter(guard.allow_addresses).connect)
        self._director = director_for(guard, self._deadlines)
        self._hosts: defaultdict[str, _Host] = defaultdict(lambda: _Host(threading.Semaphore(connections)))
        self._blocked: Mapping[str, str] = {}
        self._is_closed = False
        contact = f"; +{guard.contact}" if guard.contact else ""
        self.user_agent = f"Mozilla/5.0 (compatible; {guard.user_agent}{contact})"

    def begin(self, blocked: Mapping[str, str]) -> None:
        """Start a shard, of which the `blocked` URLs are not requested, each for its reason."""
        self._blocked, self._is_closed = blocked, False

    def close(self) -> None:
        """Refuse all further URLs at once: the shard has failed."""
        self._is_closed = True

    def open(self, request: urllib.request.Request | str, data: None = None, timeout: float = 10.0) -> io.BytesIO:
        """Fetch one image, whole; img2dataset reads nothing else of the response.

        Raises:
            FetchError: Its text begins with the reason.
        """
        if self._is_closed:
            raise FetchError(reasons.INTERNAL, "the shard has failed already")
        if isinstance(request, str):
            try:
                request = urllib.request.Request(request)
            except ValueError as error:
                raise FetchError(reasons.BAD_URL, str(error)) from error
        url = request.full_url
        if url in self._blocked:
            raise FetchError(self._blocked[url])
        host = self._host_of(request)
        for attempt in range(self._retries + 1):
            try:
                with host.slots:
                    time.sleep(max(0.0, host.quiet_until - time.monotonic()))
                    return self._attempt(request, host, timeout)
            except FetchError as error:
                if attempt == self._retries or not reasons.is_transient(error.reason):
                    raise
                time.sleep(min(self._guard.backoff * 2**attempt, MAX_BACKOFF))
        raise AssertionError("the loop returns or raises")

    def _host_of(self, request: urllib.request.Request) -> _Host:
        try:
            parts = urllib.parse.urlsplit(request.full_url)
            name = parts.hostname
        except ValueError as error:
            raise FetchError(reasons.BAD_URL, str(error)) from error
        if parts.scheme.lower() not in SCHEMES:
            raise FetchError(reasons.REFUSED_SCHEME, parts.scheme or "none")
        if not name:
            raise FetchError(reasons.BAD_URL, "no host")
        check_authority(parts)
        return self._hosts[name]

    def _attempt(self, request: urllib.request.Request, host: _Host, timeout: float) -> io.BytesIO:
        # A new request each time, because urllib modifies it.
        headers = {**request.headers, "User-Agent": self.user_agent}
        with self._deadlines.attempt() as attempt:
            try:
                fresh = urllib.request.Request(ascii_url(request.full_url), headers=headers)
                with self._director.open(fresh, timeout=timeout) as response:
                    fetched = self._receive(response)
            except Exception as error:
                failure = self._late() if attempt.is_late else reasons.of_exception(error)
                self._strike(host, error, failure.reason)
                if isinstance(error, urllib.error.HTTPError):
                    error.close()  # it holds the connection, and lives on in `failure`
                raise failure from error
        if attempt.is_late:  # a body that was cut off can look complete if no length was announced
            raise self._late()
        host.strikes = 0
        return fetched

    def _late(self) -> FetchError:
        return FetchError(reasons.TIMEOUT, f"no complete response in {self._total_seconds:g} s")

    def _receive(self, response: Any) -> io.BytesIO:
        headers: Message = response.headers
        check_response(response.url, headers, self._guard)
        body = b"".join(self._chunks(response))
        announced = _announced(response)
        if announced is not None and len(body) < announced:
            raise FetchError(reasons.CUT_OFF, f"received {len(body)} of {announced} bytes")
        check_image(body, content_type=headers.get("Content-Type", ""), max_pixels=self._guard.max_pixels)
        return io.BytesIO(body)

    def _chunks(self, response: Any) -> Iterator[bytes]:
        announced, limit = _announced(response), self._guard.max_bytes
        if announced is not None and announced > limit:
            raise FetchError(reasons.TOO_MANY_BYTES, f"{announced} announced")
        received = 0
        while chunk := response.read1(_CHUNK):
            received += len(chunk)
            if received > limit:
                raise FetchError(reasons.TOO_MANY_BYTES, f"more than {limit}")
            yield chunk

    def _strike(self, host: _Host, error: Exception, reason: str) -> None:
        """Start a back-off for a host that reports too many requests."""
        if reason not in ("http 429", "http 503"):
            return
        requested = _retry_after(error)
        with host.lock:
            doubled = self._guard.backoff * 2 ** min(host.strikes, 16)
            host.strikes += 1
            pause = min(max(requested, doubled), MAX_BACKOFF)
            host.quiet_until = max(host.quiet_until, time.monotonic() + pause)


def _announced(response: Any) -> int | None:
    """The size of the body, where known: chunks override `Content-Length` (RFC 9112, section 6.3)."""
    return None if response.chunked else _number(response.headers.get("Content-Length", ""))


def _retry_after(error: Exception) -> float:
    """Seconds that a `Retry-After` header specifies (a number or a date); 0 when there is none."""
    text = error.headers.get("Retry-After", "") if isinstance(error, urllib.error.HTTPError) else ""
    seconds = _number(text)
    if seconds is not None:
        return float(seconds)
    try:
        date = parsedate_to_datetime(text)
        moment = date if date.tzinfo else date.replace(tzinfo=UTC)  # the older form of HTTP dates names no zone
        return max(0.0, moment.timestamp() - time.time())
    except (TypeError, ValueError, OverflowError, IndexError):
        return 0.0


def _number(text: str) -> int | None:
    """A header's number. Only ASCII digits count: `str.isdigit` also accepts superscripts, which `int` refuses."""
    text = text.strip()
    return int(text[:18]) if text.isascii() and text.isdigit() else None
