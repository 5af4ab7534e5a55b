"""What fuzzing has found so far, once more: no crash, no broken promise, little memory and time for each input."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest

from tests.fuzz import header, manifest, record

CORPUS = Path(__file__).with_name("corpus")
TARGETS = {"header": header, "manifest": manifest, "record": record}
MAX_S = 1.0  # of the processor
MAX_NBYTES = 2 << 20  # beside 64 for each byte of the input


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_is_refused_or_read_stably(name: str) -> None:
    inputs = [*TARGETS[name].seeds(), *(path.read_bytes() for path in sorted((CORPUS / name).iterdir()))]
    for data in inputs:
        began_s = time.process_time()
        tracemalloc.start()
        try:
            TARGETS[name].check(data)
            assert tracemalloc.get_traced_memory()[1] < MAX_NBYTES + 64 * len(data), data
        finally:
            tracemalloc.stop()
        assert time.process_time() - began_s < MAX_S, data


def test_the_corpus_is_there() -> None:
    assert all(any((CORPUS / name).iterdir()) for name in TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*")) < 400_000
