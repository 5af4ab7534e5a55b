"""Chains that lie: refused with a code, and nothing of them is written."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import zstandard

import reshard
from manifests.errors import UserError
from tests.builders import INDEX, files_in
from tests.fast.reshard.delta import slime_decoder
from tests.fast.reshard.delta.states import write_states

NAME = "model.norm.weight"  # of 16 bf16 elements
NBYTES = 32
SHARD = "model-00000-of-00001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model `v1`, and a `chain` of slime's with a delta of it."""
    states = write_states(tmp_path, 2)
    slime_decoder.publish(tmp_path / "chain", 1, *states, "xor", "blake3")
    return tmp_path


def check_refused(folder: Path, code: str) -> None:
    before = files_in(folder / "v1")
    with pytest.raises(UserError) as refused:
        reshard.apply_delta(folder / "chain", folder / "v1")
    assert refused.value.code == code
    assert {name: data for name, data in files_in(folder / "v1").items() if not name.startswith(".cache")} == before
    assert not [path for path in folder.iterdir() if path.name not in ("chain", "v1", "v2")]


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("delta_encoding", "plus", "source.bad-delta"),
        ("compression_format", "lz4", "source.bad-delta"),
        ("checksum_format", "crc32", "source.bad-delta"),
        ("version", "000002", "source.bad-delta"),
        ("base_version", "1e3", "source.bad-delta"),
        ("base_version", "000001", "source.bad-delta"),
        ("state", "blake3:00", "source.bad-delta"),
        ("base_state", "blake3:" + "0" * 64, "source.other-base"),
        ("files", '{"../../evil.json": "blake3:%s"}' % ("0" * 64), "source.bad-delta"),
        ("files", '{"adapter_config.json": "blake3:%s"}' % ("0" * 64), "source.bad-delta"),
        ("files", '{"extra.safetensors": "blake3:%s"}' % ("0" * 64), "source.bad-delta"),
        ("files", '{"config.json": "md5:0"}', "source.bad-delta"),
    ],
)
def test_index_that_lies_is_refused(folder: Path, field: str, value: str, code: str) -> None:
    path = folder / "chain/weight_v000001" / INDEX
    index = json.loads(path.read_text())
    index["metadata"][field] = value
    path.write_text(json.dumps(index))
    check_refused(folder, code)


@pytest.mark.parametrize("shard", ["../v1/model-00001-of-00002.safetensors", "/etc/passwd", "a//b.safetensors"])
def test_index_that_leads_out_of_its_folder_is_refused(folder: Path, shard: str) -> None:
    path = folder / "chain/weight_v000001" / INDEX
    index = json.loads(path.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], shard)
    path.write_text(json.dumps(index))
    check_refused(folder, "source.bad-index")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("removed", ["../mine"]),
        ("removed", ["/mine"]),
        ("shards", ["../../evil"]),
        ("auxiliary", ["a/../../mine"]),
        ("removed", "v1"),
        ("shards", [1]),
        ("auxiliary", None),
    ],
)
def test_record_of_a_switch_that_leads_out_of_its_folder_is_refused(folder: Path, key: str, value: object) -> None:
    (folder / "v1/.cache/reshard/new").mkdir(parents=True)
    (folder / "v1/.cache/evil").write_text("evil")
    value = [str(folder / "mine")] if value == ["/mine"] else value
    record = {"shards": [], "auxiliary": [], "removed": []} | {key: value}
    (folder / "v1/.cache/reshard/switch.json").write_text(json.dumps(record))
    (folder / "mine").write_text("mine")
    with pytest.raises(UserError) as refused:
        reshard.apply_delta(folder / "chain", folder / "v1")
    assert refused.value.code == "output.bad-switch"
    assert sorted(path.name for path in folder.iterdir()) == ["chain", "mine", "v1", "v2"]


def overwriting(count: int, positions: list[int], values: bytes) -> bytes:
    return struct.pack(f"<I{len(positions)}I", count, *positions) + values


@pytest.mark.parametrize(
    ("name", "encoding", "difference"),
    [
        (NAME, "xor", b"not zstd"),
        (NAME, "xor", bytes(NBYTES - 1)),
        (NAME, "xor", bytes(NBYTES + 1)),
        (NAME, "xor", bytes(NBYTES)),  # it makes another state than its checksum says
        ("model.layers.9.mlp.up_proj.weight", "xor", bytes(NBYTES)),
        (NAME, "overwrite", overwriting(1, [NBYTES], b"x")),
        (NAME, "overwrite", overwriting(2, [5, 4], b"xy")),
        (NAME, "overwrite", overwriting(2, [5, 5], b"xy")),
        (NAME, "overwrite", overwriting(3, [1, 2], b"xy")),
        (NAME, "overwrite", overwriting(1, [1], b"xyz")),
        (NAME, "overwrite", struct.pack("<I", 0xFFFFFFFF)),
    ],
)
def test_delta_that_does_not_fit_is_refused(folder: Path, name: str, encoding: str, difference: bytes) -> None:
    data = difference if difference == b"not zstd" else zstandard.ZstdCompressor().compress(difference)
    version = folder / "chain/weight_v000001"
    header: dict[str, Any] = {"__metadata__": {name: "0" * 64}}
    header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    text = json.dumps(header).encode()
    (version / SHARD).write_bytes(struct.pack("<Q", len(text)) + text + data)
    index = json.loads((version / INDEX).read_text())
    index["metadata"]["delta_encoding"], index["weight_map"] = encoding, {name: SHARD}
    (version / INDEX).write_text(json.dumps(index))
    is_other_state = encoding == "xor" and difference == bytes(NBYTES) and name == NAME
    check_refused(folder, "shard.digest-mismatch" if is_other_state else "source.bad-delta")
