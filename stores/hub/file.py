"""A file of a commit on the hub, read by ranges from wherever the hub redirects to."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from huggingface_hub import constants, get_session, hf_hub_url, try_to_load_from_cache

from manifests.errors import InputError, SourceError, StoreError
from stores.address import HubAddress
from stores.base import SOURCE_CHANGED, Range, Reader
from stores.hub.calls import (
    ClientError,
    busy,
    check_refusal,
    has_default_client,
    headers_of_requests,
    is_endpoint,
    is_passing,
    offline_error,
    unreachable,
)
from stores.local import LocalReader
from stores.net.connections import Answer, ConnectionFailure, Connections, Redirects, is_direct
from stores.net.retries import Pace, PassingError, Retries, Stream, Streams, answered_within, keep_trying
from stores.prefetch import Fetch, RangeReader

_SHA256_CHARS = 64
_MAX_REDIRECTS = 6
_REDIRECTS = (301, 302, 303, 307, 308)
_UNREAD_NBYTES = 64 << 10  # of a redirect: longer ones end the connection
_MAX_DIGITS = 19  # of 8 EiB; Python refuses to convert thousands
_SHOWN_CHARS = 80
_CONTENT_RANGE = re.compile(rf"bytes (\d{{1,{_MAX_DIGITS}}})-(\d{{1,{_MAX_DIGITS}}})/(\d{{1,{_MAX_DIGITS}}})")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFile:
    """A file as listed by its repository. Threads may share it, each with its own reader.

    The token is sent to the hub's endpoint only. Large files are elsewhere, behind signed URLs that expire; the first
    request finds one on its way, and later ones reuse it, since the hub limits the rate of those that do not.
    """

    address: HubAddress  # as the user wrote it
    commit: str
    name: str
    nbytes: int
    etag: str  # SHA-256, or the git hash of a small file
    listed: str  # the same, if listed by the hub or its cache
    retries: Retries = field(default_factory=Retries, compare=False, repr=False)
    streams: Streams = field(default_factory=Streams, compare=False, repr=False)  # of the repository
    connections: Connections = field(default_factory=Connections, compare=False, repr=False)  # likewise
    _route: _Route = field(default_factory=lambda: _Route(), compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.address}/{self.name}"

    @property
    def fingerprint(self) -> str:
        return f"{self.nbytes} bytes, etag {self.etag}"

    def open(self, ranges: Sequence[Range]) -> Reader:
        """Open the file in the local cache, or prefetch these ranges."""
        cached = self.cached_path()
        return RangeReader(self._fetch_or_refuse(), ranges) if cached is None else LocalReader(cached)

    def fetching(self) -> Fetch | None:
        """Return the function that fetches its bytes, unless it is in the local cache."""
        return self._fetch_or_refuse() if self.cached_path() is None else None

    def cached_path(self) -> Path | None:
        """Return the file in the local cache, if it is there."""
        cached = try_to_load_from_cache(self.address.repo, self.name, revision=self.commit)
        return Path(cached) if isinstance(cached, str) and Path(cached).stat().st_size == self.nbytes else None

    def _fetch_or_refuse(self) -> Fetch:
        if constants.HF_HUB_OFFLINE:
            raise offline_error(self.address, str(self), self.name)
        return self._fetch

    def _fetch(self, into: memoryview, position: int, stop: threading.Event) -> None:
        """Fill `into` with the bytes at `position`. Bytes that arrived before a connection broke are kept."""
        if position + len(into) > self.nbytes:
            problem = f"expected at least {position + len(into)} bytes, found {self.nbytes}"
            raise SourceError(str(self), problem, code=SOURCE_CHANGED)
        wanted = _Wanted(into, position)
        keep_trying(
            lambda: self._attempt(wanted, stop), str(self), self.retries, stop, nbytes_done=lambda: wanted.begin
        )

    def _attempt(self, wanted: _Wanted, stop: threading.Event) -> None:
        if wanted.begin == wanted.end:  # all has arrived, though the attempt before failed
            return
        with self.streams.slot(stop) as stream:
            self._ask(wanted, stop, stream)

    def _ask(self, wanted: _Wanted, stop: threading.Event, stream: Stream) -> None:
        is_whole = wanted.begin == 0 and wanted.end == self.nbytes  # then a server need not support ranges
        range_header = {} if is_whole else {"Range": f"bytes={wanted.begin}-{wanted.end - 1}"}
        with self._answer(range_header, stop) as (place, response):
            status = response.status_code
            if status >= 400 and place.is_endpoint and not is_passing(status):
                check_refusal(self.address, response, self.retries.answer_s)  # httpx's, see `_get_directly`
            self._check_status(status, response.headers, place)
            if not is_whole or status != HTTPStatus.OK:
                self._check_range(response.headers, place, wanted)
            self._check_body(response.headers, place, wanted)
            pace = Pace(place.host, self.retries.window_s)
            try:
                for nbytes in wanted.pieces(response):
                    if stop.is_set():
                        raise CancelledError
                    pace.take(nbytes)
                    stream.take(nbytes)
            except (ClientError, *ConnectionFailure) as error:
                raise unreachable(place.host, error) from error
            if wanted.begin < wanted.end:
                raise PassingError(f"{place.host} ended its response early, at byte {wanted.begin}")

    @contextmanager
    def _answer(self, range_header: Mapping[str, str], stop: threading.Event) -> Iterator[tuple[_Place, Any]]:
        """Yield where the bytes are, and the response to a GET there, with its body unread."""
        with ExitStack() as stack:
            response = None
            with self._route.lock:  # while one request finds the place, others wait for it
                if stop.is_set():  # meanwhile
                    raise CancelledError
                place = self._route.place
                if place is None:
                    url = hf_hub_url(self.address.repo, self.name, revision=self.commit, endpoint=constants.ENDPOINT)
                    place, response = self._get(url, range_header, stack, is_listed=True)
                    if response.status_code < 400:
                        self._route.place = place
            if response is None:
                direct = self._get_directly(place, range_header, stack)
                response = direct or self._get(place.url, range_header, stack)[1]
            yield place, response

    def _get_directly(self, place: _Place, range_header: Mapping[str, str], stack: ExitStack) -> Answer | None:
        """Send a GET without httpx; None if it is for httpx to send, with its settings, and to explain the response."""
        if not place.is_direct or not has_default_client():
            return None
        headers = {**headers_of_requests(place.url), "Accept-Encoding": "identity", **range_header}
        limits = constants.HF_HUB_DOWNLOAD_TIMEOUT, self.retries.answer_s
        try:
            answer = stack.enter_context(
                self.connections.get(place.url, headers, *limits, place.redirects.check_connection)
            )
        except ssl.SSLCertVerificationError:  # httpx may trust other authorities
            place.is_direct = False
            return None
        except ConnectionFailure as error:
            raise unreachable(place.host, error) from error
        status = answer.status_code
        if status >= 400 and (is_passing(status) or not place.is_endpoint):
            return answer
        place.is_direct = status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT) and answer.left_nbytes is not None
        return answer if place.is_direct else None

    def _get(
        self, url: str, range_header: Mapping[str, str], stack: ExitStack, *, is_listed: bool = False
    ) -> tuple[_Place, Any]:
        """Send a GET and follow redirects, except to internal addresses; `stack` closes the response."""
        headers = {**headers_of_requests(url), "Accept-Encoding": "identity", **range_header}
        redirects = Redirects(str(self), url)
        for _ in range(_MAX_REDIRECTS):
            place = _Place(url, redirects)
            call = get_session().stream(
                "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=False,
                extensions={"trace": _checking(redirects)},
            )  # fmt: skip
            leave = partial(call.__exit__, None, None, None)
            try:
                response = answered_within(self.retries.answer_s, place.host, partial(_begin, call), leave)
            except ClientError as error:
                raise unreachable(place.host, error) from error
            except ValueError as error:  # such as a host name that is too long
                raise self._wrong(place, f"invalid URL or response: {error}"[:_SHOWN_CHARS]) from error
            with ExitStack() as opened:
                opened.push(call.__exit__)
                target = self._target(place, response.headers["location"]) if _is_redirect(response) else None
                leaves = target is None or not target.is_endpoint
                if is_listed and place.is_endpoint and leaves and response.status_code < 400:
                    self._check_listed(response.headers)
                if target is None:
                    stack.enter_context(opened.pop_all())
                    return place, response
            redirects.follow(target.url)
            if urlsplit(target.url)[:2] != urlsplit(url)[:2]:
                headers.pop("Authorization", None)
            url = target.url
        raise PassingError(f"too many redirects from {place.host}")

    def _target(self, place: _Place, location: str) -> _Place:
        try:
            return _Place(urljoin(place.url, location), place.redirects)
        except ValueError as error:
            problem = f"expected a URL to redirect to, found {location[:_SHOWN_CHARS]!r}"
            raise self._wrong(place, problem) from error

    def _check_listed(self, headers: Mapping[str, str]) -> None:
        """Raise unless the hub says of the file what it listed."""
        self._expect("commit", self.commit, headers.get("x-repo-commit"))
        size = headers.get("x-linked-size", "")[:_MAX_DIGITS]  # a longer one differs, too
        self._expect("size", self.nbytes, int(size) if size.isdecimal() else None)
        if len(self.etag) == _SHA256_CHARS and (etag := headers.get("x-linked-etag") or headers.get("etag")):
            self._expect("SHA-256", self.etag, etag.removeprefix("W/").strip('"'))

    def _check_status(self, status: int, headers: Mapping[str, str], place: _Place) -> None:
        if is_passing(status):
            raise busy(place.host, status, headers)
        if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            problem = f"expected {self.nbytes} bytes (listing), but {place.host} has fewer"
            raise StoreError(str(self), problem, code="store.wrong-answer")
        if status >= 400:
            with self._route.lock:
                if self._route.place is place:
                    self._route.place = None
            raise PassingError(f"{place.host} refuses the signed URL ({status})")

    def _check_range(self, headers: Mapping[str, str], place: _Place, wanted: _Wanted) -> None:
        """Raise unless the response is the requested range: a server may ignore ranges."""
        expected = (wanted.begin, wanted.end - 1, self.nbytes)
        content_range = headers.get("content-range", "the whole file")
        match = _CONTENT_RANGE.fullmatch(content_range)
        if match is None or tuple(map(int, match.groups())) != expected:
            shown = content_range[:_SHOWN_CHARS]
            raise self._wrong(place, f"expected bytes {expected[0]}-{expected[1]}/{expected[2]}, found {shown}")

    def _check_body(self, headers: Mapping[str, str], place: _Place, wanted: _Wanted) -> None:
        """Raise unless the response has the requested length, no encoding, and the ETag of earlier ones."""
        nbytes = str(wanted.end - wanted.begin)
        if (length := headers.get("content-length", nbytes)) != nbytes:
            raise self._wrong(place, f"expected {nbytes} bytes, found {length[:_SHOWN_CHARS]}")
        if (encoding := headers.get("content-encoding", "identity")) != "identity":
            raise self._wrong(place, f"expected no encoding, found {encoding!r}")
        with self._route.lock:  # responses may arrive concurrently
            etag = headers.get("etag", place.etag).removeprefix("W/")
            if place.etag and etag != place.etag:
                raise self._wrong(place, f"expected ETag {place.etag} (earlier responses), found {etag}")
            place.etag = etag

    def _wrong(self, place: _Place, problem: str) -> InputError:
        fetch = f"hf download {self.address.repo} {self.name} --revision {self.commit}"
        hint = f"a proxy may be changing responses of {place.host}; bypass it, or download the file: {fetch}"
        return StoreError(str(self), problem, hint, code="store.wrong-answer")

    def _expect(self, what: str, listed: int | str | None, actual: int | str | None) -> None:
        if None not in (listed, actual) and listed != actual:
            raise StoreError(
                str(self),
                f"expected {what} {listed} (listing of {self.commit}), found {actual}",
                "check HF_ENDPOINT",
                code="store.wrong-answer",
            )


class _Route:
    """The location of a file's bytes, once known."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.place: _Place | None = None


