"""urllib's handlers for guarded requests: http and https only, checked addresses and redirects, and a time limit.

A socket's own time-out restarts with every byte, so a server that sends byte by byte never exceeds it. Here, one thread
shuts down the sockets of an attempt whose time is over; reads from them then return end-of-stream.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from data_prep import reasons
from data_prep.fetching.guard import check_response
from data_prep.reasons import FetchError
from data_prep.settings.download_config import GuardConfig

SCHEMES = ("http", "https")
MAX_REDIRECTS = 5
"""Redirects followed for one URL."""


class Attempt:
    """One attempt in progress. `is_late` means that it was cut off, even if its response looks complete."""

    def __init__(self, seconds: float) -> None:
        self.ends = time.monotonic() + seconds
        self.is_late = False
        # Copies of the descriptors: TLS takes the original out of its socket object.
        self.sockets: list[socket.socket] = []


class Deadlines:
    """Cuts off every attempt after a fixed number of seconds. Name look-ups have no socket and cannot be cut off.

    The thread starts with the first attempt and sleeps while there is none.
    """

    def __init__(self, seconds: float, connect: Callable[[tuple[str, int], float], socket.socket]) -> None:
        self._seconds, self._connect = seconds, connect
        self._changed = threading.Condition()
        # In the order of their deadlines, because all have the same time limit.
        self._attempts: dict[Attempt, None] = {}
        self._mine = threading.local()
        self._is_watched = False

    @contextmanager
    def attempt(self) -> Iterator[Attempt]:
        """Apply the time limit to connections that this thread makes inside the block."""
        with self._changed:
            attempt = self._mine.attempt = Attempt(self._seconds)
            self._attempts[attempt] = None
            if not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, daemon=True, name="deadlines").start()
            self._changed.notify()
        try:
            yield attempt
        finally:
            with self._changed:
                self._attempts.pop(attempt, None)
                for copy in attempt.sockets:
                    copy.close()
            self._mine.attempt = None

    def connect(self, address: tuple[str, int], timeout: float, _: None) -> socket.socket:
        """What http.client calls to connect, inside `attempt`; the last argument would be an address to bind to.

        The socket is shut down when the attempt's time is over, and connecting takes no longer than the time left.

        Raises:
            TimeoutError: The time is already over.
        """
        attempt: Attempt = self._mine.attempt
        left = attempt.ends - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no time is left of {self._seconds:g} s")
        connection = self._connect(address, min(timeout, left))
        connection.settimeout(timeout)
        with self._changed:
            attempt.sockets.append(connection.dup())
            if attempt.is_late:
                _shut(attempt)
        return connection

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._attempts)
                first = next(iter(self._attempts))
            time.sleep(max(0.0, first.ends - time.monotonic()))
            with self._changed:
                if first in self._attempts:
                    del self._attempts[first]
                    first.is_late = True
                    _shut(first)


def _shut(attempt: Attempt) -> None:
    for copy in attempt.sockets:
        with contextlib.suppress(OSError):  # the peer has already closed it
            copy.shutdown(socket.SHUT_RDWR)


def director_for(guard: GuardConfig, deadlines: Deadlines) -> urllib.request.OpenerDirector:
    """A director for http and https only, so that no redirect can reach an ftp, file or data handler."""
    director = urllib.request.OpenerDirector()
    handlers = (
        urllib.request.ProxyHandler(None if guard.trust_proxy else {}),
        _Handler(deadlines),
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirects(guard),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    )
    for handler in handlers:
        director.add_handler(handler)
    return director


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


def check_authority(parts: urllib.parse.SplitResult) -> None:
    """Refuse credentials, which urllib would take for a host name (`user:password@host`), and invalid ports.

    Credentials found on the web are not used.
    """
    if "@" in parts.netloc:
        raise FetchError(reasons.BAD_URL, "a user name before the host")
    try:
        _ = parts.port
    except ValueError as error:
        raise FetchError(reasons.BAD_URL, str(error)) from error


class _Response(http.client.HTTPResponse):
    """Skips every interim answer; http.client skips `100 Continue` only, and takes `103 Early Hints` for the answer."""

    def _read_status(self) -> tuple[str, int, str]:
        version, status, reason = super()._read_status()  # type: ignore[misc]
        is_interim = 100 <= status < 200 and status != http.client.SWITCHING_PROTOCOLS
        return version, http.client.CONTINUE if is_interim else status, reason


class _Handler(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """Opens http and https; the connections of http.client connect through `deadlines`."""

    def __init__(self, deadlines: Deadlines) -> None:
        # One context for all connections, because creating one reads the certificate store (about 10 ms).
        self._tls = ssl.create_default_context()
        super().__init__(context=self._tls)
        self._deadlines = deadlines

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(self._connection, http.client.HTTPConnection), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        secure = functools.partial(self._connection, http.client.HTTPSConnection, context=self._tls)
        return self.do_open(secure, request)

    def _connection(self, kind: Callable[..., Any], host: str, **options: Any) -> Any:
        connection = kind(host, **options)
        connection.response_class, connection._create_connection = _Response, self._deadlines.connect
        return connection


class _Redirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, guard: GuardConfig) -> None:
        self._guard = guard

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        if headers["Location"]:  # spaces after it are no part of the address
            headers.replace_header("Location", headers["Location"].strip())
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> Any:
        fp.close()  # urllib would read the whole body of a redirect, however long that takes
        check_response(req.full_url, headers, self._guard)
        parts = urllib.parse.urlsplit(newurl)
        check_authority(parts)
        scheme = parts.scheme.lower()
        if scheme not in SCHEMES:
            raise FetchError(reasons.REFUSED_SCHEME, f"redirect to {scheme}")
        # urllib stores the addresses visited so far in the request itself.
        if len(getattr(req, "redirect_dict", {})) >= MAX_REDIRECTS:
            raise FetchError(reasons.REDIRECTS, f"more than {MAX_REDIRECTS}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
