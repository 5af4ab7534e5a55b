"""Biases of routers and the auxiliary loss, over ranks and microbatches, against one process of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from runner.data.rows import IGNORED
from tests.builders import pack
from tests.fast.manifests.models.catalogued import quiet, save_tiny
from tests.fast.runner.tiny import padded_batch, read_config
from tests.process.runner.parallel.parallel_cases import VOCAB_SIZE
from tests.process.torchrun import launch

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

RATE, COEF, LR, EPS, MAX_NORM, STEPS = 0.01, 0.3, 1e-2, 0.1, 0.5, 2
NUM_ROWS = 8
RECIPE = ("--seq-len", 32, "--global-batch", NUM_ROWS, "--microbatch", 1, "--lr", LR, "--eps", EPS,
          "--max-norm", MAX_NORM, "--weight-decay", 0, "--no-self-check")  # fmt: skip
SHARED = ("--dp-replicate", 1, "--dp-shard", 2, "--ep", 2, "--ac", "full")
FLAGS = ("--router-bias-rate", "--router-aux-loss")
BIAS = "e_score_correction_bias"
_GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
MODELS = {
    "deepseek": ("DeepseekV3ForCausalLM", {**_GROUPS, "first_k_dense_replace": 1}),
    "glm": ("Glm4MoeForCausalLM", {**_GROUPS, "first_k_dense_replace": 1}),
    "qwen": ("Qwen3MoeForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 3}),
}


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    args: tuple[Any, ...]
    saves: int = STEPS
    origin: str | None = None  # from whose checkpoint it resumes
    layout: str = "pp=2"
    flags: tuple[str, ...] = ()  # without values


REPLICAS = ("--dp-replicate", 2, "--ac", "selective")
LOOP, V = "pp=2,vpp=2", "pp=2,vpp=2,style=v"
CASES = (
    Case("deepseek-ep", "deepseek", ("--router-bias-rate", RATE, *SHARED), saves=1),
    Case("deepseek-resumed", "deepseek", ("--router-bias-rate", RATE, *REPLICAS), origin="deepseek-ep"),
    Case("qwen-ep", "qwen", ("--router-aux-loss", COEF, *SHARED)),
)
SLOW_CASES = (
    Case("glm-replicas", "glm", ("--router-bias-rate", RATE, *REPLICAS)),
    Case("deepseek-tp", "deepseek", ("--router-bias-rate", RATE, "--tp", 2)),
    Case("qwen-tp", "qwen", ("--router-aux-loss", COEF, "--tp", 2)),
    Case("qwen-replicas", "qwen", ("--router-aux-loss", COEF, *REPLICAS)),
    Case("qwen-context", "qwen", ("--router-aux-loss", COEF, "--cp", 2, "--ac", "full")),
)
# Schedules with the backward in two parts.
SPLIT_CASES = (
    Case("deepseek-zbv", "deepseek", ("--router-bias-rate", RATE, "--schedule", "ZBVZeroBubble", *SHARED), layout=V),
    Case("qwen-zbv", "qwen", ("--router-aux-loss", COEF, "--schedule", "ZBVZeroBubble", *SHARED), layout=V),
    Case("qwen-dualpipe", "qwen", ("--router-aux-loss", COEF, "--schedule", "DualPipeV", *REPLICAS), layout=V),
    Case("qwen-zero-bubble", "qwen", ("--router-aux-loss", COEF, "--schedule", "InterleavedZeroBubble", "--cp", 2),
         layout=LOOP),
    Case("deepseek-zero-bubble", "deepseek", ("--router-bias-rate", RATE, "--schedule", "InterleavedZeroBubble",
         *REPLICAS), layout=LOOP),
)  # fmt: skip
COMPILED_CASES = (
    Case("deepseek-compiled", "deepseek", ("--router-bias-rate", RATE, *REPLICAS), flags=("--compile",)),
    Case("deepseek-transformers-compiled", "deepseek", ("--router-bias-rate", RATE, "--dp-shard", 2),
         flags=("--compile",)),
    Case("qwen-compiled", "qwen", ("--router-aux-loss", COEF, "--dp-replicate", 2),
         flags=("--compile",)),
)  # fmt: skip
NUM_RANKS = 4


@dataclass
class Reference:
    losses: list[float] = field(default_factory=list)
    aux_losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    loads: list[dict[int, list[int]]] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)  # after each step


def run(place: Path, cases: Sequence[Case]) -> Path:
    for name in {case.model for case in cases}:
        architecture, changes = MODELS[name]
        save_tiny(place / name, architecture, vocab_size=VOCAB_SIZE, num_hidden_layers=4, **changes)
    for model, layout in {(case.model, case.layout) for case in cases}:
        pack(place / model, place / f"{model}-{layout}", layout)
    jobs = [
        {"name": case.name, "root": str(place / f"{case.model}-{case.layout}"), "origin": case.origin,
         "saves": case.saves, "args": [str(arg) for arg in (*RECIPE, *case.args, *case.flags)]}
        for case in cases
    ]  # fmt: skip
    (place / "cases.json").write_text(json.dumps(jobs))
    launch(NUM_RANKS, "runner/parallel/parallel_worker.py", place / "cases.json", place, timeout_s=400)
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("balance"), CASES)


@pytest.fixture(scope="module")
def slow_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("balance"), SLOW_CASES + SPLIT_CASES)


@pytest.fixture(scope="module")
def compiled_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("balance"), COMPILED_CASES)


def train_alone(folder: Path, *, rate: float, coef: float, num_context: int) -> Reference:
    """Train transformers' model a row at a time, a microbatch, of which context-parallel ranks have parts."""
    (architecture,) = read_config(folder)["architectures"]
    with quiet():
        model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).train()
    routers = {
        int(name.split(".")[2]): part for name, part in model.named_modules() if name.endswith("mlp.gate")
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0)
    outputs: dict[int, Any] = {}
    for layer, router in routers.items():
        router.register_forward_hook(lambda _, __, output, layer=layer: outputs.update({layer: output}))
    reference = Reference()
    for step in range(STEPS):
        batch = padded_batch(step, vocab_size=VOCAB_SIZE)
        load = {layer: torch.zeros(router.weight.shape[0], dtype=torch.int64) for layer, router in routers.items()}
        loss = aux_loss = 0.0
        optimizer.zero_grad()
        for row in range(NUM_ROWS):
            logits = model(batch.tokens[row : row + 1], use_cache=False).logits[0]
            lost = cross_entropy(logits, batch.labels[row], reduction="sum", ignore_index=IGNORED) / batch.num_tokens
            aux = torch.zeros(())
            for layer, (router_logits, weights, chosen) in outputs.items():
                load[layer] += torch.bincount(chosen.flatten(), minlength=len(load[layer]))
                pieces = router_logits.chunk(2 * num_context)  # each rank has one from either end
                for part in map(torch.cat, list(zip(pieces, reversed(pieces), strict=True))[:num_context]):
                    of_part = load_balancing_loss_func((part,), len(load[layer]), weights.shape[-1])
                    aux = aux + of_part / num_context / len(outputs) / NUM_ROWS
            torch.autograd.backward(lost + coef * aux)
            loss, aux_loss = loss + lost.item(), aux_loss + aux.item()
        reference.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        for layer, router in routers.items() if rate else ():
            mean = load[layer].double().mean()
            router.e_score_correction_bias += rate * torch.sign(mean - load[layer]).float()
        reference.losses.append(loss)
        reference.aux_losses.append(aux_loss)
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        reference.weights.append(dict(revert_weight_conversion(model, state)))
        reference.loads.append({layer: counts.tolist() for layer, counts in load.items()})
    return reference


