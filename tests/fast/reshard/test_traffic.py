"""What `pack --dry-run` says will be read and written, held against what lies on disk before and after."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from tests.builders import files_in, llama_config, random_tensors, reshard, write_model
from tests.fast.models.built import read_config
from tests.fast.reshard.test_dequantize import fp8, write_quantized
from tests.fast.sliced import CUTS, cut_up
from tests.fast.trained import write_trained

BIG = llama_config(hidden_size=512, num_attention_heads=16, intermediate_size=64, vocab_size=64)  # sectors are full
NBYTES = 18208  # of the tensors of llama_config(), in BF16


def told(source: Path, *flags: str | Path) -> dict[str, Any]:
    """Return what a dry run says, having packed and seen that as much was written."""
    pack = ("pack", source, "--layout", "pp=2", "--out", source.parent / "out", *flags)
    plan: dict[str, Any] = reshard(*pack, "--dry-run", "--json").json
    assert reshard(*pack).code == 0
    shards = (source.parent / "out").rglob("*.safetensors")
    assert plan["write_nbytes"] == sum(shard.stat().st_size for shard in shards)
    return plan


@pytest.mark.parametrize(
    ("flags", "nbytes"),
    [((), NBYTES), (("--dtype", "fp32"), NBYTES), (("--dtype", "bf16"), NBYTES), (("--virtual",), 0)],
    ids=["plain", "fp32", "bf16", "virtual"],
)
def test_stored_bytes_are_read_whatever_becomes_of_them(flags: tuple[str, ...], nbytes: int, tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    assert told(tmp_path / "source", *flags)["read_nbytes"] == nbytes


def test_stages_that_are_not_packed_are_not_read(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    plan = told(tmp_path / "source", "--stages", "1")
    assert plan["read_nbytes"] == plan["stages"][1]["nbytes"] < NBYTES
    text = reshard("pack", tmp_path / "source", "--layout", "pp=2", "--virtual", "--out", tmp_path / "v", "--dry-run")
    assert text.out.splitlines()[-1] == "to read 0 B, to write 0 B"


def test_scales_of_quantized_weights_are_read_with_them(tmp_path: Path) -> None:
    config = {**read_config("tiny-deepseek-v3"), "quantization_config": fp8(128, 128)}
    stored = write_quantized(tmp_path / "source", config)
    plan = told(tmp_path / "source", "--dequantize", "fp32")
    assert plan["read_nbytes"] == sum(len(tensor.data) for tensor in stored.values())


def test_slices_that_are_merged_on_their_way_are_read_as_they_lie(tmp_path: Path) -> None:
    trained = write_trained(tmp_path, "pp=2")
    cut_up(trained, CUTS["rows"])
    stored = sum(stage["nbytes"] for stage in json.loads((trained / "manifest.json").read_text())["stages"])
    asked = ("pack", trained, "--out", tmp_path / "out", "--dry-run", "--json")
    plans = [reshard(*asked, *flags).json for flags in ((), ("--merge-slices",))]
    assert plans[0]["read_nbytes"] == plans[1]["read_nbytes"] == 3 * stored  # weights and two moments


@pytest.mark.parametrize(("memory", "times"), [("640MB", 1), ("1MB", 2)])
def test_a_bucket_is_read_once_into_another_where_shards_fit_into_memory(
    memory: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, received = llama_config(hidden_size=256, intermediate_size=512, vocab_size=1000), list[int]()

    class Counted(MemoryFile):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            received.append(len(data))
            return data

    write_model(tmp_path / "source", config, random_tensors(config), num_shards=2)
    fsspec.filesystem("memory").pipe({f"/source/{name}": data for name, data in files_in(tmp_path / "source").items()})
    pack = ("pack", "memory://source", "--layout", "pp=2", "--out", "memory://out", "--memory", memory)
    plan = reshard(*pack, "--dry-run", "--json").json
    for file in fsspec.filesystem("memory").store.values():
        file.__class__ = Counted
    assert reshard(*pack).code == 0
    nbytes = sum(stage["nbytes"] for stage in plan["stages"])
    assert plan["read_nbytes"] == times * nbytes
    assert 0 <= sum(received) - times * nbytes < 3 * 128 << 10  # headers, and what else is small
    assert reshard("verify", "memory://out", "--against", tmp_path / "source").code == 0
    fsspec.filesystem("memory").rm("/", recursive=True)


def test_config_index_and_headers_are_requested_at_the_same_time(tmp_path: Path) -> None:
    waiting, passed = threading.Barrier(4), set[str]()

    class Late(MemoryFile):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.path not in passed:
                passed.add(self.path)
                waiting.wait(10)
            return super().read(size)

    write_model(tmp_path / "source", num_shards=2)
    fsspec.filesystem("memory").pipe({f"/source/{name}": data for name, data in files_in(tmp_path / "source").items()})
    for file in fsspec.filesystem("memory").store.values():
        file.__class__ = Late
    assert reshard("plan", "memory://source", "--layout", "pp=2").code == 0
    assert {Path(path).name for path in passed} == {
        "config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }  # fmt: skip
    fsspec.filesystem("memory").rm("/", recursive=True)


def test_shards_are_read_while_earlier_ones_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = llama_config(hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    tensors = write_model(tmp_path / "source", config, random_tensors(config))
    left_nbytes, is_all_read = sum(len(tensor.data) for tensor in tensors.values()), threading.Event()
    write, num_written = MemoryFile.write, 0

    class Counted(MemoryFile):
        def read(self, size: int | None = -1, /) -> bytes:
            nonlocal left_nbytes
            if self.tell() > 0:  # not the header
                left_nbytes -= size or 0
                if left_nbytes <= 0:
                    is_all_read.set()
            return super().read(size)

    def write_late(file: MemoryFile, data: bytes) -> int:
        nonlocal num_written
        if file.path.startswith("/out/model-00001-of-00004"):
            assert is_all_read.wait(10)
            num_written += len(data)
        return write(file, data)

    fsspec.filesystem("memory").pipe({f"/source/{name}": data for name, data in files_in(tmp_path / "source").items()})
    for file in fsspec.filesystem("memory").store.values():
        file.__class__ = Counted
    monkeypatch.setattr(MemoryFile, "write", write_late)
    pack = ("pack", "memory://source", "--layout", "pp=4", "--out", "memory://out", "--memory", "26MiB")
    assert reshard(*pack).code == 0
    assert num_written == fsspec.filesystem("memory").size("/out/model-00001-of-00004.safetensors")
    fsspec.filesystem("memory").rm("/", recursive=True)


def test_parts_read_and_write_what_all_of_it_is(tmp_path: Path) -> None:
    write_model(tmp_path / "source", BIG, random_tensors(BIG, dtypes=["F32"]))
    asked = ("pack", tmp_path / "source", "--layout", "pp=3", "--out", tmp_path / "out", "--dry-run", "--json")
    whole = reshard(*asked).json
    parts = [reshard(*asked, "--part", f"{number}/3").json for number in (1, 2, 3)]
    for key in ("read_nbytes", "write_nbytes"):
        assert sum(part[key] for part in parts) == whole[key]
        assert all(0 < part[key] < whole[key] for part in parts)
