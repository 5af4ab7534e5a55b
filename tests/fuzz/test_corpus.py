"""What fuzzing has found so far, once more: no crash, no broken promise, little memory and few steps for each input."""

from __future__ import annotations

import tracemalloc
from functools import partial
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS
from tests.steps import steps_of

CORPUS = Path(__file__).with_name("corpus")
MAX_STEPS = 20_000  # beside 40 for each byte of the input
MAX_NBYTES = 2 << 20  # beside 64 for each byte of the input
DECODERS = ("header", "manifest", "record")  # whose memory is bounded by their input's size


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_is_refused_or_read_stably(name: str) -> None:
    target = TARGETS[name]
    for data in (*target.seeds(), *(path.read_bytes() for path in sorted((CORPUS / name).iterdir()))):
        if name not in DECODERS:
            target.check(data)
            continue
        tracemalloc.start()
        try:
            num_steps = steps_of(partial(target.check, data))
            assert tracemalloc.get_traced_memory()[1] < MAX_NBYTES + 64 * len(data), data
        finally:
            tracemalloc.stop()
        assert num_steps < MAX_STEPS + 40 * len(data), data


def test_the_corpus_is_there() -> None:
    assert all(any((CORPUS / name).iterdir()) for name in TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*")) < 600_000
