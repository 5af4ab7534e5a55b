"""One test per malformation of a safetensors file: one sentence, little memory, no time."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import InputError
from manifests.safetensors import read_header
from tests.steps import steps_of

MAX_REFUSAL_STEPS = 1000
AGAIN = "\nhint: download or copy the file again"
DAMAGED = "\nhint: the file is damaged or is not a safetensors file; download it again"
KNOWN = (
    "\nhint: known: BF16, BOOL, C64, F16, F32, F4, F64, F6_E2M3, F6_E3M2, F8_E4M3, F8_E4M3FNUZ, F8_E5M2, "
    "F8_E5M2FNUZ, F8_E8M0, I16, I32, I64, I8, U16, U32, U64, U8"
)


def a(shape: Any, offsets: Any, dtype: Any = "U8") -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def b(shape: Any, offsets: Any) -> dict[str, Any]:
    return {"b": {"dtype": "U8", "shape": shape, "data_offsets": offsets}}


def refusal(file: bytes, folder: Path) -> str:
    """Give what reading this file's header says, with the file's own path taken out."""
    path = folder / "f"
    path.write_bytes(file)
    with pytest.raises(InputError) as error:
        read_header(path)
    return str(error.value).replace(str(path), "f")


def file_of(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


@pytest.mark.parametrize("nbytes", [0, 1, 7])
def test_too_short_for_a_length(nbytes: int, tmp_path: Path) -> None:
    assert refusal(bytes(nbytes), tmp_path) == (
        f"f: too short for a safetensors file: {nbytes} bytes\n"
        "hint: the file is damaged or is not a safetensors file; download it again"
    )


@pytest.mark.parametrize("length", [3, 100_000_001, 2**63, 2**64 - 1])
def test_length_beyond_the_end_of_the_file(length: int, tmp_path: Path) -> None:
    assert refusal(length.to_bytes(8, "little") + b"{}", tmp_path) == (
        f"f: header length {length} is beyond the end of the file or the limit of 100000000 bytes{DAMAGED}"
    )


def test_length_beyond_the_limit_of_a_file_that_is_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes((100_000_001).to_bytes(8, "little"))
    with open(path, "r+b") as file:
        file.truncate(1 << 30)  # sparse
    with pytest.raises(InputError) as error:
        read_header(path)
    assert str(error.value) == (
        f"{path}: header length 100000001 is beyond the end of the file or the limit of 100000000 bytes{DAMAGED}"
    )


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "f: header: is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (
            b"\x80\x04K\x01.",
            "f: header: is not JSON: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte",
        ),
        (b"{]", "f: header: is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b"[]", "f: header: expected a JSON object, found a list"),
        (b"[" * 1_000_000, "f: header: is nested too deeply"),
        (b'{"a":' * 1_000_000, "f: header: is nested too deeply"),
        (b'{"a":{},"a":{}}', "f: header: is not JSON: key 'a' occurs twice"),
        (b'{"a":{"dtype":"U8","dtype":"U8"}}', "f: header: is not JSON: key 'dtype' occurs twice"),
        (b'{"a":{"shape":[NaN]}}', "f: header: is not JSON: NaN is not JSON"),
        (
            b'{"\\udc00":{}}',
            "f: header: is not JSON: 'utf-8' codec can't encode character '\\udc00' in position 2: "
            "surrogates not allowed",
        ),
        (
            b'{"a":{"shape":[' + b"9" * 5000 + b"]}}",
            "f: header: is not JSON: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 "
            "digits; use sys.set_int_max_str_digits() to increase the limit",
        ),
    ],
)
def test_header_that_is_no_json_object(header: bytes, message: str, tmp_path: Path) -> None:
    assert refusal(file_of(header), tmp_path) == message


@pytest.mark.parametrize("metadata", [None, [], "x", {"format": 1}, {"format": None}, {"format": {}}])
def test_metadata_that_is_no_table_of_strings(metadata: object, tmp_path: Path) -> None:
    header = {"__metadata__": metadata}
    assert refusal(file_of(header), tmp_path) == "f: __metadata__: expected an object of strings"


@pytest.mark.parametrize(
    "fields",
    [
        None,
        [],
        {},
        {"dtype": "U8", "shape": []},
        {"dtype": "U8", "shape": [], "data_offsets": [0, 1], "strides": []},
    ],
)
def test_entry_with_other_fields_than_a_tensor_has(fields: object, tmp_path: Path) -> None:
    assert refusal(file_of({"a": fields}, b"x"), tmp_path) == (
        "f: 'a': expected an object with dtype, shape and data_offsets"
    )


@pytest.mark.parametrize("dtype", ["F7", "bf16", "", None, 8, ["U8"], {}])
def test_unknown_dtype(dtype: object, tmp_path: Path) -> None:
    assert refusal(file_of(a([1], [0, 1], dtype), b"x"), tmp_path) == (f"f: 'a'.dtype: unknown dtype {dtype!r}{KNOWN}")


@pytest.mark.parametrize("shape", [None, 1, "1", {}, [1.0], ["1"], [None], [[1]], [True], [-1], [2**63], [1] * 65])
def test_shape_that_is_no_list_of_counts(shape: object, tmp_path: Path) -> None:
    assert refusal(file_of(a(shape, [0, 1]), b"x"), tmp_path) == (
        f"f: 'a'.shape: expected a list of counts, found {str(shape)[:80]}"
    )


@pytest.mark.parametrize("shape", [[2**62] * 40, [2**40, 2**40], [2**60], [0, 2**62, 2**62], [2**62, 2**62, 0]])
def test_shape_whose_product_overflows(shape: list[int], tmp_path: Path) -> None:
    assert refusal(file_of(a(shape, [0, 0])), tmp_path) == (
        f"f: 'a'.shape: expected less than 2^63 bits, found U8 {str(shape)[:80]}"
    )


@pytest.mark.parametrize(
    "offsets", [None, 1, [], [0], [0, 1, 1], [1, 0], [-1, 0], [0, 1.0], [False, True], ["0", "1"], [0, 2**63]]
)
def test_offsets_that_are_no_begin_and_end(offsets: object, tmp_path: Path) -> None:
    assert refusal(file_of(a([1], offsets), b"x"), tmp_path) == (
        f"f: 'a'.data_offsets: expected [begin, end], found {offsets}"
    )


@pytest.mark.parametrize(
    ("dtype", "shape", "taken"),
    [("U8", [3], "3"), ("F32", [1], "4"), ("F4", [3], "1.5"), ("I64", [2**20, 123], "1031798784"), ("BOOL", [], "1")],
)
def test_offsets_that_disagree_with_dtype_and_shape(dtype: str, shape: Any, taken: str, tmp_path: Path) -> None:
    assert refusal(file_of(a(shape, [0, 2], dtype), b"xy"), tmp_path) == (
        f"f: 'a'.data_offsets: {dtype} {shape} takes {taken} bytes, found 2"
    )


def test_tensors_that_overlap(tmp_path: Path) -> None:
    assert refusal(file_of(a([2], [0, 2]) | b([2], [1, 3]), b"xyz"), tmp_path) == (
        "f: 'b'.data_offsets: expected to begin at 2, found 1: overlaps the tensor before it"
    )


def test_two_tensors_of_the_same_bytes(tmp_path: Path) -> None:
    assert refusal(file_of(a([2], [0, 2]) | b([2], [0, 2]), b"xy"), tmp_path) == (
        "f: 'b'.data_offsets: expected to begin at 2, found 0: overlaps the tensor before it"
    )


def test_a_gap_between_tensors(tmp_path: Path) -> None:
    assert refusal(file_of(a([1], [0, 1]) | b([1], [2, 3]), b"xyz"), tmp_path) == (
        "f: 'b'.data_offsets: expected to begin at 1, found 2: leaves a gap before it"
    )


def test_a_gap_before_the_first_tensor(tmp_path: Path) -> None:
    assert refusal(file_of(a([1], [1, 2]), b"xy"), tmp_path) == (
        "f: 'a'.data_offsets: expected to begin at 0, found 1: leaves a gap before it"
    )


def test_a_tensor_beyond_the_end_of_the_file(tmp_path: Path) -> None:
    assert refusal(file_of(a([9], [0, 9]), b"x"), tmp_path) == (
        f"f: expected 9 bytes of data (header), found 1: the file is cut short{AGAIN}"
    )


def test_bytes_after_the_last_tensor(tmp_path: Path) -> None:
    assert refusal(file_of(a([1], [0, 1]), b"xyz"), tmp_path) == (
        f"f: expected 1 bytes of data (header), found 3: the file has bytes that no tensor owns{AGAIN}"
    )


def test_bytes_after_a_header_without_tensors(tmp_path: Path) -> None:
    assert refusal(file_of({}, b"x"), tmp_path) == (
        f"f: expected 0 bytes of data (header), found 1: the file has bytes that no tensor owns{AGAIN}"
    )


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError) as missing:
        read_header(tmp_path / "none")
    assert str(missing.value) == f"{tmp_path}/none: cannot be read: No such file or directory"
    with pytest.raises(InputError) as folder:
        read_header(tmp_path)
    assert str(folder.value) == f"{tmp_path}: cannot be read: Is a directory"


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
