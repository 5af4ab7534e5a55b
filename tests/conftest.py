"""What holds for every test: one thread per process, no hub, no deadline but the timeout."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from syrupy.assertion import SnapshotAssertion

from manifests.errors import naming_flags
from tests.no_fsync import FSYNC, stop_fsync

# Before anything imports torch, tokenizers or huggingface_hub; processes that tests start inherit it.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
# torchtitan asks, when imported, for a GPU: of the driver it would start CUDA, which forked ranks then may not.
os.environ.update(PYTORCH_NVML_BASED_CUDA_CHECK="1")

# Hundreds of processes start, and each would compile our sources, and each of pytest's workers all tests, for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell's background jobs ignore Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

stop_fsync()

# A shared machine stalls now and then: an example may take long, a test may not (`timeout`, pyproject.toml).
settings.register_profile("explore", deadline=None, max_examples=60)
settings.register_profile("house", settings.get_profile("explore"), derandomize=True)
settings.load_profile("house")


def pytest_configure(config: pytest.Config) -> None:
    """Draw the same examples in every run, unless `--hypothesis-profile=explore` wants others."""
    if config.getoption("hypothesis_profile") is None:
        # Hypothesis also draws constants of the modules imported so far: another order of tests, other examples.
        providers._get_local_constants = lambda: providers._local_constants


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep torch, transformers and the tests out of each collection of garbage: they stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def flags_in_errors() -> Iterator[None]:
    """Write errors as the commands do; tests of the Python API have another fixture of this name."""
    with naming_flags():
        yield


@pytest.fixture
def real_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush files to disk after all."""
    monkeypatch.setattr(os, "fsync", FSYNC)


@pytest.fixture
def wording(snapshot: SnapshotAssertion, tmp_path: Path) -> Callable[[str], None]:
    """Compare a message with its reviewed snapshot, which `make wording` renews; `tmp_path` stands as TMP there."""

    def compare(message: str) -> None:
        assert message.replace(str(tmp_path), "TMP") == snapshot

    return compare
