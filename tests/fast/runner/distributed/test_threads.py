"""How many threads a rank computes with."""

from __future__ import annotations

import pytest

from runner.distributed.world import num_threads


@pytest.mark.parametrize(
    ("given", "threads"), [("8", 8), ("4,2", 4), (" 3 ", 3), ("", 1), ("0", 1), ("-2", 1), ("x", 1)]
)
def test_threads_are_those_of_openmp_and_values_that_it_ignores_are_no_error(given: str, threads: int) -> None:
    """A job script that exports a variable of Slurm which is not set leaves an empty one."""
    assert num_threads({"OMP_NUM_THREADS": given}) == threads
    assert num_threads({}) == 1