class _Place:
    """A URL to fetch from, after `redirects`. `etag` is that of the first response, which all others must have."""

    def __init__(self, url: str, redirects: Redirects) -> None:
        self.url, self.redirects, self.etag = url, redirects, ""
        self.host = urlsplit(url).netloc
        self.is_endpoint, self.is_direct = is_endpoint(url), is_direct(url)


def _is_redirect(response: Any) -> bool:
    return response.status_code in _REDIRECTS and "location" in response.headers


def _checking(redirects: Redirects) -> Callable[[str, Mapping[str, Any]], None]:
    """Return a callback of httpcore that checks the address of a new connection before anything is sent."""
    hosts: list[str] = []  # a proxy connects for itself

    def trace(event: str, info: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.started":
            hosts.append(info["host"])
        elif event == "connection.connect_tcp.complete" and hosts[-1].rstrip(".").lower() == redirects.host:
            stream = info["return_value"]
            try:
                redirects.check_connection(stream.get_extra_info("server_addr")[0])
            except StoreError:
                stream.close()
                raise

    return trace


def _begin(call: AbstractContextManager[Any]) -> Any:
    """Return the response, and read the body of a redirect: otherwise its connection could not be used again."""
    response = call.__enter__()
    if _is_redirect(response) and int(response.headers.get("content-length", _UNREAD_NBYTES)) < _UNREAD_NBYTES:
        response.read()
    return response


class _Wanted:
    """The bytes of one request that have not arrived yet: [begin, end) of the file."""

    def __init__(self, into: memoryview, position: int) -> None:
        self._into = into
        self.begin, self.end = position, position + len(into)

    def pieces(self, response: Any) -> Iterator[int]:
        """Take the body of a response; yield the length of each piece that arrives."""
        if isinstance(response, Answer):
            while self.begin < self.end and (nbytes := response.read_into(self._rest)):
                self.begin += nbytes
                yield nbytes
            return
        for piece in response.iter_raw():
            if len(piece) > self.end - self.begin:
                raise PassingError("received more bytes than requested")
            self._rest[: len(piece)] = piece
            self.begin += len(piece)
            yield len(piece)

    @property
    def _rest(self) -> memoryview:
        return self._into[len(self._into) - (self.end - self.begin) :]
