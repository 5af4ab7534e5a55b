"""Optimizers on real ranks: any degrees train as one process of torch does, and a checkpoint hops between them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.builders import pack, reshard
from tests.process.runner.training_jobs import job, losses_of, run_jobs, said

pytestmark = pytest.mark.timeout(600)

GROUPS = """
[[group]]
algorithm = "muon"
patterns = ["model.layers.*_proj.weight"]
[[group]]
algorithm = "tests.toy_optimizers.Signs"
patterns = ["model.embed_tokens.weight", "lm_head.weight"]
rate_factor = 0.1
elementwise = true
[[group]]
algorithm = "adafactor"
patterns = ["*norm.weight"]
clip = false
[[group]]
algorithm = "sgd"
weight_decay = 0.0
"""
SPLIT = """
[[group]]
algorithm = "muon"
patterns = ["*.experts.3.*"]
[[group]]
algorithm = "adamw"
"""
# Muon computes in bfloat16: a gradient that differs in its last bit may round otherwise. The rate keeps that small.
RATE = ("--lr", "1e-4", "--ema", "0.9")
DEGREES: dict[str, tuple[int, str, tuple[object, ...]]] = {
    "pp=2": (2, "pp=2", ()),
    "shards": (2, "pp=1", ("--dp-shard", 2)),
    "experts": (2, "pp=1", ("--dp-shard", 2, "--ep", 2)),
    "tensor": (2, "pp=1", ("--tp", 2)),
    "pp=4": (4, "pp=4", ()),
    "virtual": (2, "pp=2,vpp=2", ()),
    "v": (2, "pp=2,style=v", ()),
    "replicas of shards": (4, "pp=1", ("--dp-replicate", 2, "--dp-shard", 2, "--ep", 2)),
    "both": (4, "pp=2", ("--dp-shard", 2)),
}
SAME_ORDER = ("pp=1", "pp=2", "pp=4", "virtual", "v")
ALONE: Mapping[str, Callable[[list[Any], list[Any]], list[torch.optim.Optimizer]]] = {  # of matrices of layers, others
    "muon": lambda hidden, others: [
        torch.optim.Muon(hidden, lr=1e-4, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW(others, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    ],
    "sgd": lambda hidden, others: [torch.optim.SGD([*hidden, *others], lr=1e-2, weight_decay=0.1, momentum=0.9)],
    "adafactor": lambda hidden, others: [torch.optim.Adafactor([*hidden, *others], lr=1e-4, weight_decay=0.1)],
}
RATES = {"muon": "1e-4", "sgd": "1e-2", "adafactor": "1e-4"}
NUM_STEPS, BATCH, SEQ_LEN = 20, 8, 16


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack a tiny mixture of experts for every layout."""
    folder = tmp_path_factory.mktemp("optimizers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(folder / "source")
    for layout in sorted({"pp=1", *(layout for _, layout, _ in DEGREES.values())}):
        pack(folder / "source", folder / layout, layout)
    (folder / "groups.toml").write_text(GROUPS)
    tokens = torch.randint(64, (NUM_STEPS * BATCH, SEQ_LEN)).tolist()
    (folder / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in tokens))
    return folder


def train(place: Path, name: str, layout: str, steps: int, *flags: object, **more: Any) -> dict[str, Any]:
    data = () if "--data" in flags else ("--data", "synthetic")
    words = (*data, "--seq-len", SEQ_LEN, "--global-batch", BATCH, "--steps", steps, "--device", "cpu",
             "--no-self-check")  # fmt: skip
    return job(place / layout, place / f"log-{name}", *words, *flags, **more)


def groups(place: Path) -> tuple[object, ...]:
    return ("--optimizer", place / "groups.toml", *RATE)


def one_process(place: Path, steps: int) -> list[float]:
    if not (place / f"log-alone {steps}").exists():
        run_jobs(1, [train(place, f"alone {steps}", "pp=1", steps, *groups(place))])
    return losses_of(place / f"log-alone {steps}")


def check(place: Path, names: tuple[str, ...], steps: int, **more: Any) -> None:
    for num_ranks in sorted({DEGREES[name][0] for name in names}):
        chosen = [name for name in names if DEGREES[name][0] == num_ranks]
        jobs = [train(place, n, DEGREES[n][1], steps, *groups(place), *DEGREES[n][2], **more) for n in chosen]
        run_jobs(num_ranks, jobs)
    alone = one_process(place, steps)
    for name in names:
        losses = losses_of(place / f"log-{name}")
        assert len(losses) == steps
        limit = 0.0 if name in SAME_ORDER else 5e-6
        assert max(abs(loss - other) for loss, other in zip(losses, alone, strict=True)) <= limit, name


