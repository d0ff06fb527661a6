"""The opener that img2dataset's `urlopen` calls go through: guarded, polite, and limited in bytes and seconds.

Its connections are urllib3's, to addresses that have just been checked. A socket's own time-out restarts with every
byte, so a server that sends byte by byte never exceeds it: here each read waits only as long as there is time left.
"""

from __future__ import annotations

import functools
import http.client
import io
import logging
import socket
import ssl
import string
import threading
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Set
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import InvalidHeader
from urllib3.util import Retry, make_headers, parse_url

from data_prep import reasons
from data_prep.download_config import GuardConfig
from data_prep.fetching.guard import AddressFilter, check_response, checked_url
from data_prep.fetching.served_image import check_image
from data_prep.reasons import FetchError

# urllib3 warns of headers that cannot be parsed; they are counted as `bad headers`.
logging.getLogger("urllib3.connection").setLevel(logging.ERROR)
_CHUNK = 1 << 16
MAX_BACKOFF = 30.0
"""Seconds for which a host is left alone at most."""
MAX_REDIRECTS = 5
"""Redirects followed for one URL."""


@dataclass(frozen=True)
class _Deadline:
    """The time limit of one attempt; name look-ups cannot be cut off."""

    ends: float
    """`time.monotonic()` at its end."""
    patience: float
    """Seconds to wait for the next bytes."""

    def seconds(self) -> float:
        """What the next wait may take; a TimeoutError if no time is left."""
        left = min(self.patience, self.ends - time.monotonic())
        if left <= 0:
            raise TimeoutError("no complete answer in time")
        return left


class _Reader(io.RawIOBase):
    """What a response reads from its socket."""

    def __init__(self, connection: Any, raw: io.RawIOBase, deadline: _Deadline) -> None:
        self._connection, self._raw, self._deadline = connection, raw, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._connection.settimeout(self._deadline.seconds())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """Skips every interim answer; http.client skips `100 Continue` only, and takes `103 Early Hints` for the answer."""

    def __init__(self, connection: Any, *, deadline: _Deadline, **options: Any) -> None:
        super().__init__(connection, **options)
        self.fp: Any = io.BufferedReader(_Reader(connection, self.fp.detach(), deadline))

    def _read_status(self) -> tuple[str, int, str]:
        version, status, reason = super()._read_status()  # type: ignore[misc]
        is_interim = 100 <= status < 200 and status != http.client.SWITCHING_PROTOCOLS
        return version, http.client.CONTINUE if is_interim else status, reason


class _Guarded:
    """What both kinds of connections share."""

    def __init__(self, host: str, port: int, *, addresses: AddressFilter, deadline: _Deadline, **options: Any) -> None:
        super().__init__(host, port, timeout=deadline.patience, **options)  # type: ignore[call-arg]
        self._addresses, self._deadline = addresses, deadline
        self.response_class = functools.partial(_Response, deadline=deadline)

    def _new_conn(self) -> socket.socket:
        """Like `socket.create_connection`, but connects only to an address that has just been checked."""
        host, port = self._dns_host, self.port  # type: ignore[attr-defined]
        refusal: Exception = OSError(f"{host} resolves to nothing")
        failure: OSError | None = None
        for family, kind, protocol, _, target in socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM):
            try:
                self._addresses.check(str(target[0]))
            except FetchError as error:
                refusal = error
                continue
            connection = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(self._deadline.seconds())
                connection.connect(target)
                connection.settimeout(self._deadline.seconds())  # for all of the TLS handshake
            except OSError as error:
                connection.close()
                failure = error
                continue
            return connection
        raise failure or refusal


class _Http(_Guarded, HTTPConnection):  # type: ignore[misc]
    pass


