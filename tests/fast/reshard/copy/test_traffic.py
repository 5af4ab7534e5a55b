"""What `pack --dry-run` says will be read and written, held against what lies on disk before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.builders import reshard, write_model
from tests.fast.manifests.models.built import read_config
from tests.fast.reshard.transforms.test_dequantize import fp8, write_quantized
from tests.fast.sliced import CUTS, cut_up
from tests.fast.trained import write_trained

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
