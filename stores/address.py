"""Addresses as users write them: of repositories on the hub, and of everything else by its one form."""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from manifests.errors import StoreError

__all__ = ["SCHEME", "HubAddress", "is_inside", "is_url", "parse_hub_address", "place_of", "split_url"]

SCHEME = "hf://"
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_REPO = re.compile(rf"(?:{_PART}/)?{_PART}")  # a few old repositories, such as gpt2, have no organisation
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "local": "file"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HubAddress:
    """A repository, at a branch, tag or commit (None: its main branch)."""

    repo: str
    revision: str | None = None
    is_bare: bool = False  # written without hf://, so that a folder may have been meant

    def __str__(self) -> str:
        return SCHEME + self.repo + (f"@{self.revision}" if self.revision else "")


def is_url(address: str | Path) -> TypeGuard[str]:
    """Return whether this is an address off this machine, `scheme://…`, and not a path."""
    return isinstance(address, str) and "://" in address


def split_url(url: str) -> tuple[str, str, str]:
    """Return scheme, bucket and prefix, without a slash at its ends."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    return scheme.lower(), bucket, prefix.strip("/")


def place_of(address: str | Path) -> str:
    """Return the one form of all addresses of a folder, to compare and not to open.

    Links and `..` are followed on this machine, `file://` too. Where an address can leave out what tells two
    places apart (a revision, an account, a user), the form leaves it out: they count as one.
    """
    if not is_url(address):
        return _real(str(address))
    last = address.rpartition("::")[2]  # fsspec's chains end where the bytes are
    if last != address and (is_url(last) or last.startswith("/")):
        return place_of(last)
    if address.startswith(SCHEME):
        return address.partition("@")[0]
    scheme, _, rest = address.partition("://")
    scheme = _ALIASES.get(scheme.lower(), scheme.lower())
    if scheme == "file":
        return _real(os.path.expanduser(rest))
    _, bucket, prefix = split_url(f"{scheme}://{rest.lstrip('/')}")
    bucket = bucket.partition("@")[0] if scheme == "az" else bucket.rpartition("@")[2]
    return f"{scheme}://{bucket}{posixpath.normpath(f'/{prefix}')}".rstrip("/")


def _real(path: str) -> str:
    # Path.resolve raises where links lead in a circle.
    return path if "\0" in path else os.path.realpath(path)


def is_inside(place: str, folder: str) -> bool:
    """Return whether a place, as `place_of` returns it, is below another one."""
    return place != folder and place.startswith(f"{folder.rstrip('/')}/")


def parse_hub_address(text: str) -> HubAddress | None:
    """Read `hf://org/name`, `org/name`, either with `@revision`; None when it is neither.

    A relative path of two parts reads as a bare address too: ask only when no such path exists.

    Raises:
        InputError: `hf://` with something else behind it.
    """
    repo, at, revision = text.removeprefix(SCHEME).partition("@")
    is_bare = not text.startswith(SCHEME)
    fits = _REPO.fullmatch(repo) is not None and bool(at) == bool(revision) and revision.isprintable()
    if is_bare and not (fits and "/" in repo):
        return None
    if not fits:
        problem = "expected hf://org/name or hf://org/name@revision"
        raise StoreError(text, problem, "only model repositories are read", code="store.malformed-address")
    return HubAddress(repo=repo, revision=revision or None, is_bare=is_bare)
