"""Servers that a manifest names: untrusted files must not decide where requests are sent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from manifests.errors import SourceError
from stores.address import OBJECT_SCHEMES, SCHEME, is_url

__all__ = ["ALLOW_VARIABLE", "allowing_remote", "check_remote"]

ALLOW_VARIABLE = "RESHARD_ALLOW_REMOTE"  # set to "1" where there is no flag: in the ranks of a job

_is_allowed = False  # by a flag of the current command


@contextmanager
def allowing_remote() -> Iterator[None]:
    """Allow manifests to name servers while the block runs."""
    global _is_allowed
    before, _is_allowed = _is_allowed, True
    try:
        yield
    finally:
        _is_allowed = before


def check_remote(location: str, named: str) -> None:
    """Refuse a server that the manifest at `named` refers to, unless the user allowed or named it.

    The hub and buckets are always allowed: their endpoints come from the environment, not from the manifest.

    Raises:
        SourceError: naming the server.
    """
    if not is_url(location) or location.startswith(SCHEME) or location.partition("://")[0] in OBJECT_SCHEMES:
        return
    if _is_allowed or os.environ.get(ALLOW_VARIABLE) == "1" or _server_of(location) == _server_of(named):
        return
    raise SourceError(
        f"{named}: virtual.location",
        f"reading these bundles would send requests to {_server_of(location)} ({location})",
        f"if you trust that server, set {ALLOW_VARIABLE}=1, or pass --allow-remote to a command that has it",
        code="source.remote-not-allowed",
    )


def _server_of(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}" if rest else ""
