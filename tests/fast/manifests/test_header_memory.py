"""Headers and other JSON are read in memory that their bytes bound, whatever they say."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests import store
from manifests.errors import InputError
from manifests.jsontext import MAX_CONFIG_NBYTES, MOST_CONFIG_VALUES, MOST_VALUES, parse_json_object
from manifests.safetensors import Header, TensorEntry, encode_header, layout_tensors, parse_header
from stores import base
from stores.local import LocalFile

NUM_TENSORS = 20_000
MOST_NBYTES_PER_TENSOR = 900  # with its name, and what is needed on the way


def peak_nbytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def names_of(count: int) -> list[str]:
    return [f"model.layers.{number % 64}.mlp.experts.{number // 64}.gate_proj.weight" for number in range(count)]


def test_a_header_takes_less_than_a_kilobyte_for_each_tensor() -> None:
    raw = encode_header(layout_tensors((name, "BF16", (2, 8)) for name in names_of(NUM_TENSORS)), {"format": "pt"})[8:]
    kept: list[Header] = []
    used = peak_nbytes(lambda: kept.append(parse_header(raw, data_nbytes=None, where="h")))
    assert len(kept[0].tensors) == NUM_TENSORS
    assert used < MOST_NBYTES_PER_TENSOR * NUM_TENSORS


@pytest.mark.parametrize(
    ("front", "unit", "back"),
    [
        (b'{"a":[', b"[],", b"[]]}"),
        (b'{"a":[', b"{},", b"{}]}"),
        (b'{"a":[', b"0,", b"0]}"),
        pytest.param(b'{"a":[', b'{"a":0},', b"0]}", marks=pytest.mark.slow),
        (b'{"__metadata__":{"a":[', b"[],", b"[]]}}"),
        (b'{"a":{"dtype":"U8","shape":[', b"1,", b'1],"data_offsets":[0,1]}}'),
    ],
)
def test_more_values_than_any_header_has_are_refused_before_one_is_built(
    front: bytes, unit: bytes, back: bytes
) -> None:
    raw = front + unit * (MOST_VALUES + 1) + back
    with pytest.raises(InputError) as refused:
        parse_header(raw, data_nbytes=None, where="h")
    assert (refused.value.code, refused.value.where) == ("source.too-many-values", "h: header")
    with pytest.raises(InputError) as refused:
        parse_json_object(raw, "index.json")
    assert (refused.value.code, refused.value.where) == ("source.too-many-values", "index.json")


def test_refusing_too_many_values_takes_no_memory() -> None:
    raw = b'{"a":[' + b"[]," * MOST_VALUES + b"[]]}"

    def refuse() -> None:
        with pytest.raises(InputError):
            parse_header(raw, data_nbytes=None, where="h")

    assert peak_nbytes(refuse) < 1 << 20


@pytest.mark.parametrize("read", [store.read_config, lambda path: base.read_config(LocalFile(path))])
def test_a_config_of_more_values_or_bytes_than_any_has_is_refused_before_one_is_built(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    large, long = tmp_path / "large.json", tmp_path / "long.json"
    large.write_bytes(b'{"a":[' + b"[]," * MOST_CONFIG_VALUES + b"[]]}")
    long.touch()
    os.truncate(long, MAX_CONFIG_NBYTES + 1)
    for path, code in ((large, "source.too-many-values"), (long, "source.file-too-large")):

        def refuse(path: Path = path, code: str = code) -> None:
            with pytest.raises(InputError) as refused:
                read(path)
            assert (refused.value.code, refused.value.where) == (code, str(path))

        assert peak_nbytes(refuse) < 1 << 20


SPACE = st.text(" \t\n\r", max_size=2)
NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=6).filter(lambda name: name != "__metadata__")


@st.composite
def header_texts(draw: st.DrawFn) -> bytes:
    """Draw a header's text in any of the spellings that JSON allows."""
    names = draw(st.lists(NAMES, unique=True, max_size=4))
    shapes = [tuple(draw(st.lists(st.integers(0, 3), max_size=3))) for _ in names]
    entries = layout_tensors(
        (name, draw(st.sampled_from(["U8", "F32"])), dims) for name, dims in zip(names, shapes, strict=True)
    )
    pairs = [(entry.name, _fields(draw, entry)) for entry in draw(st.permutations(entries))]
    if draw(st.booleans()):
        pairs.insert(
            draw(st.integers(0, len(pairs))),
            ("__metadata__", _object(draw, [(name, _string(draw, name)) for name in names])),
        )
    return f"{draw(SPACE)}{_object(draw, pairs)}{draw(SPACE)}".encode()


def _fields(draw: st.DrawFn, entry: TensorEntry) -> str:
    fields: dict[str, Any] = {
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "data_offsets": [entry.begin, entry.end],
    }
    return _object(draw, [(key, json.dumps(fields[key])) for key in draw(st.permutations(list(fields)))])


def _object(draw: st.DrawFn, pairs: list[tuple[str, str]]) -> str:
    spaced = (
        f"{draw(SPACE)}{_string(draw, key)}{draw(SPACE)}:{draw(SPACE)}{value}{draw(SPACE)}" for key, value in pairs
    )
    return "{" + ",".join(spaced) + (draw(SPACE) if not pairs else "") + "}"


def _string(draw: st.DrawFn, text: str) -> str:
    return json.dumps(text, ensure_ascii=draw(st.booleans()))


@given(header_texts())
def test_a_header_is_what_json_says_in_any_spelling(raw: bytes) -> None:
    table = json.loads(raw)
    metadata = table.pop("__metadata__", {})
    read = parse_header(raw, data_nbytes=None, where="h")
    assert read.metadata == metadata
    assert [(entry.name, entry.dtype, list(entry.shape), [entry.begin, entry.end]) for entry in read.tensors] == [
        (name, fields["dtype"], fields["shape"], fields["data_offsets"]) for name, fields in table.items()
    ]
