"""Packed folders renamed, copied and swapped, as ranks load them: refused, or the right tensors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from manifests.errors import UserError
from manifests.schema import MOMENTS, WEIGHTS
from runner.bundle.packed import open_packed
from runner.load.load import load_tensors
from runner.tensors.local_shard import whole_pieces
from tests.builders import Tensor
from tests.fast.reshard.checks.test_swapped_outputs import CHANGES, contents, place

__all__ = ["place"]  # a fixture


def loaded(folder: Path) -> dict[tuple[str, str], bytes]:
    """Return the bytes of all weights and optimizer state, as a rank of pp=1 loads them."""
    packed, tensors_by_kind = open_packed(folder), {}
    for holds in (WEIGHTS, *MOMENTS):
        tensors = {fqn: torch.empty(shape) for fqn, shape in packed.shape.tensors.items()}
        load_tensors(whole_pieces(tensors), packed.bundles, packed.shape, holds)
        tensors_by_kind |= {(holds, fqn): tensor.numpy().tobytes() for fqn, tensor in tensors.items()}
    return tensors_by_kind


def expected_of(tensors: dict[tuple[str, str], Tensor]) -> dict[tuple[str, str], bytes]:
    return {key: torch.frombuffer(bytearray(tensor.data), dtype=DTYPES[tensor.dtype]).float().numpy().tobytes()
            for key, tensor in tensors.items()}  # fmt: skip


DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


def test_renamed_folder_loads_what_it_has(place: Path, tmp_path: Path) -> None:
    out = shutil.copytree(place / "model" / "trained", tmp_path / "step-000099")
    found, expected = loaded(out), expected_of(contents(out))
    assert found == {key: expected[key] for key in found}


@pytest.mark.parametrize("name", CHANGES)
def test_swapped_folder_is_refused_or_loads_the_right_tensors(name: str, place: Path, tmp_path: Path) -> None:
    out = shutil.copytree(place / "model" / "trained", tmp_path / "step-000099")
    expected = expected_of(contents(out))
    CHANGES[name](out, place / "other" / "trained")
    codes, tensors = set(), {}
    try:
        tensors = loaded(out)
    except UserError as refusal:
        codes.add(refusal.code)
    assert {code.partition(".")[0] for code in codes} <= {"shard", "manifest", "source"}
    assert tensors == {key: expected[key] for key in tensors}
