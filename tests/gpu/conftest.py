"""The device of a test: a GPU, for `make test-gpu`, and the CPU, where its twin of tiny sizes runs with the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import measure

Record = Callable[[str, Mapping[str, Any]], None]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("NO GPU HERE: make test-gpu says what it would run")
    return str(request.param)


@pytest.fixture
def record(device: str, tmp_path: Path) -> Record:
    """Return what writes a result, with date, commit and GPU, to bench/results/gpu-NAME.json; twins write theirs away.

    Results of benchmarks bring date and commit with them.
    """

    def write(name: str, result: Mapping[str, Any]) -> None:
        gpu = torch.cuda.get_device_name() if device == "cuda" else "none"
        folder = measure.ROOT / "bench" / "results" if device == "cuda" else tmp_path
        about = {**measure.circumstances(), "gpu": gpu, "torch": torch.__version__}
        measure.write_result({**about, **result}, str(folder / f"gpu-{name}.json"))

    return write
