"""Safetensors headers, held against the `safetensors` library in both directions, and one case per malformation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from manifests.errors import InputError
from manifests.safetensors import (
    ALIGNMENT,
    Header,
    encode_header,
    header_template,
    layout_tensors,
    parse_header,
    read_header,
)
from tests.builders import DTYPE_BITS, Tensor, read_safetensors
from tests.refusals import refusal

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter("__metadata__".__ne__)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
METADATA = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8), st.text('aé\\"\n', max_size=8)
)
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip


@st.composite
def tables(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...]]]:
    """Draw (name, dtype, shape) of tensors that fill whole bytes."""
    table = []
    for name in draw(st.lists(NAMES, max_size=5, unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(DTYPE_BITS))), draw(SHAPES)
        table.append((name, dtype, shape if prod(shape) * DTYPE_BITS[dtype] % 8 == 0 else (*shape, 8)))
    return table


def file_of(header: Mapping[str, Any] | bytes, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def library_accepts(file: bytes) -> bool:
    try:
        read_safetensors(file)
    except SafetensorError:
        return False
    return True


def read(file: bytes) -> Header:
    """Parse a file's header the way `read_header` does."""
    nbytes = int.from_bytes(file[:8], "little")
    return parse_header(file[8 : 8 + nbytes], data_nbytes=len(file) - 8 - nbytes, where="f")


@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(TORCH_DTYPES)), SHAPES), max_size=5), METADATA)
def test_reader_sees_what_the_library_wrote(table: dict[str, tuple[str, tuple[int, ...]]], metadata: Any) -> None:
    tensors = {name: torch.zeros(shape, dtype=TORCH_DTYPES[dtype]) for name, (dtype, shape) in table.items()}
    file = save(tensors, metadata or None)  # with {} for both, safetensors 0.8.0 writes what it cannot read
    header = read(file)
    assert {entry.name: (entry.dtype, entry.shape) for entry in header.tensors} == table
    assert dict(header.metadata) == metadata
    data = file[header.nbytes :]
    assert {entry.name: data[entry.begin : entry.end] for entry in header.tensors} == {
        name: tensor.data for name, tensor in read_safetensors(file).items()
    }


