"""SPEC.md is the contract: its tables are the types, and its reader reads what pack writes."""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import manifests
from manifests import schema
from manifests.safetensors import DTYPE_BITS
from tests.builders import DTYPE_BITS as LIBRARY_BITS
from tests.builders import HEAD, Tensor, llama_config, pack, write_model

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
    shown = {MISSING: "", None: "null", (): "[]", 0: "0", "weights": '"weights"'}
    return {field.name: shown[field.default] for field in fields(type_)}


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
