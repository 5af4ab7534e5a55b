"""Connections that read responses straight into the caller's memory, and the refusal of malicious redirects.

httpx, through which huggingface_hub sends its requests, copies each byte several times, in pieces of 64 KiB at most. It
stays in charge of what is not simple: proxies, redirects, refusals.

# Note [Reach of a redirect]
The server that the user named decides how far its redirects may reach: a public one to public addresses, one of a
private network into such networks as well, one of this machine anywhere but to metadata. The addresses of a name are
checked when a redirect names it, and again the one that is connected to: a name may have another address by then.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from enum import IntEnum
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from manifests.errors import StoreError
from stores.net.retries import answered_within

ConnectionFailure = (OSError, HTTPException)


class Answer:
    """A response, whose body is read as it arrives."""

    def __init__(self, response: HTTPResponse) -> None:
        self.status_code, self.headers = response.status, response.headers
        self.left_nbytes = response.length  # None: not said
        self._response = response

    @property
    def is_complete(self) -> bool:
        """Whether the connection can be used again."""
        return self.left_nbytes == 0 and not self._response.will_close

    def read_into(self, part: memoryview) -> int:
        """Read what has arrived, as far as it fits, or wait for some; return its length, 0 at the end."""
        assert self.left_nbytes is not None
        count = self._response.fp.readinto1(part[: self.left_nbytes]) if self.left_nbytes else 0
        self.left_nbytes -= count
        return count

    def close(self) -> None:
        self._response.close()


class Connections:
    """Idle connections by server, for any number of threads."""

    def __init__(self) -> None:
        self._idle: dict[str, list[HTTPConnection]] = {}
        self._lock, self._trusted = threading.Lock(), cache(ssl.create_default_context)
        weakref.finalize(self, _close_all, self._idle)

    @contextmanager
    def get(
        self,
        url: str,
        headers: Mapping[str, str],
        timeout_s: float,
        answer_s: float,
        check: Callable[[str], None] = lambda address: None,
    ) -> Iterator[Answer]:
        """Yield the response to a GET. `timeout_s` is that of single reads, `answer_s` from the request to the headers.

        `check` is called with the address of a new connection, before anything is sent.
        """
        origin = "://".join(urlsplit(url)[:2])
        with self._lock:
            idle = self._idle.get(origin)
            connection = idle.pop() if idle else None
        if connection is not None:
            try:
                answer = _begin(connection, url, headers, answer_s)
            except (ConnectionError, ssl.SSLEOFError):  # closed by the server, as idle ones are after a while
                connection = None
        if connection is None:
            connection = self._open(url, timeout_s)
            answer = _begin(connection, url, headers, answer_s, check)
        try:
            with closing(answer):
                yield answer
        finally:
            if answer.is_complete:
                with self._lock:
                    self._idle.setdefault(origin, []).append(connection)
            else:
                connection.close()

    def _open(self, url: str, timeout_s: float) -> HTTPConnection:
        parts = urlsplit(url)
        if parts.scheme == "https":
            return HTTPSConnection(parts.hostname or "", parts.port, timeout=timeout_s, context=self._trusted())
        return HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)


def is_direct(url: str) -> bool:
    """Return whether a URL needs no proxy of the environment, no password, and no quoting."""
    parts = urlsplit(url)
    has_proxy = not {parts.scheme, "all"}.isdisjoint(getproxies()) and not proxy_bypass(parts.hostname or "")
    is_plain = url.isascii() and url.isprintable() and " " not in url and "@" not in parts.netloc
    return parts.scheme in ("http", "https") and is_plain and not has_proxy


def _begin(
    connection: HTTPConnection,
    url: str,
    headers: Mapping[str, str],
    answer_s: float,
    check: Callable[[str], None] | None = None,
) -> Answer:
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def ask() -> Answer:
        if check is not None:
            connection.connect()
            check(connection.sock.getpeername()[0])
        connection.request("GET", target, headers=dict(headers))
        return Answer(connection.getresponse())

    try:
        return answered_within(answer_s, parts.netloc, ask, connection.close)
    except BaseException:
        connection.close()
        raise


def _close_all(idle: Mapping[str, list[HTTPConnection]]) -> None:
    for connections in idle.values():
        for connection in connections:
            connection.close()


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
        return _host_of(self._url)

    def follow(self, target: str) -> None:
        """Check a redirect from the current server to `target`."""
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
        """Check the address of a connection to the current server, if a redirect led there."""
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
