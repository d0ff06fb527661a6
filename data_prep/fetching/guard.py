"""Which addresses may be connected to. The address that was checked is used, whatever its name resolves to then."""

from __future__ import annotations

import functools
import ipaddress
import socket

from data_prep import reasons
from data_prep.reasons import FetchError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# Special addresses that Python 3.11 considers global.
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16/32",  # a cloud's metadata service
            "192.0.0.0/24",  # protocol assignments, metadata services among them
            "192.88.99.0/24",  # 6to4 relays, deprecated (RFC 7526)
            "64:ff9b:1::/48",  # NAT64 of a network's own (RFC 8215): the address does not say where it leads
            "100:0:0:1::/64",  # dummy prefix (RFC 9780)
            "3fff::/20",  # documentation (RFC 9637)
            "5f00::/16",  # segment routing (RFC 9602)
        ),
    )
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class AddressFilter:
    """Decides whether an address may be connected to."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = [ipaddress.ip_network(text, strict=False) for text in allowed]
        self._refusal = functools.lru_cache(maxsize=65_536)(self._judge)

    def check(self, text: str) -> None:
        """Refuse an IP address that is special and not explicitly allowed.

        Raises:
            FetchError: The address is refused.
        """
        refusal = self._refusal(text)
        if refusal:
            raise FetchError(reasons.REFUSED_ADDRESS, refusal)

    def _judge(self, text: str) -> str | None:
        """Why an address is refused, or None; a pure function of the text, so that results can be cached."""
        address = ipaddress.ip_address(text.partition("%")[0])
        if any(address in network for network in self._allowed):
            return None
        inner = _inner(address)
        if inner is not None:
            return self._judge(str(inner))
        listed = any(address in network for network in _SPECIAL)
        # Python considers site-local and IPv4-compatible addresses (::/96) global.
        local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
        special = not address.is_global or address.is_multicast or address.is_reserved or local or listed
        return f"{address} is {_kind(address)}" if special else None

    def connect(
        self,
        address: tuple[str, int],
        timeout: float | None = None,
        source_address: tuple[str, int] | None = None,
    ) -> socket.socket:
        """Like `socket.create_connection`, but connects only to an address that has just been checked.

        Raises:
            FetchError: No permitted address is left (refused address).
            OSError: As for `socket.create_connection`.
        """
        refusal: FetchError | None = None
        failure: OSError | None = None
        for family, kind, protocol, _, target in socket.getaddrinfo(*address, 0, socket.SOCK_STREAM):
            try:
                self.check(str(target[0]))
            except FetchError as error:
                refusal = error
                continue
            connection = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(timeout)
                if source_address:
                    connection.bind(source_address)
                connection.connect(target)
            except OSError as error:
                connection.close()
                failure = error
                continue
            return connection
        if failure is not None:
            raise failure
        raise refusal or OSError(f"{address[0]} resolves to nothing")


def _inner(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address inside an IPv6 address (mapped, 6to4, Teredo, NAT64)."""
    if not isinstance(address, ipaddress.IPv6Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)


def _kind(address: Address) -> str:
    kinds = ("unspecified", "loopback", "link_local", "site_local", "multicast", "private", "reserved")
    found = next((f"is_{kind}" for kind in kinds if getattr(address, f"is_{kind}", False)), None)
    return found.removeprefix("is_").replace("_", "-") if found else "not a public address"
