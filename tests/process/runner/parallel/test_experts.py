"""Experts that are distributed over ranks, against one process with transformers' whole model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers.core_model_loading import revert_weight_conversion

from manifests.models import is_expert
from manifests.store import open_shard
from stores.open import open_manifest
from tests.builders import pack
from tests.fast.manifests.models.catalogued import quiet, save_tiny
from tests.fast.runner.tiny import padded_batch
from tests.process.runner.parallel.expert_cases import MODELS, NORMAL, SKEWED, SLOW, TOLERANCES, Case
from tests.process.runner.parallel.parallel_cases import VOCAB_SIZE
from tests.process.runner.parallel.test_parallel import AT_A_TIME, header_nbytes, is_close, whole
from tests.process.torchrun import launch

pytestmark = [pytest.mark.process, pytest.mark.timeout(2400)]

LR, EPS, MAX_NORM, STEPS = 1e-2, 1e-3, 0.5, 2
RECIPE = ("--seq-len", 32, "--global-batch", 8, "--lr", LR, "--eps", EPS, "--max-norm", MAX_NORM, "--weight-decay", 0)
TOLERANCE, NORM_TOLERANCE = 2e-6, 1e-6  # the norm of dense ranks' experts alone would be off by 1e-4 or more


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    run_cases(place, NORMAL)
    return place


@pytest.fixture(scope="module")
def trained_slow(place: Path) -> Path:
    run_cases(place, SLOW)
    return place


def run_cases(place: Path, cases: Iterable[Case]) -> None:
    """Train these cases on four ranks."""
    jobs = []
    for case in cases:
        if not (place / case.model).exists():
            save_model(place / case.model)
        if not (place / case.packed).exists():
            pack(place / case.model, place / case.packed, case.layout)
        origin = case.origin and case.origin.name
        args = [*map(str, RECIPE), *case.args]
        jobs.append({"name": case.name, "root": str(place / case.packed), "args": args, "origin": origin})
    for some in (jobs[at : at + AT_A_TIME] for at in range(0, len(jobs), AT_A_TIME)):
        (place / "cases.json").write_text(json.dumps(some))
        launch(4, "runner/parallel/parallel_worker.py", place / "cases.json", place, timeout_s=600)


def save_model(folder: Path) -> None:
    architecture, changes = MODELS[folder.name]
    save_tiny(folder, architecture, **changes)
    for path in folder.glob("*.safetensors") if folder.name == SKEWED else ():
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith("router.bias"):
                tensor[0] += 1e4
        save_file(tensors, path, metadata={"format": "pt"})


def found_by(place: Path, case: Case) -> list[dict[str, Any]]:
    return [torch.load(place / f"{case.name}-{rank}.pt") for rank in range(4)]


@cache
def reference(folder: Path) -> dict[str, Any]:
    """Train transformers' model for two steps, and return what `parallel_worker.run_case` does."""
    with quiet():
        model = getattr(transformers, MODELS[folder.name][0]).from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0)
    found: dict[str, Any] = {"reports": []}
    for step in range(STEPS):
        batch = padded_batch(step, vocab_size=VOCAB_SIZE)
        logits = model(batch.tokens).logits
        loss = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum") / batch.num_tokens
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
        found["reports"].append((loss.item(), norm, batch.num_tokens))
        if step == 0:
            gradients = {
                name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
                for name, weight in model.named_parameters()
            }
            found["gradients"] = revert_weight_conversion(model, gradients)
        optimizer.step()
    found["weights"] = revert_weight_conversion(model, {name: w.detach() for name, w in model.named_parameters()})
    return found


def check_against_transformers(place: Path, case: Case) -> None:
    if case.origin is not None:
        check_resumed(place, case, case.origin)
        return
    tolerance = TOLERANCES.get(case.model, TOLERANCE)
    ranks, expected = found_by(place, case), reference(place / case.model)
    for what in ("gradients", "weights"):
        tensors = whole(ranks, what)
        assert tensors.keys() == expected[what].keys()
        for fqn, tensor in expected[what].items():
            assert is_close(tensors[fqn], tensor, tolerance if what == "gradients" else 1e-5, 1e-8), (what, fqn)
    for rank in ranks:
        assert rank["reports"] == ranks[0]["reports"]
    for step, (report, other) in enumerate(zip(ranks[0]["reports"], expected["reports"], strict=True)):
        assert report[2] == other[2]
        assert report[0] == pytest.approx(other[0], rel=1e-6)
        assert report[1] == pytest.approx(other[1], rel=NORM_TOLERANCE * (5 if step else 1))


def check_resumed(place: Path, case: Case, origin: Case) -> None:
    ranks, before = found_by(place, case), found_by(place, origin)
    saved, begun = whole(before, "saved"), whole(ranks, "begun")
    assert saved.keys() == begun.keys()
    assert all(begun[name].equal(tensor) for name, tensor in saved.items())
    for rank in ranks:
        assert rank["reports"] == [pytest.approx(before[0]["reports"][1], rel=1e-6)]
    weights, expected = whole(ranks, "weights"), whole(before, "weights")
    assert all(is_close(weights[fqn], tensor, 1e-5) for fqn, tensor in expected.items())


def check_reads(place: Path, case: Case) -> None:
    """Check that a rank reads the bytes of its own experts, and ranks of a replica each byte of a stage's once."""
    if case.origin is not None or "broadcast" in case.flags:
        return
    manifest, ranks = open_manifest(place / case.packed).manifest, found_by(place, case)
    read_nbytes = [0] * len(ranks)
    for shard in manifest.shards:
        path = place / case.packed / shard.path
        begin = header_nbytes(path)
        experts = [entry for entry in open_shard(place / case.packed, shard).tensors if is_expert(entry.name)]
        for number, rank in enumerate(ranks):
            ranges = [(low, high) for name, low, high in rank["read"] if name == shard.path and low >= begin]
            assert len(set(ranges)) == len(ranges)
            for entry in experts:
                first, last = begin + entry.begin, begin + entry.end
                read_nbytes[number] += sum(max(0, min(high, last) - max(low, first)) for low, high in ranges)
    for number, rank in enumerate(ranks):
        mine = sum(part.nbytes for fqn, _, _, part in rank["weights"] if is_expert(fqn))
        assert mine == read_nbytes[number]
    total = sum(
        entry.nbytes for shard in manifest.shards for entry in open_shard(place / case.packed, shard).tensors
        if is_expert(entry.name)
    )  # fmt: skip
    assert 0 < total * case.replicate == sum(read_nbytes)


@pytest.mark.parametrize("case", NORMAL, ids=lambda case: case.name)
def test_ranks_with_different_experts_train_as_transformers_does(case: Case, trained: Path) -> None:
    check_against_transformers(trained, case)
    check_reads(trained, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.name)
def test_ranks_with_different_experts_train_as_transformers_does_whole_matrix(case: Case, trained_slow: Path) -> None:
    check_against_transformers(trained_slow, case)
    check_reads(trained_slow, case)