def check(case: Case, place: Path) -> None:
    values = dict(zip(case.args[::2], case.args[1::2], strict=True))
    rate, coef = (values.get(flag, 0) for flag in FLAGS)
    expected = train_alone(place / case.model, rate=rate, coef=coef, num_context=values.get("--cp", 1))
    first, weights, names = 1 if case.origin else 0, expected.weights[case.saves - 1], set[str]()
    for rank in range(NUM_RANKS):
        found = torch.load(place / f"{case.name}-{rank}.pt", weights_only=False)
        assert len(found["reports"]) == STEPS - first
        for step, (report, experts) in enumerate(zip(found["reports"], found["experts"], strict=True), first):
            assert {layer: list(counts) for layer, counts in experts.load} == expected.loads[step]
            assert report[0] == pytest.approx(expected.losses[step], rel=1e-6)
            assert report[1] == pytest.approx(expected.norms[step], rel=1e-5)
            aux_loss = pytest.approx(expected.aux_losses[step], rel=1e-6) if coef else None
            assert experts.aux_loss == aux_loss
        for name, _, offset, memory in found["saved"]:
            kind, _, fqn = name.partition(" ")
            if kind != "weights":
                continue
            names.add(fqn)
            region = tuple(slice(low, low + size) for low, size in zip(offset, memory.shape, strict=True))
            if fqn.endswith(BIAS):
                assert torch.equal(memory, weights[fqn])
                assert memory.any() == bool(rate)
            else:
                assert torch.allclose(memory, weights[fqn][region], rtol=0, atol=2e-6), fqn
    assert names == weights.keys()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loads_biases_losses_and_weights_are_those_of_one_process(case: Case, place: Path) -> None:
    check(case, place)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES + SPLIT_CASES, ids=lambda case: case.name)
def test_loads_biases_losses_and_weights_are_those_of_one_process_with_other_flags(
    case: Case, slow_place: Path
) -> None:
    check(case, slow_place)


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED_CASES, ids=lambda case: case.name)
def test_loads_biases_losses_and_weights_are_those_of_one_process_where_layers_are_compiled(
    case: Case, compiled_place: Path
) -> None:
    check(case, compiled_place)
