"""What is compared of what is stored: each tensor that can be read, and each name once."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3

from reshard.checks.compare import hash_each
from reshard.tensors.comparison import Findings
from stores.bundles import TensorAt
from stores.local import LocalFile

NBYTES, NUM = 64, 9


@pytest.mark.parametrize("unreadable", [{0}, {NUM - 1}, {3, 4}, set(range(NUM))])
def test_tensors_that_can_be_read_are_hashed_beside_those_that_cannot(tmp_path: Path, unreadable: set[int]) -> None:
    data = bytes(range(NUM)) * NBYTES
    (tmp_path / "whole").write_bytes(data)
    (tmp_path / "empty").write_bytes(b"")
    tensors = [
        TensorAt(
            f"t{number}", "U8", (NBYTES,), LocalFile(tmp_path / ("empty" if number in unreadable else "whole")),
            number * NBYTES, NBYTES,
        )
        for number in range(NUM)
    ]  # fmt: skip
    findings = Findings()
    digests = hash_each(tensors, lambda nbytes: None, findings, code="check.unreadable")
    ranges = [data[number * NBYTES : (number + 1) * NBYTES] for number in range(NUM)]
    assert digests == [None if number in unreadable else blake3(part).hexdigest() for number, part in enumerate(ranges)]
    assert {(finding.code, finding.where) for finding in findings} == {("check.unreadable", str(tmp_path / "empty"))}
