"""Connections to strangers' servers: urllib3's, to checked addresses only, and with a deadline for all that they send.

A socket's own time-out restarts with every byte, so a server that sends byte by byte never exceeds it. These sockets
wait for each read only as long as there is time left.
"""

from __future__ import annotations

import http.client
import logging
import socket
import ssl
import time
import urllib.parse
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import InvalidHeader
from urllib3.util import make_headers, parse_url

from data_prep import reasons
from data_prep.fetching.guard import AddressFilter
from data_prep.reasons import FetchError

# urllib3 warns of headers that cannot be parsed; they are counted as `bad headers`.
logging.getLogger("urllib3.connection").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Deadline:
    """The time limit of one attempt; name look-ups cannot be cut off."""

    ends: float
    """`time.monotonic()` at its end."""
    patience: float
    """Seconds to wait for the next bytes."""

    def seconds(self) -> float:
        """What the next wait may take.

        Raises:
            TimeoutError: No time is left.
        """
        left = min(self.patience, self.ends - time.monotonic())
        if left <= 0:
            raise TimeoutError("no complete answer in time")
        return left


class _Timed:
    """What both sockets share."""

    deadline: Deadline

    def recv_into(self, *args: Any, **options: Any) -> int:
        self.settimeout(self.deadline.seconds())  # type: ignore[attr-defined]
        received: int = super().recv_into(*args, **options)  # type: ignore[misc]
        return received


class _Socket(_Timed, socket.socket):
    pass


class _TlsSocket(_Timed, ssl.SSLSocket):
    pass


class _Response(http.client.HTTPResponse):
    """Skips every interim answer; http.client skips `100 Continue` only, and takes `103 Early Hints` for the answer."""

    def _read_status(self) -> tuple[str, int, str]:
        version, status, reason = super()._read_status()  # type: ignore[misc]
        is_interim = 100 <= status < 200 and status != http.client.SWITCHING_PROTOCOLS
        return version, http.client.CONTINUE if is_interim else status, reason


class _Guarded:
    """What both connections share."""

    response_class = _Response

    def __init__(self, host: str, port: int, *, addresses: AddressFilter, deadline: Deadline, **options: Any) -> None:
        super().__init__(host, port, timeout=deadline.patience, **options)  # type: ignore[call-arg]
        self._addresses, self._deadline = addresses, deadline

    def _new_conn(self) -> socket.socket:
        return _connected((self._dns_host, self.port), self._addresses, self._deadline)  # type: ignore[attr-defined]

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self.sock.deadline = self._deadline  # type: ignore[attr-defined]


class _Http(_Guarded, HTTPConnection):  # type: ignore[misc]
    pass


class _Https(_Guarded, HTTPSConnection):  # type: ignore[misc]
    pass


def _connected(address: tuple[str, int], addresses: AddressFilter, deadline: Deadline) -> _Socket:
    """Like `socket.create_connection`, but connects only to an address that has just been checked.

    Raises:
        FetchError: No permitted address is left (refused address).
        OSError: As for `socket.create_connection`.
    """
    refusal: FetchError | None = None
    failure: OSError | None = None
    for family, kind, protocol, _, target in socket.getaddrinfo(*address, 0, socket.SOCK_STREAM):
        try:
            addresses.check(str(target[0]))
        except FetchError as error:
            refusal = error
            continue
        connection = _Socket(family, kind, protocol)
        connection.deadline = deadline
        try:
            connection.settimeout(deadline.seconds())
            connection.connect(target)
            connection.settimeout(deadline.seconds())  # for the TLS handshake, whose time-out is one for all of it
        except OSError as error:
            connection.close()
            failure = error
            continue
        return connection
    if failure is not None:
        raise failure
    raise refusal or OSError(f"{address[0]} resolves to nothing")


class Connector:
    """Makes connections for requests; `trust_proxy` and `allow_addresses` are those of `GuardConfig`."""

    def __init__(self, addresses: AddressFilter, *, trust_proxy: bool) -> None:
        self._addresses = addresses
        self._proxies = urllib.request.getproxies() if trust_proxy else {}
        # One context for all connections, because creating one reads the certificate store (about 10 ms).
        self._tls = ssl.create_default_context()
        self._tls.sslsocket_class = _TlsSocket

    def connection(
        self, url: urllib.parse.SplitResult, deadline: Deadline
    ) -> tuple[HTTPConnection, str, dict[str, str]]:
        """A connection for one request, not yet open, the target to ask it for, and headers that a proxy needs.

        Raises:
            FetchError: A proxy would be asked for a refused address.
        """
        host, target = url.hostname or "", (url.path or "/") + (f"?{url.query}" if url.query else "")
        options = {"addresses": self._addresses, "deadline": deadline}
        if url.scheme == "https":
            options["ssl_context"] = self._tls
        kind: Any = _Https if url.scheme == "https" else _Http
        proxy = self._proxies.get(url.scheme)
        if not proxy or urllib.request.proxy_bypass(host):
            return kind(host, url.port or kind.default_port, **options), target, {}
        address = host.rstrip(".")
        with suppress(OSError):  # other forms that resolvers take for addresses: 0x7f000001, 127.1, 0177.0.0.1
            address = socket.inet_ntoa(socket.inet_aton(address))
        with suppress(ValueError):  # a name, which the proxy resolves
            self._addresses.check(address)
        given = parse_url(proxy if "://" in proxy else f"http://{proxy}")
        headers = make_headers(proxy_basic_auth=given.auth) if given.auth else {}
        connection = kind(given.host, given.port or _Http.default_port, **options)
        if url.scheme == "https":
            connection.set_tunnel(host, url.port or kind.default_port, headers)
            return connection, target, {}
        return connection, f"http://{url.netloc}{target}", headers


def failure_of(error: BaseException) -> FetchError:
    """A network error as a FetchError; urllib3 wraps some of them."""
    cause = error if error.__cause__ is None or isinstance(error, OSError) else error.__cause__
    if isinstance(cause, http.client.LineTooLong) or type(cause) is http.client.HTTPException:  # more than 100 headers
        return FetchError(reasons.BAD_HEADERS, str(cause))
    kinds: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
        (InvalidHeader, reasons.BAD_HEADERS),
        (TimeoutError, reasons.TIMEOUT),
        (socket.gaierror, reasons.DNS),
        (ssl.SSLError, reasons.TLS),
        (http.client.IncompleteRead, reasons.CUT_OFF),
        (http.client.InvalidURL, reasons.BAD_URL),
        ((OSError, http.client.HTTPException), reasons.CONNECTION),
        (ValueError, reasons.BAD_URL),
    )
    reason = next((reason for kind, reason in kinds if isinstance(cause, kind)), reasons.CONNECTION)
    return FetchError(reason, f"{type(cause).__name__} {cause}".strip())