class _Https(_Guarded, HTTPSConnection):  # type: ignore[misc]
    pass


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
        self._guard, self._retries, self._total_seconds = guard, retries, total_seconds
        self._addresses = AddressFilter(guard.allow_addresses)
        self._proxies = urllib.request.getproxies() if guard.trust_proxy else {}
        self._tls = ssl.create_default_context()  # for all connections: it reads the certificate store (10 ms)
        self._hosts: defaultdict[str, _Host] = defaultdict(lambda: _Host(threading.Semaphore(connections)))
        self.removed: Set[str] = frozenset()
        """URLs that are not requested."""
        name = f"{guard.user_agent}; +{guard.contact}" if guard.contact else guard.user_agent
        self._headers = {"User-Agent": f"Mozilla/5.0 (compatible; {name})", "Connection": "close"}

    def open(self, request: urllib.request.Request | str, data: None = None, timeout: float = 10.0) -> io.BytesIO:
        """Fetch one image, whole; img2dataset reads nothing else of the response.

        Raises:
            FetchError: Its text begins with the reason.
        """
        url = request if isinstance(request, str) else request.full_url
        if url in self.removed:
            raise FetchError(reasons.REMOVED)
        parts = checked_url(url)
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
        deadline = _Deadline(time.monotonic() + self._total_seconds, timeout)
        for _ in range(MAX_REDIRECTS + 1):
            try:
                body, location = self._ask(parts, host, deadline)
            except FetchError:
                raise
            except Exception as error:  # urllib3 wraps some of those of the network
                cause = error if error.__cause__ is None or isinstance(error, OSError) else error.__cause__
                reason = next((reason for kind, reason in _KINDS if isinstance(cause, kind)), reasons.CONNECTION)
                if type(cause) is http.client.HTTPException:  # more than 100 headers
                    reason = reasons.BAD_HEADERS
                raise FetchError(reason, f"{type(cause).__name__} {cause}".strip()) from error
            if location is None:
                host.strikes = 0
                return io.BytesIO(body)
            # The bytes of other alphabets, which http.client reads as Latin-1, and spaces after the address.
            location = urllib.parse.quote(location.strip(), safe=string.punctuation, encoding="latin-1")
            parts = checked_url(urllib.parse.urljoin(parts.geturl(), location), what="redirect to ")
        raise FetchError(reasons.REDIRECTS, f"more than {MAX_REDIRECTS}")

    def _ask(self, parts: urllib.parse.SplitResult, host: _Host, deadline: _Deadline) -> tuple[bytes, str | None]:
        """The body that one URL gives, or where it leads instead; the body of a redirect is not read."""
        connection, target, headers = self._connection(parts, deadline)
        with closing(connection):
            connection.request(
                "GET", target, headers={**self._headers, **headers}, preload_content=False, decode_content=False
            )
            with connection.getresponse() as response:
                location = response.get_redirect_location() or None
                if location is None and not 200 <= response.status < 300:
                    if response.status in (429, 503):
                        self._back_off(host, response.headers.get("Retry-After", ""))
                    raise FetchError(f"http {response.status}", response.reason or "")
                check_response(parts.geturl(), response._original_response.msg, self._guard)  # type: ignore[union-attr]
                return (self._receive(response) if location is None else b""), location

    def _connection(
        self, url: urllib.parse.SplitResult, deadline: _Deadline
    ) -> tuple[HTTPConnection, str, dict[str, str]]:
        """A connection for one request, not yet open, the target to ask it for, and headers that a proxy needs."""
        host, target = url.hostname or "", (url.path or "/") + (f"?{url.query}" if url.query else "")
        options: dict[str, Any] = {"addresses": self._addresses, "deadline": deadline}
        kind: Any = _Http
        if url.scheme == "https":
            kind, options["ssl_context"] = _Https, self._tls
        port, proxy = url.port or kind.default_port, self._proxies.get(url.scheme)
        if not proxy or urllib.request.proxy_bypass(host):
            return kind(host, port, **options), target, {}
        address = host.rstrip(".")
        with suppress(OSError):  # other forms that resolvers take for addresses: 0x7f000001, 127.1, 0177.0.0.1
            address = socket.inet_ntoa(socket.inet_aton(address))
        with suppress(ValueError):  # a name, which the proxy resolves
            self._addresses.check(address)
        given = parse_url(proxy if "://" in proxy else f"http://{proxy}")
        headers = make_headers(proxy_basic_auth=given.auth) if given.auth else {}
        connection = kind(given.host, given.port or _Http.default_port, **options)
        if url.scheme == "https":
            connection.set_tunnel(host, port, headers)
            return connection, target, {}
        return connection, f"http://{url.netloc}{target}", headers

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

    def _back_off(self, host: _Host, requested: str) -> None:
        """Leave a host alone that reports too many requests, at least as long as it has `requested`."""
        seconds = 0.0
        with suppress(InvalidHeader, ValueError, TypeError, OverflowError, IndexError):
            seconds = Retry().parse_retry_after(requested)
        with host.lock:
            doubled = self._guard.backoff * 2 ** min(host.strikes, 16)
            host.strikes += 1
            pause = min(max(seconds, doubled), MAX_BACKOFF)
            host.quiet_until = max(host.quiet_until, time.monotonic() + pause)


_KINDS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
    ((InvalidHeader, http.client.LineTooLong), reasons.BAD_HEADERS),
    (TimeoutError, reasons.TIMEOUT),
    (socket.gaierror, reasons.DNS),
    (ssl.SSLError, reasons.TLS),
    (http.client.IncompleteRead, reasons.CUT_OFF),
    (http.client.InvalidURL, reasons.BAD_URL),
    ((OSError, http.client.HTTPException), reasons.CONNECTION),
    (ValueError, reasons.BAD_URL),
)
