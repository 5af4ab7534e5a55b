"""Fuzz target: a whole safetensors file. What our reader takes, the `safetensors` library takes, and finds the same."""

from __future__ import annotations

from manifests.errors import InputError
from manifests.safetensors import Header, encode_header, header_nbytes, parse_header
from tests.builders import DTYPE_BITS, Tensor, read_safetensors

_EMPTY = b"\x02\0\0\0\0\0\0\0{}"


def check(file: bytes) -> None:
    """Raise AssertionError unless the file is refused, or read as the library reads it and written stably."""
    try:
        length = header_nbytes(file[:8], len(file), "f")
        begin = 8 + length
        header = parse_header(file[8:begin], data_nbytes=len(file) - begin, where="f")
    except InputError:
        return
    found = read_safetensors(file)
    assert found == {
        entry.name: Tensor(dtype=entry.dtype, shape=entry.shape, data=file[begin + entry.begin : begin + entry.end])
        for entry in header.tensors
    }
    text = _encode(header)
    again = parse_header(text[8:], data_nbytes=len(file) - begin, where="again")
    assert (again.tensors, again.metadata) == (header.tensors, header.metadata)
    assert _encode(again) == text


def seeds() -> tuple[bytes, ...]:
    """Give files to begin with: no tensor, every dtype, several tensors in another order than their bytes."""
    whole = encode_header((), {}) + b""
    table = {
        dtype: f'{{"dtype":"{dtype}","shape":[4],"data_offsets":[0,{bits // 2}]}}' for dtype, bits in DTYPE_BITS.items()
    }
    each = [_file(f'{{"a":{entry}}}', DTYPE_BITS[dtype] // 2) for dtype, entry in table.items()]
    several = _file(
        '{"__metadata__":{"format":"pt","blake3":""},'
        '"b":{"dtype":"F32","shape":[2,1],"data_offsets":[2,10]},'
        '"empty":{"dtype":"U8","shape":[3,0],"data_offsets":[2,2]},'
        '"a.weight":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}',
        10,
    )
    return (_EMPTY, whole, several, *each)


def _encode(header: Header) -> bytes:
    return encode_header(header.tensors, header.metadata, alignment=8)


def _file(text: str, data_nbytes: int) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + bytes(range(data_nbytes))
