"""Every family and every way to compute, trained by ranks that share a device, against transformers and plain runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.fast.runner.models.decoders import save_decoder
from tests.fast.runner.models.titans import in_files, load
from tests.fast.runner.tiny import padded_batch, save_model
from tests.gpu.conftest import Record
from tests.gpu.jobs import SEQ_LEN, VOCAB_SIZE, Job, gradients_of, pack, run_jobs
from tests.process.runner.pipeline.parity_cases import CHANGES
from tests.process.runner.pipeline.parity_reference import worst

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

Found = dict[str, list[dict[str, Any]]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Of losses, norms and gradients, relative. Kernels of a GPU add in other orders than transformers' may.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
# On the CPU `tests/process` has every family: one of torchtitan's, and one with two tensors between stages, are there
# to see that these tests run.
TWINS = ("tiny-qwen3-moe", "tiny-opt")
Case = tuple[str, str, int, str]  # device, family, ranks, dtype
CASES: tuple[Case, ...] = (
    *(("cpu", family, 2, dtype) for family, dtype in zip(TWINS, ("bf16", "fp32"), strict=True)),
    *(("cuda", family, *how) for family in CHANGES for how in ((2, "fp32"), (1, "bf16"))),
    *(("cuda", family, 4, dtype) for family in TWINS for dtype in DTYPES),
)


def on_devices(cases: Iterable[tuple[str, *tuple[Any, ...]]]) -> list[Any]:
    """Return parameters, of which the first is the device."""
    return [pytest.param(*case, marks=[pytest.mark.gpu] * (case[0] == "cuda")) for case in cases]


@pytest.fixture(scope="module")
def families(device: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    """Every case that runs on the device: the models, and what their ranks found."""
    place, jobs = tmp_path_factory.mktemp("families"), []
    for _, family, num_ranks, dtype in (case for case in CASES if case[0] == device):
        if not (place / family).exists():
            save_decoder(place / family, family, **CHANGES[family])
        packed, out = pack(place / family, num_ranks), place / f"{family}-{num_ranks}-{dtype}"
        flags = ("--dtype", dtype, "--schedule", "1F1B")
        jobs.append(Job(packed=str(packed), out=str(out), num_ranks=num_ranks, flags=flags))
    return place, run_jobs(jobs, device, place, timeout_s=500)


# For a scope of its own, pytest would take what the ranks found apart after each test, and run them again.
@pytest.mark.parametrize(
    ("device", "family", "num_ranks", "dtype"), on_devices(CASES), indirect=["device"], scope="module"
)
def test_family_trains_as_transformers_does(
    device: str, family: str, num_ranks: int, dtype: str, families: tuple[Path, Found]
) -> None:
    place, found = families
    ranks = found[str(place / f"{family}-{num_ranks}-{dtype}")]
    for rank in ranks:
        assert (rank["losses"], rank["norms"]) == (ranks[0]["losses"], ranks[0]["norms"])
    loss, gradients = one_backward(place / family, device, DTYPES[dtype])
    assert ranks[0]["losses"][0] == pytest.approx(loss, rel=TOLERANCE[dtype])
    if dtype == "bf16" and apart(gradients_of(ranks), gradients) > TOLERANCE[dtype]:
        # Rounding sends tokens to other experts. transformers' gradients are off then, too: ours no farther.
        _, exact = one_backward(place / family, device, torch.float32)
        assert apart(gradients_of(ranks), exact) <= 1.5 * apart(gradients, exact)
    if dtype == "fp32":
        assert apart(gradients_of(ranks), gradients) <= TOLERANCE[dtype]
        assert worst(gradients_of(ranks), gradients) <= 10 * TOLERANCE[dtype]
    assert ranks[0]["losses"][2] < ranks[0]["losses"][0] * 1.5
    assert all(map(math.isfinite, ranks[0]["norms"]))


def one_backward(folder: Path, device: str, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of the first batch, by the model that transformers loads."""
    model = load(folder, "eager").to(device, dtype)
    batch = padded_batch(0, seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)
    loss = 0.0
    for tokens, labels in zip(batch.tokens.split(1), batch.labels.split(1), strict=True):
        logits = model(tokens.to(device)).logits.float()
        part = cross_entropy(logits.flatten(0, 1), labels.flatten().to(device), reduction="sum") / batch.num_tokens
        torch.autograd.backward(part)
        loss += part.item()
    return loss, in_files(model, folder, gradients=True)