def losses_of_torch(place: Path, algorithm: str) -> list[float]:
    """Train transformers' model with torch's classes, on tensors as files have them: experts and projections alone."""
    model = Qwen3MoeForCausalLM.from_pretrained(place / "source")
    tensors: dict[str, tuple[torch.nn.Parameter, torch.Tensor]] = {}  # by name in files: and its part of a parameter
    for name, parameter in model.named_parameters():
        if "experts" not in name:
            tensors[name] = (parameter, parameter)
            continue
        for expert, of_expert in enumerate(parameter.unbind()):
            for number, part in enumerate(of_expert.chunk(2) if "gate_up" in name else (of_expert,)):
                tensors[f"{name}.{expert}.{number}"] = (parameter, part)
    weights = {name: torch.nn.Parameter(part.detach().clone()) for name, (_, part) in tensors.items()}
    hidden = [name for name, weight in weights.items() if "layers" in name and weight.dim() == 2]
    others = [weights[name] for name in weights if name not in hidden]
    optimizers = ALONE[algorithm]([weights[name] for name in hidden], others)
    rows = [json.loads(line)["input_ids"] for line in (place / "rows.jsonl").read_text().splitlines()]
    losses = []
    for step in range(NUM_STEPS):
        of_step = list[float]()
        for row in rows[step * BATCH : (step + 1) * BATCH]:
            labels = torch.tensor([*row[1:], -100])
            logits = model(torch.tensor([row])).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / (BATCH * (SEQ_LEN - 1))
            loss.backward()
            of_step.append(loss.item())
        losses.append(math.fsum(of_step))
        for name, (parameter, part) in tensors.items():
            assert parameter.grad is not None
            weights[name].grad = parameter.grad.as_strided(part.shape, part.stride(), part.storage_offset()).clone()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, (_, part) in tensors.items():
                part.copy_(weights[name])
        model.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALONE)
def test_degrees_train_as_torch_does_in_one_process(place: Path, algorithm: str) -> None:
    degrees = {"pp=1": (1, "pp=1", ()), **DEGREES}
    flags = ("--data", place / "rows.jsonl", "--tokenized", "--microbatch", 1, "--max-norm", 0,
             "--optimizer", algorithm, "--lr", RATES[algorithm])  # fmt: skip
    for num_ranks in (1, 2, 4):
        names = [name for name in degrees if degrees[name][0] == num_ranks]
        jobs = [train(place, f"{algorithm} {n}", degrees[n][1], NUM_STEPS, *degrees[n][2], *flags) for n in names]
        run_jobs(num_ranks, jobs, timeout_s=400)
    expected = losses_of_torch(place, algorithm)
    for name in degrees:
        losses = losses_of(place / f"log-{algorithm} {name}")
        limit = 0.0 if name in SAME_ORDER else 1e-6
        differences = [abs(loss - other) / other for loss, other in zip(losses, expected, strict=True)]
        assert max(differences) <= limit, (name, differences)


def test_shards_of_experts_train_as_one_process(place: Path) -> None:
    check(place, ("experts",), 4, round=1000)  # several exchanges, where such a small model would have one


def test_groups_that_split_the_experts_of_one_rank_are_refused_on_all_before_they_exchange(place: Path) -> None:
    (place / "split.toml").write_text(SPLIT)
    num_ranks, layout, degrees = DEGREES["experts"]
    run_jobs(num_ranks, [train(place, "split", layout, 1, "--optimizer", place / "split.toml", *degrees)])
    refusal = said(place / "log-split").splitlines()[-1]
    assert re.fullmatch(r"error: options\.optimizer-pattern at rank 1: --optimizer: .+\.experts\.3\..+", refusal)


@pytest.mark.slow
def test_all_degrees_train_as_one_process(place: Path) -> None:
    check(place, tuple(name for name in DEGREES if name != "experts"), 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hops", "limit"), [(("pp=2", "v", "pp=4", "virtual"), 0.0), (("experts", "pp=2", "tensor", "both"), 1e-6)]
)
def test_checkpoint_hops_between_degrees_and_keeps_the_losses(
    place: Path, tmp_path: Path, hops: tuple[str, ...], limit: float
) -> None:
    saved = ("--checkpoint", tmp_path / "hops", "--resume", "auto")
    for number, name in enumerate(hops, 1):
        num_ranks, layout, flags = DEGREES[name]
        job_of_hop = train(place, f"hop {number} {limit}", layout, 3 * number, *groups(place), *flags, *saved)
        run_jobs(num_ranks, [job_of_hop])
    losses = [loss for number in range(1, 5) for loss in losses_of(place / f"log-hop {number} {limit}")]
    alone = one_process(place, 12)
    assert max(abs(loss - other) / other for loss, other in zip(losses, alone, strict=True)) <= limit
    newest = tmp_path / "hops" / "step-000012"
    assert reshard("verify", newest).code == 0
    again = pack(newest, tmp_path / "resharded", "pp=4")
    assert reshard("diff", newest, again).code == 0
    assert reshard("export", again, "--to", "hf", "--weights", "ema", "--out", tmp_path / "average").code == 0
