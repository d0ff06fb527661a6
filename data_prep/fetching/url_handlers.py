"""urllib's handlers for guarded requests: http and https only, checked addresses, and checked redirects."""

from __future__ import annotations

import functools
import http.client
import socket
import ssl
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from data_prep import reasons
from data_prep.fetching.deadline import Deadlines
from data_prep.fetching.guard import AddressFilter
from data_prep.fetching.rules import check_response
from data_prep.reasons import FetchError
from data_prep.settings.download_config import GuardConfig

Connect = Callable[..., socket.socket]


def director_for(guard: GuardConfig, deadlines: Deadlines) -> urllib.request.OpenerDirector:
    """A director for http and https only, so that no redirect can reach an ftp, file or data handler."""
    connect = deadlines.over(AddressFilter(guard.allow_addresses).connect)
    director = urllib.request.OpenerDirector()
    handlers = (
        urllib.request.ProxyHandler(None if guard.trust_proxy else {}),
        _HTTPHandler(connect),
        _HTTPSHandler(connect),
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


class _Guarded:
    """Makes http.client's connections connect through a function of ours."""

    def __init__(self, host: str, *, connect: Connect, **options: Any) -> None:
        super().__init__(host, **options)  # type: ignore[call-arg]
        self._create_connection = connect


class _Connection(_Guarded, http.client.HTTPConnection):
    response_class = _Response


class _SecureConnection(_Guarded, http.client.HTTPSConnection):
    response_class = _Response


class _HTTPHandler(urllib.request.HTTPHandler):
    def __init__(self, connect: Connect) -> None:
        super().__init__()
        self._connection = functools.partial(_Connection, connect=connect)

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection, request)


class _HTTPSHandler(urllib.request.HTTPSHandler):
    def __init__(self, connect: Connect) -> None:
        super().__init__()
        # One context for all connections, because creating one reads the certificate store (about 10 ms).
        context = ssl.create_default_context()
        self._secure = functools.partial(_SecureConnection, connect=connect, context=context)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._secure, request)


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
        if scheme not in self._guard.schemes:
            raise FetchError(reasons.REFUSED_SCHEME, f"redirect to {scheme}")
        # urllib stores the addresses visited so far in the request itself.
        if len(getattr(req, "redirect_dict", {})) >= self._guard.max_redirects:
            raise FetchError(reasons.REDIRECTS, f"more than {self._guard.max_redirects}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
