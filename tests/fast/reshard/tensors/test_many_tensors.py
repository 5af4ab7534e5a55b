"""Checkpoints of many tensors: twice as many as any that is published fit into memory, and are written as ever."""

from __future__ import annotations

import filecmp
import json
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from bench.measure import cpu_s_since
from manifests.errors import InputError
from manifests.models import model_shape
from manifests.safetensors import encode_header, layout_tensors
from reshard.plans.pack_plan import lay_out_readable
from reshard.tensors.lazy import MemoryFile
from reshard.tensors.source_index import RecordedShard, SourceRecord, decode_record, encode_record
from stores.bundles import TensorAt
from tests.builders import INDEX

ROOT = Path(__file__).parents[4]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
# Prints the most memory that it ever had in use; getrusage would count the process that it was forked from.
MEASURED = """
import sys
from reshard.cli import main
try:
    main()
finally:
    print(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0], file=sys.stderr)
"""
START_NBYTES = 64 << 20  # of Python with a verb's modules
MOST_NBYTES_PER_TENSOR = 1500  # with its name, and what is needed on the way
MANY, MOST_NBYTES = 198_861, 600_000_000


def write_many(folder: Path, num_layers: int, num_experts: int, num_shards: int) -> int:
    """Write a model of so many small tensors as sparse files; return their number."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 16, "intermediate_size": 16,
        "moe_intermediate_size": 16, "num_hidden_layers": num_layers, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "num_experts": num_experts,
        "num_experts_per_tok": 2, "quantization_config": FP8,
    }  # fmt: skip
    shapes = model_shape(config).tensors
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names, weight_map = list(shapes), {}
    for number in range(num_shards):
        held = names[len(names) * number // num_shards : len(names) * (number + 1) // num_shards]
        shard = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        entries = layout_tensors((fqn, "F32" if fqn.endswith("_inv") else "F8_E4M3", shapes[fqn]) for fqn in held)
        header = encode_header(entries, {"format": "pt"}, alignment=8)
        with open(folder / shard, "wb") as file:
            file.write(header)
            file.truncate(len(header) + entries[-1].end)
        weight_map |= dict.fromkeys(held, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}, indent=2))
    return len(names)


def peak_nbytes(*args: str | Path) -> int:
    """Run a command, and return its peak of memory."""
    command = [sys.executable, "-c", MEASURED, *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stderr.splitlines()[-1])


def test_a_plan_and_a_virtual_pack_take_a_kilobyte_for_each_tensor(tmp_path: Path) -> None:
    source = tmp_path / "source"
    num_tensors = write_many(source, num_layers=20, num_experts=500, num_shards=20)
    bound = START_NBYTES + MOST_NBYTES_PER_TENSOR * num_tensors
    assert peak_nbytes("plan", source, "--layout", "pp=4") < bound
    assert peak_nbytes("pack", source, "--layout", "pp=4", "--virtual", "--out", tmp_path / "out", "--quiet") < bound


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of twice the tensors of DeepSeek-V3, and pack it for 4 stages."""
    folder = tmp_path_factory.mktemp("many")
    assert write_many(folder / "source", num_layers=66, num_experts=500, num_shards=100) == MANY
    assert peak_nbytes("pack", folder / "source", "--layout", "pp=4", "--out", folder / "packed") < MOST_NBYTES
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "command",
    [
        ("plan", "source", "--layout", "pp=4"),
        ("pack", "source", "--layout", "pp=4", "--virtual", "--out"),
        ("inspect", "packed", "--tensors"),
        ("verify", "packed"),
        ("verify", "packed", "--against", "source"),
        ("diff", "packed", "source"),
        ("diff", "packed", "packed"),
        ("pack", "packed", "--layout", "pp=2", "--out"),
    ],
    ids=" ".join,
)
def test_many_tensors_take_less_than_600_mb(command: tuple[str, ...], many: Path, tmp_path: Path) -> None:
    args = [many / arg if arg in ("source", "packed") else arg for arg in command]
    assert peak_nbytes(*args, *([tmp_path / "out"] if args[-1] == "--out" else [])) < MOST_NBYTES


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_tensors_are_exported_as_they_were(many: Path, tmp_path: Path) -> None:
    assert peak_nbytes("export", many / "packed", "--to", "hf", "--out", tmp_path / "out") < MOST_NBYTES
    for path in (many / "source").iterdir():
        assert filecmp.cmp(path, tmp_path / "out" / path.name, shallow=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_tensors_of_one_stage_are_in_headers_that_safetensors_reads(many: Path, tmp_path: Path) -> None:
    """A header of all of them would be too long: the library refuses it."""
    out = tmp_path / "out"
    assert peak_nbytes("pack", many / "source", "--layout", "pp=1", "--out", out) < MOST_NBYTES
    assert peak_nbytes("verify", out) < MOST_NBYTES
    for folder, num_shards in ((many / "packed", 4), (out, 2)):
        read = [safe_open(shard, "np").keys() for shard in folder.rglob("*.safetensors")]
        assert (len(read), sum(map(len, read))) == (num_shards, MANY)


@given(st.binary(max_size=12), st.integers(0), st.sampled_from([b"", b'"', b"\\", b"\\ud83d", b"\\u00"]))
def test_a_damaged_record_is_refused_or_read_as_json_says(noise: bytes, at: int, more: bytes) -> None:
    text = encode_record(SourceRecord(shards=(RecordedShard("a.safetensors", b"{}"),), index=b'"\xc3\xa9"'))
    at %= len(text)
    damaged = text[:at] + noise + more + text[at + len(noise) :]
    try:
        found = decode_record(damaged)
    except InputError:
        return
    document = json.loads(damaged)
    assert [(shard.name, shard.header_text.decode()) for shard in found.shards] == [
        (shard["name"], shard["header"]) for shard in document["shards"]
    ]
    assert (found.index and found.index.decode(), list(found.dropped)) == (document["index"], document["dropped"])


def test_a_bundle_whose_header_no_reader_accepts_is_planned_as_several_shards() -> None:
    tensors = [TensorAt(letter * 34_000_000, "U8", (1,), MemoryFile("source", b"abc"), 0, 1) for letter in "abc"]
    shards = list(lay_out_readable(tensors))
    assert [[origin.name[0] for origin in shard.origins] for shard in shards] == [["a"], ["b", "c"]]
    assert all(shard.header_nbytes <= 100_000_000 for shard in shards)  # the limit of the safetensors library


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_deepseek_v3_of_megatron_core_is_planned_in_seconds_and_600_mb(tmp_path: Path) -> None:
    from bench.sparse_megatron import write_sparse_megatron  # with torch

    config = json.loads((ROOT / "tests" / "data" / "configs" / "deepseek-v3.json").read_text())
    del config["quantization_config"]
    made = write_sparse_megatron(tmp_path / "iter_0000001", config, num_ranks=128)
    assert (made.num_chunks > 45_000, made.nbytes > 1.3e12) == (True, True)
    for verb, *flags in (["plan"], ["pack", "--out", tmp_path / "out", "--dry-run"]):
        before = getrusage(RUSAGE_CHILDREN)
        assert peak_nbytes(verb, tmp_path / "iter_0000001", "--layout", "pp=16", *flags) < MOST_NBYTES
        assert cpu_s_since(before) < 20, verb  # 14 s at a load of 27; bench/deepseek.py --megatron measures it
