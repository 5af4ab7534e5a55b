"""Headers of many files, read concurrently over a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from manifests.headertext import NO_NAMES
from manifests.safetensors import Header
from stores.base import InputFile, read_file_header
from stores.local import LocalFile

NUM_AT_ONCE = 16

Key = TypeVar("Key")
T = TypeVar("T")


def read_file_headers(files: Iterable[InputFile]) -> dict[InputFile, Header]:
    """Read and check the headers of safetensors files, in order.

    Raises:
        InputError: as `read_file_header`, for the first file that fails.
    """
    return dict(each_file_header(files))


def each_file_header(
    files: Iterable[InputFile],
    names: Mapping[str, str] = NO_NAMES,
    heads: Mapping[InputFile, Future[bytes]] | None = None,
) -> Iterator[tuple[InputFile, Header]]:
    """Yield each file and its header without storing them; files on this machine are read one at a time.

    `heads` are those of `read_head` that were read before.

    Raises:
        InputError: as `read_file_headers`.
    """
    read_before = heads or {}

    def read_one(file: InputFile) -> Header:
        return read_file_header(file, names, read_before[file].result() if file in read_before else None)

    return each_of(files, read_one)


def each_of(files: Iterable[InputFile], read_one: Callable[[InputFile], T]) -> Iterator[tuple[InputFile, T]]:
    """Yield each file and what is read of it, in order; files that are elsewhere are read concurrently.

    Raises:
        InputError: as `read_one`, for the first file that fails.
    """
    files = tuple(files)
    if all(isinstance(file, LocalFile) for file in files):
        yield from ((file, read_one(file)) for file in files)
        return
    read = at_once({file: partial(read_one, file) for file in files})
    for file in files:
        if file in read:  # otherwise an earlier one failed
            yield file, read.pop(file).result()


def at_once(calls: Mapping[Key, Callable[[], T]]) -> dict[Key, Future[T]]:
    """Run calls concurrently and return their futures; after the first failure, no more are started."""
    pool = ThreadPoolExecutor(NUM_AT_ONCE, thread_name_prefix="header")
    try:
        made = {key: pool.submit(call) for key, call in calls.items()}
        wait(made.values(), return_when=FIRST_EXCEPTION)
    finally:
        pool.shutdown(cancel_futures=True)
    return {key: call for key, call in made.items() if not call.cancelled()}