def test_reader_agrees_with_safe_open_on_a_file_of_every_torch_dtype(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {
        dtype: torch.randint(0, 2, (3, 4)).to(torch.uint8).to(torch_dtype)
        for dtype, torch_dtype in TORCH_DTYPES.items()
    }
    save_file(tensors, path, {"format": "pt"})
    header = read_header(path)
    with safe_open(path, "pt") as file:
        assert sorted(entry.name for entry in header.tensors) == sorted(file.keys())
        assert header.metadata == file.metadata()
        for entry in header.tensors:
            view = file.get_slice(entry.name)
            assert (entry.dtype, list(entry.shape)) == (view.get_dtype(), view.get_shape())
    with open(path, "rb") as raw:
        data = raw.read()[header.nbytes :]
    for entry in header.tensors:
        assert data[entry.begin : entry.end] == bytes(tensors[entry.name].view(torch.uint8).numpy().tobytes())


@given(tables(), METADATA, st.sampled_from([1, 8, 64, ALIGNMENT]))
def test_library_opens_what_we_write_for_every_dtype(table: Any, metadata: Any, alignment: int) -> None:
    entries = layout_tensors(table)
    nbytes = sum(entry.nbytes for entry in entries)
    data = bytes(index % 251 for index in range(nbytes))
    head = encode_header(entries, metadata, alignment=alignment)
    assert len(head) % alignment == 0
    assert read_safetensors(head + data) == {
        entry.name: Tensor(dtype=entry.dtype, shape=entry.shape, data=data[entry.begin : entry.end])
        for entry in entries
    }
    assert read(head + data) == Header(tensors=entries, metadata=metadata, raw=head[8:])


@given(tables())
def test_template_and_final_header_are_equally_long_and_differ_in_digests_alone(table: Any) -> None:
    entries = layout_tensors(table)
    digests = {entry.name: blake3(entry.name.encode()).hexdigest() for entry in entries}
    blank, final = header_template(entries, {}), header_template(entries, {}, digests)
    assert len(blank) == len(final)
    data = bytes(sum(entry.nbytes for entry in entries))
    assert read(final + data).digests("f") == digests
    assert read(blank + data).tensors == read(final + data).tensors


@given(tables())
def test_digest_of_a_shard_is_blake3_of_everything_before_its_data(table: Any) -> None:
    entries = layout_tensors(table)
    head = header_template(entries, {})
    data = bytes(sum(entry.nbytes for entry in entries))
    assert read(head + data).digest == "blake3:" + blake3(head).hexdigest()


@given(tables(), st.data())
def test_what_the_reader_accepts_of_a_spoiled_header_the_library_accepts_too(table: Any, data: st.DataObject) -> None:
    header = json.loads(encode_header(layout_tensors(table), {"format": "pt"})[8:])
    fields = [(name, field) for name in header if name != "__metadata__" for field in header[name]]
    if fields:
        name, field = data.draw(st.sampled_from(fields))
        header[name][field] = data.draw(SPOILED[field])
    file = file_of(header, bytes(data.draw(st.integers(0, 64))))
    try:
        read(file)
    except InputError:
        return
    assert library_accepts(file)


@pytest.mark.parametrize(
    ("words", "found"),
    [("", 1), ("0" * 64, 1), (" ".join(["0" * 64] * 3), 3), (f"{'0' * 64}  {'0' * 64}", 3)],
    ids=["none", "one", "three", "blank"],
)
def test_a_shard_without_a_digest_for_each_tensor_is_refused(
    words: str, found: int, wording: Callable[[str], None]
) -> None:
    entries = layout_tensors([("a", "U8", (1,)), ("b", "U8", (1,))])
    header = read(encode_header(entries, {"blake3": words}) + b"ab")
    error = refusal(lambda: header.digests("shard"))
    assert (error.code, error.where) == ("header.no-digests", "shard: __metadata__.blake3")
    assert str(found) in error.problem
    wording(str(error))


COUNTS = st.sampled_from([-1, 0, 1, 2, 2**31, 2**62, 2**63, 2**64]) | st.booleans() | st.floats(0, 2) | st.none()
SPOILED: Mapping[str, st.SearchStrategy[Any]] = {
    "dtype": st.sampled_from([*DTYPE_BITS, "F7", "f32", "", 1, None, []]),
    "shape": st.lists(COUNTS, max_size=4) | st.none() | st.just({}) | st.just("11"),
    "data_offsets": st.lists(COUNTS, max_size=3) | st.none(),
}


def a(shape: Any, offsets: Any, dtype: Any = "U8") -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def b(shape: Any, offsets: Any) -> dict[str, Any]:
    return {"b": {"dtype": "U8", "shape": shape, "data_offsets": offsets}}


BAD_METADATA = (None, [], "x", {"format": 1}, {"format": None}, {"format": {}})
ENTRIES: tuple[Any, ...] = (
    None,
    [],
    {},
    {"dtype": "U8", "shape": []},
    {"dtype": "U8", "shape": [], "data_offsets": [0, 1], "strides": []},
)
DTYPES: tuple[Any, ...] = ("F7", "bf16", "", None, 8, ["U8"], {})
BAD_SHAPES: tuple[Any, ...] = (
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
        [file_of({"__metadata__": metadata}) for metadata in BAD_METADATA], "header.invalid-field", "__metadata__",
    ),
    "entry": ([file_of({"a": fields}, b"x") for fields in ENTRIES], "header.invalid-field", "'a'"),
    "dtype": ([file_of(a([1], [0, 1], dtype), b"x") for dtype in DTYPES], "header.unknown-dtype", "'a'.dtype"),
    "shape": ([file_of(a(shape, [0, 0])) for shape in BAD_SHAPES], "header.invalid-field", "'a'.shape"),
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
