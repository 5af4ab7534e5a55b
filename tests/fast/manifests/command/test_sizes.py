"""Sizes of memory: one reading everywhere, and none of a number whose unit was left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests.command.sizes import parse_size, read_size, write_size
from manifests.errors import UsageError


@pytest.mark.parametrize("text", ["80GB", "80GiB", "80G", "80 GB", "80gib", "80g", "0.078125TB", str(80 << 30)])
def test_memory_of_an_80_gb_card_is_one_number_however_it_is_written(text: str) -> None:
    assert parse_size(text) == 80 << 30


@pytest.mark.parametrize("text", ["80", "1048575", "79.5", "0", "0GB", "-1GB", "1e9", "80iB", "GB", "", "80 apples"])
def test_number_that_has_no_unit_or_is_no_size_is_refused(text: str) -> None:
    assert parse_size(text) is None
    with pytest.raises(UsageError) as error:
        read_size("--gpu-memory", text)
    assert (error.value.code, error.value.where) == ("options.memory-size", "--gpu-memory")


@given(st.integers(1, 1 << 50))
def test_size_that_is_written_is_read_back(nbytes: int) -> None:
    assert parse_size(write_size(nbytes)) == nbytes
