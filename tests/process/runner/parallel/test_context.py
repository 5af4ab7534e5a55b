"""Jobs with context parallelism, as a user starts them; tests/matrix.py has its gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import pack
from tests.fast.runner.data.words import BOS, EOS, write_documents, write_tokenizer
from tests.fast.runner.tiny import read_config, save_model
from tests.process.runner.training_jobs import job, lines_of, run_jobs, said

pytestmark = pytest.mark.timeout(600)


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
