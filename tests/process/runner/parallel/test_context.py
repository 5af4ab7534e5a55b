"""Context parallelism: loss and every gradient are those of one process that runs transformers' whole model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.builders import pack
from tests.fast.runner.data.words import BOS, EOS, write_documents, write_tokenizer
from tests.fast.runner.pipeline.documents import CONFIGS
from tests.fast.runner.tiny import read_config, save_model
from tests.process.runner.training_jobs import job, lines_of, run_jobs, said
from tests.process.torchrun import launch

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

TOLERANCE = 1e-6  # FSDP reduces gradients in float32


def case(architecture: str, **more: Any) -> dict[str, Any]:
    plain = {"architecture": architecture, "method": "gather", "pp": 1, "schedule": "GPipe", "documents": False,
             "ac": "none", "changes": {}, "shard": 1, "replicate": 1}  # fmt: skip
    return {**plain, **more}


def check(out: Path, num_ranks: int, cases: Sequence[dict[str, Any]]) -> None:
    (out / "cases.json").write_text(json.dumps(cases))
    launch(num_ranks, "runner/parallel/context_worker.py", out / "cases.json", out, timeout_s=500)
    ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    for number, described in enumerate(cases):
        for loss, gradients in (rank[number] for rank in ranks):
            assert loss <= TOLERANCE, described
            assert gradients
            assert max(gradients.values()) <= TOLERANCE, (described, gradients)


FAST = (
    case("MistralForCausalLM", documents=True),
    case("GptOssForCausalLM", method="ulysses", ac="full"),
)
TWO = (
    *(case(name, method=method, documents=documents)
      for name in CONFIGS for method in ("gather", "ulysses") for documents in (False, True)),
    *(case("LlamaForCausalLM", method=method, changes={"num_key_value_heads": 1}) for method in ("gather", "ulysses")),
    *(case("Gemma3ForCausalLM", method=method, ac=ac)
      for method in ("gather", "ulysses") for ac in ("full", "selective")),
)  # fmt: skip
FOUR = (
    *(case("LlamaForCausalLM", method=method) for method in ("gather", "ulysses")),
    *(case(name, pp=2, schedule=schedule, documents=documents)
      for name in ("MistralForCausalLM", "DeepseekV3ForCausalLM")
      for schedule in ("1F1B", "ZBVZeroBubble") for documents in (False, True)),
    *(case("LlamaForCausalLM", documents=True, **{name: 2}) for name in ("shard", "replicate")),
    case("GptOssForCausalLM", pp=2, schedule="ZBVZeroBubble", method="ulysses", documents=True, ac="full"),
)  # fmt: skip


def test_two_ranks_with_parts_of_rows_train_as_one(tmp_path: Path) -> None:
    check(tmp_path, 2, FAST)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "cases"), [(2, TWO), (4, FOUR)], ids=["two", "four"])
def test_ranks_with_parts_of_rows_train_as_one(num_ranks: int, cases: Sequence[Any], tmp_path: Path) -> None:
    check(tmp_path, num_ranks, cases)


@pytest.mark.slow
def test_jobs_with_parts_of_rows_train_evaluate_and_resume_as_one_rank_does(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_model(source, num_hidden_layers=2, bos_token_id=BOS, eos_token_id=EOS)
    write_tokenizer(source, **read_config(source))
    pack(source, tmp_path / "packed", "pp=1")
    texts = [[(number + place) % 8 for place in range(1 + 7 * number % 19)] for number in range(40)]
    data = ("--data", write_documents(tmp_path / "texts.jsonl", texts), "--document-mask", "--seq-len", 16)
    flags = (*data, "--global-batch", 4, "--lr", 1e-3, "--steps", 3, "--eval-data", tmp_path / "texts.jsonl")
    saving = ("--checkpoint", tmp_path / "saved", "--checkpoint-every", 2)
    logs = {name: tmp_path / name for name in ("two", "ulysses", "one", "resumed")}
    run_jobs(
        2,
        [
            job(tmp_path / "packed", logs["two"], *flags, *saving, "--cp", 2),
            job(tmp_path / "packed", logs["ulysses"], *flags, "--cp", 2, "--cp-method", "ulysses", "--ac", "full"),
        ],
    )
    resuming = ("--resume", tmp_path / "saved" / "step-000002")
    run_jobs(
        1,
        [job(tmp_path / "packed", logs["one"], *flags), job(tmp_path / "packed", logs["resumed"], *flags, *resuming)],
    )
    for field in ("loss", "grad_norm", "num_tokens", "eval_loss", "eval_num_tokens"):
        expected = values(logs["one"], field)
        assert expected
        for name in ("two", "ulysses"):
            assert values(logs[name], field) == pytest.approx(expected, rel=1e-5), (name, field, said(logs[name]))
        assert values(logs["resumed"], field) == pytest.approx(expected[-1:], rel=1e-5), (field, said(logs["resumed"]))


def values(log: Path, field: str) -> list[float]:
    return [line[field] for line in lines_of(log) if field in line]