def apart(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the distance of all gradients, taken as one vector, relative to its length."""
    assert found.keys() == expected.keys()
    squares = math.fsum(float((found[fqn] - other).double().square().sum()) for fqn, other in expected.items())
    return math.sqrt(squares / math.fsum(float(other.double().square().sum()) for other in expected.values()))


# How far gradients may be from those of the plain run: recomputed ones are the same kernels' again.
WAYS: Mapping[str, tuple[tuple[str, ...], float]] = {
    "plain": ((), 0.0),
    "ac-full": (("--ac", "full"), 1e-6),
    "ac-selective": (("--ac", "selective"), 1e-6),
    "loss-chunk": (("--loss-chunk", "20"), 1e-5),
    "compile": (("--compile",), 1e-4),
    "compile-ac": (("--compile", "--ac", "full"), 1e-4),
    "masters": (("--dtype", "bf16", "--master-dtype", "fp32"), 5e-2),
}

# On the CPU `tests/matrix.py` has all of them.
RUN = [*(("cpu", name) for name in ("plain", "masters")), *(("cuda", name) for name in WAYS)]


@pytest.fixture(scope="module")
def ways(device: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    place = tmp_path_factory.mktemp("ways")
    save_model(place / "llama", num_hidden_layers=4, vocab_size=VOCAB_SIZE)
    packed = str(pack(place / "llama", 2))
    jobs = [
        Job(packed=packed, out=str(place / name), num_ranks=2, flags=WAYS[name][0])
        for name in WAYS
        if (device, name) in RUN
    ]
    return place, run_jobs(jobs, device, place, timeout_s=400)


@pytest.mark.parametrize(("device", "name"), on_devices(RUN), indirect=["device"], scope="module")
def test_way_to_compute_gives_the_gradients_of_the_plain_one(device: str, name: str, ways: tuple[Path, Found]) -> None:
    place, found = ways
    ranks, plain = found[str(place / name)], found[str(place / "plain")]
    assert apart(gradients_of(ranks), gradients_of(plain)) <= WAYS[name][1]
    assert ranks[0]["losses"] == pytest.approx(plain[0]["losses"], rel=max(WAYS[name][1], 1e-3))
    assert [rank["fused"] for rank in ranks] == [True if device == "cuda" else None] * 2


def test_memory_is_what_the_plan_says(device: str, tmp_path: Path, record: Record) -> None:
    """On a GPU: a Llama of 0.35 billion parameters, by dtype policy, on one rank and on each of two."""
    is_gpu = device == "cuda"
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 512}
    if is_gpu:
        sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": 32000}
        sizes |= {"num_hidden_layers": 24, "max_position_embeddings": 2048}
    save_model(tmp_path / "llama", **sizes)
    policies = {"fp32": (), "bf16": ("--dtype", "bf16"), "mixed": ("--dtype", "bf16", "--master-dtype", "fp32")}
    batch = ("--seq-len", "2048" if is_gpu else "16", "--microbatch", "2", "--steps", "2")
    jobs = [
        Job(
            packed=str(pack(tmp_path / "llama", num_ranks)),
            out=str(tmp_path / f"{policy}-{num_ranks}"),
            num_ranks=num_ranks,
            flags=(*batch, *flags),
            vocab_size=sizes["vocab_size"],
        )
        for num_ranks in ((1, 2) if is_gpu else (2,))
        for policy, flags in policies.items()
    ]
    found = run_jobs(jobs, device, tmp_path, timeout_s=300)
    keys = ("held_nbytes", "planned_to_hold_nbytes", "peak_nbytes", "planned_nbytes")
    runs = {Path(out).name: [{key: rank[key] for key in keys} for rank in ranks] for out, ranks in found.items()}
    record("memory", {"what": "peak memory of ranks against the plan", "model": sizes, "runs": runs})
    for name, ranks in runs.items():
        for rank in ranks:
            assert rank["held_nbytes"] == pytest.approx(rank["planned_to_hold_nbytes"], rel=0.01), name
            if is_gpu:
                assert rank["peak_nbytes"] == pytest.approx(rank["planned_nbytes"], rel=0.1), name
