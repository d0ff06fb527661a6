"""The opener that img2dataset's `urlopen` calls go through: guarded, polite, and limited in bytes and seconds."""

from __future__ import annotations

import io
import string
import threading
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from urllib3.exceptions import InvalidHeader
from urllib3.util import Retry

from data_prep import reasons
from data_prep.fetching.connections import Connector, Deadline, failure_of
from data_prep.fetching.guard import AddressFilter, check_response
from data_prep.fetching.served_image import check_image
from data_prep.reasons import FetchError
from data_prep.settings.download_config import GuardConfig

_CHUNK = 1 << 16
MAX_BACKOFF = 30.0
"""Seconds for which a host is left alone at most."""
MAX_REDIRECTS = 5
"""Redirects followed for one URL."""


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
        self._connector = Connector(AddressFilter(guard.allow_addresses), trust_proxy=guard.trust_proxy)
        self._hosts: defaultdict[str, _Host] = defaultdict(lambda: _Host(threading.Semaphore(connections)))
        self._blocked: Mapping[str, str] = {}
        self._is_closed = False
        contact = f"; +{guard.contact}" if guard.contact else ""
        user_agent = f"Mozilla/5.0 (compatible; {guard.user_agent}{contact})"
        self._headers = {"User-Agent": user_agent, "Connection": "close"}

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
        url = request if isinstance(request, str) else request.full_url
        if url in self._blocked:
            raise FetchError(self._blocked[url])
        parts = _checked(url)
        host = self._hosts[str(parts.hostname)]
        for attempt in range(self._retries + 1):
            try:
                with host.slots:
                    time.sleep(max(0.0, host.quiet_until - time.monotonic()))
                    return self._attempt(parts, host, timeout)
            except FetchError as error:
                if attempt == self._retries or not reasons.is_transient(error.reason):
                    raise
                time.sleep(min(self._guard.backoff * 2**attempt, MAX_BACKOFF))
        raise AssertionError("the loop returns or raises")

    def _attempt(self, parts: urllib.parse.SplitResult, host: _Host, timeout: float) -> io.BytesIO:
        deadline = Deadline(time.monotonic() + self._total_seconds, timeout)
        for _ in range(MAX_REDIRECTS + 1):
            try:
                body, location = self._ask(parts, host, deadline)
            except FetchError:
                raise
            except Exception as error:
                raise failure_of(error) from error
            if location is None:
                host.strikes = 0
                return io.BytesIO(body)
            # The bytes of other alphabets, which http.client reads as Latin-1, and spaces after the address.
            location = urllib.parse.quote(location.strip(), safe=string.punctuation, encoding="latin-1")
            parts = _checked(urllib.parse.urljoin(parts.geturl(), location), what="redirect to ")
        raise FetchError(reasons.REDIRECTS, f"more than {MAX_REDIRECTS}")

    def _ask(self, parts: urllib.parse.SplitResult, host: _Host, deadline: Deadline) -> tuple[bytes, str | None]:
        """The body that one URL gives, or where it leads instead; the body of a redirect is not read."""
        connection, target, headers = self._connector.connection(parts, deadline)
        with closing(connection):
            connection.request(
                "GET", target, headers={**self._headers, **headers}, preload_content=False, decode_content=False
            )
            with connection.getresponse() as response:
                location = response.get_redirect_location() or None
                if location is None and not 200 <= response.status < 300:
                    self._strike(host, response)
                    raise FetchError(f"http {response.status}", response.reason or "")
                check_response(parts.geturl(), response._original_response.msg, self._guard)  # type: ignore[union-attr]
                return (self._receive(response) if location is None else b""), location

    def _receive(self, response: Any) -> bytes:
        announced, limit, body = response.length_remaining, self._guard.max_bytes, bytearray()
        if announced is not None and announced > limit:
            raise FetchError(reasons.TOO_MANY_BYTES, f"{announced} announced")
        while chunk := response.read1(_CHUNK):
            body += chunk
            if len(body) > limit:
                raise FetchError(reasons.TOO_MANY_BYTES, f"more than {limit}")
        kind = response.headers.get("Content-Type", "")
        check_image(bytes(body), content_type=kind, max_pixels=self._guard.max_pixels)
        return bytes(body)

    def _strike(self, host: _Host, response: Any) -> None:
        """Start a back-off for a host that reports too many requests."""
        if response.status not in (429, 503):
            return
        requested = retry_after(response.headers.get("Retry-After", ""))
        with host.lock:
            doubled = self._guard.backoff * 2 ** min(host.strikes, 16)
            host.strikes += 1
            pause = min(max(requested, doubled), MAX_BACKOFF)
            host.quiet_until = max(host.quiet_until, time.monotonic() + pause)


def retry_after(text: str) -> float:
    """Seconds that a `Retry-After` header specifies (a number or a date); 0 for anything else."""
    try:
        return Retry().parse_retry_after(text)
    except (InvalidHeader, ValueError, TypeError, OverflowError, IndexError):
        return 0.0


def _checked(url: str, *, what: str = "") -> urllib.parse.SplitResult:
    """The parts of a URL as it is sent.

    Credentials found on the web are not used.

    Raises:
        FetchError: It is not a URL that can be requested (bad url, refused scheme).
    """
    try:
        parts = urllib.parse.urlsplit(ascii_url(url))
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


def ascii_url(url: str) -> str:
    """The URL as it is sent: international host names in IDNA, other characters percent-encoded.

    Raises:
        UnicodeError: The host is not a valid name.
    """
    if url.isascii() and " " not in url:
        return url
    parts = urllib.parse.urlsplit(url)
    host, colon, port = parts.netloc.partition(":")
    if not parts.netloc.isascii():  # so it is no IPv6 address, whose colons do not separate a port
        host = host.encode("idna").decode()
    quoted = (urllib.parse.quote(part, safe="%/:=&?~#+!$,;'@()*[]|") for part in (parts.path, parts.query))
    return urllib.parse.urlunsplit((parts.scheme, host + colon + port, *quoted, ""))
