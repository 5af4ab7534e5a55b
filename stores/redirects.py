"""Refusal of malicious redirects: to this machine, or to a cloud's metadata service."""

from __future__ import annotations

import ipaddress
import socket
from typing import Literal
from urllib.parse import urlsplit

from manifests.errors import StoreError

__all__ = ["check_redirect"]

_METADATA_NAMES = ("metadata", "metadata.google.internal", "instance-data", "instance-data.ec2.internal")
_METADATA_ADDRESSES = (ipaddress.ip_address("fd00:ec2::254"), ipaddress.ip_address("100.100.100.200"))

Reach = Literal["other", "loopback", "metadata"]


def check_redirect(where: str, origin: str, target: str) -> None:
    """Check a redirect from `origin`, the requested URL, to `target`, which a server named.

    Raises:
        StoreError: it leads to a link-local address, where clouds serve credentials, or to this machine from elsewhere.
    """
    reach = _reach_of(target)
    if reach == "other" or (reach == "loopback" and _reach_of(origin) == "loopback"):
        return
    host = urlsplit(target).hostname
    what = "this machine itself" if reach == "loopback" else "a link-local or metadata address"
    raise StoreError(
        where,
        f"refused a redirect from {urlsplit(origin).hostname} to {host}, {what}",
        "use the URL of the server that has the file; if the URL is right, its server may be compromised",
        code="store.redirect-refused",
    )


def _reach_of(url: str) -> Reach:
    host = (urlsplit(url).hostname or "").rstrip(".").lower()
    if host in _METADATA_NAMES:
        return "metadata"
    reaches = {_reach_of_address(address) for address in _addresses(host)}
    return "metadata" if "metadata" in reaches else "loopback" if "loopback" in reaches else "other"


def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []  # connecting will fail as well
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]


def _reach_of_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> Reach:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    if address.is_link_local or address in _METADATA_ADDRESSES:
        return "metadata"
    return "loopback" if address.is_loopback or address.is_unspecified else "other"
