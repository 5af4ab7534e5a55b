"""--document-mask on three pipeline ranks, one of them in the middle: training, evaluation, and resuming."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.builders import pack
from tests.fast.runner.data.words import BOS, EOS, FIRST, VOCAB_SIZE, write_documents, write_tokenizer
from tests.fast.runner.models.decoders import save_decoder
from tests.fast.runner.tiny import load_model, read_config, save_model
from tests.process.runner.training_jobs import job, lines_of, losses_of, run_jobs, said

SEQ_LEN, BATCH = 24, 4
TEXTS = [[(number + place) % 8 for place in range(1 + 7 * number % 19)] for number in range(40)]
MASKED = ("--seq-len", SEQ_LEN, "--global-batch", BATCH, "--lr", 1e-3, "--document-mask")


def rows_of(texts: Sequence[Sequence[int]]) -> Iterator[list[list[int]]]:
    """Yield the documents of each row: ids of the text end to end, cut every SEQ_LEN ids, with one id more."""
    documents = [[BOS, *(FIRST + word for word in text), EOS] for text in texts]
    owners = [number for number, document in enumerate(documents) for _ in document]
    ids = [token for document in documents for token in document]
    for begin in range(0, len(ids) - 1, SEQ_LEN):
        row: dict[int, list[int]] = {}
        for place in range(begin, min(begin + SEQ_LEN + 1, len(ids))):
            row.setdefault(owners[place], []).append(ids[place])
        yield list(row.values())


@torch.no_grad()
def loss_alone(folder: Path, rows: Sequence[list[list[int]]]) -> tuple[float, int]:
    """Return transformers' mean loss over documents by themselves, and over how many tokens."""
    model, total, count = load_model(folder), 0.0, 0
    for ids in (torch.tensor(document) for row in rows for document in row if len(document) > 1):
        logits = model(input_ids=ids[None, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").item()
        count += len(ids) - 1
    return total / count, count


def test_documents_are_kept_apart_in_training_evaluation_and_after_resuming(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_model(source, num_hidden_layers=3, bos_token_id=BOS, eos_token_id=EOS)
    write_tokenizer(source, **read_config(source))
    pack(source, tmp_path / "packed", "pp=3")
    data = ("--data", write_documents(tmp_path / "texts.jsonl", TEXTS))
    held = ("--eval-data", write_documents(tmp_path / "held.jsonl", TEXTS[:9]))
    saving = ("--checkpoint", tmp_path / "saved", "--checkpoint-every", 1)
    of_step_1 = ("--resume", tmp_path / "saved" / "step-000001")
    logs = {name: tmp_path / name for name in ("straight", "resumed", "other", "before")}
    run_jobs(
        3,
        [
            job(tmp_path / "packed", logs["straight"], *data, *MASKED, "--steps", 2, *saving),
            job(tmp_path / "packed", logs["resumed"], *data, *MASKED, "--steps", 2, *of_step_1),
            job(tmp_path / "packed", logs["other"], *data, *MASKED[:-1], "--steps", 2, *of_step_1),
            job(tmp_path / "packed", logs["before"], *data, *MASKED, *held, "--steps", 0),
        ],
    )
    rows = list(rows_of(TEXTS))
    loss, count = loss_alone(source, rows[:BATCH])
    first = next(line for line in lines_of(logs["straight"]) if "loss" in line)
    assert first["loss"] == pytest.approx(loss, rel=1e-6)
    assert first["num_tokens"] == count < BATCH * SEQ_LEN
    num_documents = sum(len([document for document in row if len(document) > 1 or document is not row[-1]])
                        for row in rows[:BATCH])  # fmt: skip
    shared = f"{num_documents / BATCH:.1f} documents per sequence in the first batch"
    assert shared in said(logs["straight"])
    assert losses_of(logs["resumed"]) == losses_of(logs["straight"])[1:]
    assert "error: resume.other-data at rank 0: --data" in said(logs["other"])
    evaluated = next(line for line in lines_of(logs["before"]) if "eval_loss" in line)
    expected, num_tokens = loss_alone(source, list(rows_of(TEXTS[:9])))
    assert evaluated["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert evaluated["eval_num_tokens"] == num_tokens


@pytest.mark.slow
def test_documents_are_kept_apart_on_ranks_that_share_stages(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_decoder(source, "tiny-qwen2", vocab_size=VOCAB_SIZE, bos_token_id=BOS, eos_token_id=EOS)
    write_tokenizer(source, **read_config(source))
    data = ("--data", write_documents(tmp_path / "texts.jsonl", TEXTS))
    degrees = {"tp": ("--tp", 2), "shard": ("--dp-shard", 2), "replicate": ("--dp-replicate", 2)}
    pack(source, tmp_path / "packed", "pp=1")
    logs = {name: tmp_path / name for name in ("one", "recomputed", *degrees)}
    flags = (*data, *MASKED, "--steps", 2)
    run_jobs(2, [job(tmp_path / "packed", logs[name], *flags, *more) for name, more in degrees.items()])
    recomputed = ("--ac", "full", "--loss-chunk", 5)
    run_jobs(
        1,
        [
            job(tmp_path / "packed", logs["one"], *flags),
            job(tmp_path / "packed", logs["recomputed"], *flags, *recomputed),
        ],
    )
    expected = losses_of(logs["one"])
    for name in ("recomputed", *degrees):
        assert losses_of(logs[name]) == pytest.approx(expected, rel=1e-5), said(logs[name])
