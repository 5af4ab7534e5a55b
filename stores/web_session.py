"""fsspec's HTTP session, with checks that fsspec lacks: of redirects, and of responses to range requests."""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import Any
from urllib.parse import urljoin

from manifests.errors import StoreError
from stores.redirects import Redirects

__all__ = ["open_session"]

_ASKED = re.compile(r"bytes=(\d+)-(\d+)")
_followed: ContextVar[Redirects | None] = ContextVar("_followed", default=None)  # by the request of this task
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


async def open_session(**options: Any) -> Any:
    """Open a session that follows no redirect into this machine or to a metadata service, and takes no wrong range.

    fsspec calls this, and reads a whole 206 into memory without looking at its headers.
    """
    import aiohttp

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(_begin)
    trace.on_request_redirect.append(_check_redirect)
    trace.on_request_end.append(_check_range)
    resolver: Any = _Resolver(aiohttp.ThreadedResolver())
    options.setdefault("connector", aiohttp.TCPConnector(resolver=resolver))
    # Of an encoded body, neither ranges nor lengths are those of the file.
    return aiohttp.ClientSession(trace_configs=[trace], headers={"Accept-Encoding": "identity"}, **options)


class _Resolver:
    """Resolves names, and checks the addresses of those that a redirect leads to."""

    def __init__(self, resolver: Any) -> None:
        self._resolver = resolver

    async def resolve(self, host: str, *arguments: Any, **options: Any) -> Any:
        entries, redirects = await self._resolver.resolve(host, *arguments, **options), _followed.get()
        if redirects is not None and host.rstrip(".").lower() == redirects.host:  # not that of a proxy
            for entry in entries:
                redirects.check_connection(entry["host"])
        return entries

    async def close(self) -> None:
        await self._resolver.close()


async def _begin(session: Any, context: Any, asked: Any) -> None:
    _followed.set(None)


async def _check_redirect(session: Any, context: Any, asked: Any) -> None:
    headers = asked.response.headers
    target = urljoin(str(asked.url), headers.get("Location") or headers.get("URI") or "")
    redirects = _followed.get() or Redirects(_where(asked.url), str(asked.url))
    _followed.set(redirects)
    redirects.follow(target)


async def _check_range(session: Any, context: Any, ended: Any) -> None:
    """Raise unless the response to a range request is that range, or a whole file of which it is the beginning."""
    asked, response = _ASKED.fullmatch(ended.headers.get("Range", "")), ended.response
    if asked is None or response.status >= 300:
        return
    problem = _problem(int(asked[1]), int(asked[2]), response)
    if problem is not None:
        response.close()  # the body may be endless
        hint = "a proxy may be changing responses; bypass it, or download the file as a whole first"
        raise StoreError(_where(ended.url), problem, hint, code="store.wrong-answer")


def _problem(first: int, last: int, response: Any) -> str | None:
    headers, nbytes = response.headers, str(last - first + 1)
    said, encoding = headers.get("Content-Range"), headers.get("Content-Encoding", "identity")
    if response.status == 206:
        found = _CONTENT_RANGE.fullmatch(said or "")
        if found is None or (int(found[1]), int(found[2])) != (first, last):
            return f"expected bytes {first}-{last}, found {said or 'no Content-Range'}"
        if (length := headers.get("Content-Length")) != nbytes:
            return f"expected {nbytes} bytes, found {length or 'no Content-Length'}"
    elif first or said is not None:
        return f"expected bytes {first}-{last}, found the whole file: the server may not support range requests"
    return f"expected no encoding, found {encoding!r}" if encoding.lower() not in ("identity", "") else None


def _where(url: Any) -> str:
    return str(url.with_user(None).with_query(None).with_fragment(None))  # a query may contain a signature
