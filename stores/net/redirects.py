"""Refusal of malicious redirects: into this machine, a private network, or a cloud's metadata service.

# Note [Reach of a redirect]
The server that the user named decides how far its redirects may reach: a public one to public addresses, one of a
private network into such networks as well, one of this machine anywhere but to metadata. The addresses of a name are
checked when a redirect names it, and again the one that is connected to: a name may have another address by then.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from enum import IntEnum
from urllib.parse import urlsplit

from manifests.errors import StoreError

_METADATA_NAMES = ("metadata", "metadata.google.internal", "instance-data", "instance-data.ec2.internal")
_METADATA_ADDRESSES = frozenset(  # that are not link-local; Azure's is even public
    map(
        ipaddress.ip_address,
        ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"),
    )
)
_EMBEDDING = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96")))  # NAT64, and obsolete

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Reach(IntEnum):
    PUBLIC = 0
    PRIVATE = 1
    THIS_MACHINE = 2
    METADATA = 3


_WORDS = {
    _Reach.PRIVATE: "a private address",
    _Reach.THIS_MACHINE: "this machine itself",
    _Reach.METADATA: "a link-local or metadata address",
}


class Redirects:
    """The redirects that a request follows from the URL that the user named; see Note [Reach of a redirect]."""

    def __init__(self, where: str, url: str) -> None:
        self._where, self._url = where, url
        self._origin: str | None = None  # of the last redirect
        self._limit = self._allowed = _Reach.THIS_MACHINE  # for the current server, and for what it redirects to

    @property
    def host(self) -> str:
        """The host of the current server."""
        return _host_of(self._url)

    def follow(self, target: str) -> None:
        """Check a redirect from the current server to `target`.

        Raises:
            StoreError: its address is further inside than that of a server so far, or it is not encrypted any more.
        """
        if self._origin is None:
            self._allowed = min(_Reach.THIS_MACHINE, *_reaches_of(self.host))
        self._origin, origin = self._url, urlsplit(self._url)
        self._url, self._limit = target, self._allowed
        if (origin.scheme, urlsplit(target).scheme) == ("https", "http"):
            raise self._refused("which is not encrypted")
        for reach in (reaches := _reaches_of(self.host)):
            self._check(reach)
        self._allowed = min(self._allowed, *reaches)

    def check_connection(self, address: str) -> None:
        """Check the address of a connection to the current server, if a redirect led there.

        Raises:
            StoreError: see `follow`.
        """
        if self._origin is not None:
            self._check(_reach_of(ipaddress.ip_address(address.partition("%")[0])))

    def _check(self, reach: _Reach) -> None:
        if reach > self._limit:
            raise self._refused(_WORDS[reach])

    def _refused(self, what: str) -> StoreError:
        return StoreError(
            self._where,
            f"refused a redirect from {_host_of(self._origin or '')} to {self.host}, {what}",
            "use the URL of the server that has the file; if the URL is right, its server may be compromised",
            code="store.redirect-refused",
        )


def _host_of(url: str) -> str:
    return (urlsplit(url).hostname or "").rstrip(".").lower()


def _reaches_of(host: str) -> tuple[_Reach, ...]:
    """Return the reach of each address of a host; what cannot be resolved here, as behind a proxy, counts as public."""
    if host in _METADATA_NAMES:
        return (_Reach.METADATA,)
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return (_Reach.PUBLIC,)
    return tuple(_reach_of(ipaddress.ip_address(str(entry[4][0]).partition("%")[0])) for entry in entries)


def _reach_of(address: Address) -> _Reach:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return max(map(_reach_of_one, (address, *_embedded_in(address))))


def _reach_of_one(address: Address) -> _Reach:
    if address.is_link_local or address in _METADATA_ADDRESSES:
        return _Reach.METADATA
    if address.is_loopback or address.is_unspecified:
        return _Reach.THIS_MACHINE
    is_site_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    is_public = address.is_global and not (is_site_local or address.is_multicast)
    return _Reach.PUBLIC if is_public else _Reach.PRIVATE


def _embedded_in(address: Address) -> Iterator[ipaddress.IPv4Address]:
    """Yield the IPv4 addresses to which gateways and tunnels forward what is sent to an IPv6 address."""
    if isinstance(address, ipaddress.IPv4Address) or address.is_loopback or address.is_unspecified:
        return
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
    if any(address in network for network in _EMBEDDING):
        yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
