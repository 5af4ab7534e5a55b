"""Connections that read responses straight into the caller's memory.

httpx, through which huggingface_hub sends its requests, copies each byte several times, in pieces of 64 KiB at most. It
stays in charge of what is not simple: proxies, redirects, refusals.
"""

from __future__ import annotations

import ssl
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

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

        Raises:
            PassingError: no response in time.
            OSError, HTTPException: the connection failed.
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
