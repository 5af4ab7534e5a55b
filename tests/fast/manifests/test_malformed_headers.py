"""One case per malformation of a safetensors file: refused by code and place, with little memory and few steps."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import InputError
from manifests.safetensors import read_header
from tests.refusals import refusal
from tests.steps import steps_of

MAX_REFUSAL_STEPS = 1000


def a(shape: Any, offsets: Any, dtype: Any = "U8") -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def b(shape: Any, offsets: Any) -> dict[str, Any]:
    return {"b": {"dtype": "U8", "shape": shape, "data_offsets": offsets}}


def file_of(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


METADATA = (None, [], "x", {"format": 1}, {"format": None}, {"format": {}})
ENTRIES: tuple[Any, ...] = (
    None,
    [],
    {},
    {"dtype": "U8", "shape": []},
    {"dtype": "U8", "shape": [], "data_offsets": [0, 1], "strides": []},
)
DTYPES: tuple[Any, ...] = ("F7", "bf16", "", None, 8, ["U8"], {})
SHAPES: tuple[Any, ...] = (
    None, 1, "1", {}, [1.0], ["1"], [None], [[1]], [True], [-1], [2**63], [1] * 65,
    [2**62] * 40, [2**40, 2**40], [2**60], [0, 2**62, 2**62], [2**62, 2**62, 0],
)  # fmt: skip
OFFSETS: tuple[Any, ...] = (
    None, 1, [], [0], [0, 1, 1], [1, 0], [-1, 0], [0, 1.0], [False, True], ["0", "1"], [0, 2**63],
)  # fmt: skip
SIZES = (("U8", [3]), ("F32", [1]), ("F4", [3]), ("I64", [2**20, 123]), ("BOOL", []))

# What is wrong: files, the code, and the place within the file.
CASES: dict[str, tuple[list[bytes], str, str]] = {
    "too short": ([bytes(nbytes) for nbytes in (0, 1, 7)], "header.not-safetensors", ""),
    "length beyond the file": (
        [length.to_bytes(8, "little") + b"{}" for length in (3, 100_000_001, 2**63, 2**64 - 1)],
        "header.not-safetensors", "",
    ),
    "not JSON": (
        [
            file_of(text)
            for text in (b"", b"\x80\x04K\x01.", b"{]", b'{"a":{},"a":{}}', b'{"a":{"dtype":"U8","dtype":"U8"}}',
                         b'{"a":{"shape":[NaN]}}', b'{"\\udc00":{}}', b'{"a":{"shape":[' + b"9" * 5000 + b"]}}")
        ],
        "source.not-json", "header",
    ),
    "not an object": ([file_of(b"[]")], "source.not-an-object", "header"),
    "too deep": ([file_of(b"[" * 1_000_000), file_of(b'{"a":' * 1_000_000)], "source.json-too-deep", "header"),
    "metadata": (
        [file_of({"__metadata__": metadata}) for metadata in METADATA], "header.invalid-field", "__metadata__",
    ),
    "entry": ([file_of({"a": fields}, b"x") for fields in ENTRIES], "header.invalid-field", "'a'"),
    "dtype": ([file_of(a([1], [0, 1], dtype), b"x") for dtype in DTYPES], "header.unknown-dtype", "'a'.dtype"),
    "shape": ([file_of(a(shape, [0, 0])) for shape in SHAPES], "header.invalid-field", "'a'.shape"),
    "offsets": (
        [file_of(a([1], offsets), b"x") for offsets in OFFSETS], "header.invalid-field", "'a'.data_offsets",
    ),
    "size": (
        [file_of(a(shape, [0, 2], dtype), b"xy") for dtype, shape in SIZES], "header.wrong-offsets", "'a'.data_offsets",
    ),
    "overlap": (
        [file_of(a([2], [0, 2]) | b([2], [1, 3]), b"xyz"), file_of(a([2], [0, 2]) | b([2], [0, 2]), b"xy")],
        "header.wrong-offsets", "'b'.data_offsets",
    ),
    "gap": ([file_of(a([1], [0, 1]) | b([1], [2, 3]), b"xyz")], "header.wrong-offsets", "'b'.data_offsets"),
    "gap at the start": ([file_of(a([1], [1, 2]), b"xy")], "header.wrong-offsets", "'a'.data_offsets"),
    "truncated": ([file_of(a([9], [0, 9]), b"x")], "header.wrong-data-length", ""),
    "trailing bytes": (
        [file_of(a([1], [0, 1]), b"xyz"), file_of({}, b"x")], "header.wrong-data-length", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_malformed_file_is_refused(what: str, tmp_path: Path, wording: Callable[[str], None]) -> None:
    files, code, place = CASES[what]
    path = tmp_path / "f"
    messages = []
    for file in files:
        path.write_bytes(file)
        error = refusal(lambda: read_header(path))
        assert (error.code, error.where) == (code, f"{path}: {place}" if place else str(path)), file[:80]
        messages.append(str(error))
    wording(messages[0])


def test_length_beyond_the_limit_of_a_file_that_is_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes((100_000_001).to_bytes(8, "little"))
    with open(path, "r+b") as file:
        file.truncate(1 << 30)  # sparse
    assert refusal(lambda: read_header(path)).code == "header.not-safetensors"


def test_file_that_cannot_be_read(tmp_path: Path, wording: Callable[[str], None]) -> None:
    for path in (tmp_path / "none", tmp_path):
        error = refusal(lambda: read_header(path))  # noqa: B023 - called at once
        assert (error.code, error.where) == ("store.unreadable", str(path))
    wording(str(error))


@pytest.mark.parametrize(
    "file",
    [
        (2**63).to_bytes(8, "little") + b"{}",
        (99_999_999).to_bytes(8, "little") + b"{}",
        file_of(b"[" * 1_000_000),
        file_of(a([2**62] * 60, [0, 2**62])),
        file_of(a([1] * 200_000, [0, 1])),
    ],
)
def test_refusal_takes_little_memory_and_few_steps(file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(file)

    def read() -> None:
        with pytest.raises(InputError):
            read_header(path)

    tracemalloc.start()
    try:
        read()
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 10 * len(file) + (1 << 20)
    assert steps_of(read) < MAX_REFUSAL_STEPS
