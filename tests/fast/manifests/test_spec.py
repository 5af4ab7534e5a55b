"""SPEC.md is the contract: its tables are the types, its readers read what pack writes, slices included."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import manifests
from manifests import schema
from manifests.safetensors import (
    DTYPE_BITS,
    Header,
    TensorEntry,
    header_template,
    layout_tensors,
    parse_header,
    read_header,
)
from manifests.slices import SLICES_KEY, Slice, problem_with_slices, slice_metadata, slices_in
from tests.builders import DTYPE_BITS as LIBRARY_BITS
from tests.builders import HEAD, Tensor, llama_config, pack, write_model
from tests.refusals import refusal

SPEC = Path(manifests.__file__).with_name("SPEC.md").read_text()


def tables_of_fields() -> list[dict[str, str]]:
    """Give every table of fields as (field, default); an empty default is a required field."""
    found: list[dict[str, str]] = []
    table: dict[str, str] | None = None
    for line in SPEC.splitlines():
        if line.startswith("| field | type | default |"):
            table = {}
            found.append(table)
        elif table is not None and (row := re.match(r"\| `(\w+)` \|[^|]*\| (?:`(.*?)` )?\|", line)):
            table[row[1]] = row[2] or ""
        elif not line.startswith("|"):
            table = None
    return found


def fields_of(type_: Any) -> dict[str, str]:
    shown = {MISSING: "", None: "null", (): "[]"}
    return {
        field.name: shown[field.default] if field.default in shown else json.dumps(field.default).removesuffix(".0")
        for field in fields(type_)
    }


def test_tables_list_the_fields_of_every_type_with_their_defaults() -> None:
    classes = [value for value in vars(schema).values() if inspect.isclass(value) and is_dataclass(value)]
    types = [type_ for type_ in classes if type_.__module__ == schema.__name__]
    expected = [fields_of(type_) for type_ in types]
    found = tables_of_fields()
    assert {found[0].pop(name) for name in ("format", "version", "digest")} == {""}
    for table in found:
        assert sorted(table.items()) in [sorted(fields.items()) for fields in expected]
    for fields_ in expected:
        assert sorted(fields_.items()) in [sorted(table.items()) for table in found]


def test_dtypes_of_the_table_are_the_ones_that_are_read() -> None:
    rows = re.findall(r"^\| (\d+) \| (`.*`) \|$", SPEC, re.MULTILINE)
    found = {dtype: int(bits) for bits, dtypes in rows for dtype in re.findall(r"`(\w+)`", dtypes)}
    assert found == dict(DTYPE_BITS) == dict(LIBRARY_BITS)


@pytest.mark.parametrize(("flags", "reader"), [((), "tensors_of_stage"), (("--virtual",), "tensors_in_spans")])
def test_readers_of_the_specification_read_a_packed_model(tmp_path: Path, flags: tuple[str, ...], reader: str) -> None:
    tensors = write_model(tmp_path / "source", llama_config(tie_word_embeddings=True), num_shards=2)
    pack(tmp_path / "source", tmp_path / "out", "pp=3", *flags)
    code = textwrap.dedent(SPEC.partition("## Reading\n")[2].partition("A real reader")[0])
    names: dict[str, Any] = {}
    exec(compile(code, "SPEC.md", "exec"), names)
    found = {
        fqn: Tensor(dtype=dtype, shape=tuple(shape), data=data)
        for stage in range(3)
        for fqn, dtype, shape, data in names[reader](tmp_path / "out", stage)
    }
    assert found == {**tensors, HEAD: tensors["model.embed_tokens.weight"]}


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


def cut(whole: tuple[int, ...], cuts: list[list[int]]) -> list[Slice]:
    """Cut a tensor along every dimension, as a mesh of ranks does."""
    bounds = [sorted({0, size, *(at % size for at in dim)}) for size, dim in zip(whole, cuts, strict=True)]
    return [
        Slice(
            offset=tuple(begin for begin, _ in box),
            shape=tuple(end - begin for begin, end in box),
            whole_shape=whole,
        )
        for box in product(*(pairwise(dim) for dim in bounds))
    ]


def header_of(entries: tuple[TensorEntry, ...], metadata: dict[str, str]) -> Header:
    raw = header_template(entries, metadata)[8:]
    return parse_header(raw, data_nbytes=sum(entry.nbytes for entry in entries), where="shard")


@given(
    SIZES.flatmap(
        lambda whole: st.tuples(st.just(whole), st.tuples(*[st.lists(st.integers(0, 9), max_size=3)] * len(whole)))
    )
)
def test_slices_of_a_mesh_are_one_tensor_and_without_one_or_with_one_twice_they_are_not(drawn: Any) -> None:
    whole, cuts = drawn
    slices = cut(whole, cuts)
    assert problem_with_slices(slices) is None
    assert problem_with_slices(slices[::-1]) is None
    assert problem_with_slices([*slices, slices[-1]]) is not None
    if len(slices) > 1:
        assert problem_with_slices(slices[1:]) is not None


def test_only_a_slice_with_elements_must_be_within_its_tensor() -> None:
    half, beyond = (Slice(offset=(begin,), shape=(2,), whole_shape=(4,)) for begin in (0, 3))
    empty = Slice(offset=(5,), shape=(0,), whole_shape=(4,))
    assert problem_with_slices([half, beyond]) is not None
    assert problem_with_slices([half, replace(half, offset=(2,)), empty]) is None


def test_slices_that_overlap_or_are_of_another_shape_are_named(wording: Callable[[str], None]) -> None:
    one = Slice(offset=(0, 0), shape=(2, 4), whole_shape=(4, 4))
    over = Slice(offset=(1, 0), shape=(2, 4), whole_shape=(4, 4))  # as many elements as the other half
    other = Slice(offset=(2, 0), shape=(3, 4), whole_shape=(5, 4))
    problems = [problem_with_slices(slices) for slices in ([one, over], [one, other], [one])]
    assert len({*problems} - {None}) == 3
    wording("\n".join(map(str, problems)))


def test_header_gives_back_what_was_written() -> None:
    slices = {
        "a": Slice(offset=(2, 0), shape=(2, 3), whole_shape=(6, 3)),
        "ü": Slice(offset=(0,), shape=(4,), whole_shape=(4,)),
    }
    entries = layout_tensors((name, "F32", part.shape) for name, part in slices.items())
    header = header_of(entries, slice_metadata(slices))
    assert slices_in(header, "shard") == slices
    assert header.metadata["DCP_VERSION"] == "1.0"
    assert slices_in(header_of(entries, {}), "shard") == {}


GOOD = {"saved_offsets": [0], "shape": [4]}
WHERE = f"shard: __metadata__.{SLICES_KEY}"


@pytest.mark.parametrize(
    ("table", "code", "place"),
    [
        ("{", "source.not-json", ""),
        ([], "source.not-an-object", ""),
        ({}, "header.invalid-slices", ""),
        ({"a": GOOD, "b": GOOD}, "header.invalid-slices", ""),
        ({"a": 1}, "header.invalid-slices", ": 'a'"),
        ({"a": {"saved_offsets": [0]}}, "header.invalid-slices", ": 'a'"),
        ({"a": {**GOOD, "shape": [-4]}}, "header.invalid-slices", ": 'a'.shape"),
        ({"a": {**GOOD, "saved_offsets": [0, 0]}}, "header.invalid-slices", ": 'a'.saved_offsets"),
        ({"a": {**GOOD, "saved_offsets": [True]}}, "header.invalid-slices", ": 'a'.saved_offsets"),
        ({"a": {**GOOD, "shape": [3]}}, "header.invalid-slices", ": 'a'"),
    ],
)
def test_header_with_a_wrong_description_of_slices_is_refused(
    table: Any, code: str, place: str, wording: Callable[[str], None]
) -> None:
    text = table if isinstance(table, str) else json.dumps(table)
    header = header_of(layout_tensors([("a", "F32", (4,))]), {SLICES_KEY: text})
    error = refusal(lambda: slices_in(header, "shard"))
    assert (error.code, error.where) == (code, f"{WHERE}{place}")
    wording(str(error))


GOLDEN = Path(__file__).parents[2] / "data/golden/shard-v1-slices.safetensors"
IN_GOLDEN = {
    "model.layers.0.mlp.down_proj.weight": Slice(offset=(0, 2), shape=(4, 2), whole_shape=(4, 4)),
    "model.norm.weight": Slice(offset=(0,), shape=(4,), whole_shape=(4,)),
}


def test_golden_shard_is_read_and_written_as_it_was() -> None:
    header = read_header(GOLDEN)
    assert slices_in(header, "golden") == IN_GOLDEN
    entries = layout_tensors((name, "U8", part.shape) for name, part in IN_GOLDEN.items())
    written = header_template(entries, slice_metadata(IN_GOLDEN), header.digests("golden"))
    assert GOLDEN.read_bytes() == written + bytes(range(12))
