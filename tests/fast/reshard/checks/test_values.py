"""`check --values` reads every dtype of safetensors that has fractions; torch's values are the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import _TYPES as TORCH

from manifests.safetensors import DTYPE_BITS
from reshard.checks.check import check_values
from reshard.tensors.comparison import Findings
from stores.bundles import TensorAt
from stores.local import LocalFile

WHOLE = ("I", "U", "BOOL")  # dtypes that have neither NaN nor infinity, and matrices of zeros that mean something
NUM_BYTES = 24


def codes(path: Path, dtype: str, data: bytes) -> list[str]:
    path.write_bytes(data)
    count = len(data) * 8 // DTYPE_BITS[dtype]
    findings = Findings()
    tensor = TensorAt("w", dtype, (count // 2, 2), LocalFile(path), 0, len(data))
    counts: list[int] = []
    check_values([tensor], findings, counts.append)
    read_nbytes = sum(counts)
    assert read_nbytes == (0 if dtype.startswith(WHOLE) else len(data))
    return [found.code for found in findings]


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_with_fractions_is_read(dtype: str, tmp_path: Path) -> None:
    zeros = codes(tmp_path / "zeros", dtype, bytes(NUM_BYTES))
    assert zeros == ([] if dtype.startswith(WHOLE) or dtype == "F8_E8M0" else ["check.all-zero"])
    assert codes(tmp_path / "ones", dtype, b"\x01" * NUM_BYTES) == []


@pytest.mark.parametrize("dtype", [name for name in TORCH if not name.startswith(WHOLE)])
def test_every_pattern_is_broken_where_torch_says_so(dtype: str, tmp_path: Path) -> None:
    width = DTYPE_BITS[dtype] // 8
    for high in range(256) if width == 1 else (0, 0x3F, 0x7B, 0x7C, 0x7F, 0x80, 0xFC, 0xFF):
        for low in (0, 1, 0x7F, 0x80, 0xF0) if width > 1 else (0,):
            data = bytes([low]) * (width - 1) + bytes([high])
            value = torch.frombuffer(bytearray(data), dtype=TORCH[dtype])
            whole = value if dtype in ("C64", "F64") else value.float()
            found = codes(tmp_path / "one", dtype, data + b"\x01" * width)
            assert found == ([] if bool(torch.isfinite(whole).all()) else ["check.not-finite"]), data
