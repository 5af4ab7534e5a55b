"""`runner eval --out`: losses, logits and hidden states of tokens, by one rank here, against transformers."""

from __future__ import annotations

import errno
import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import distributed as dist
from torch.nn.functional import cross_entropy

from manifests.errors import OutputError, UsageError
from runner.bundle.packed import open_packed
from runner.config.parallel_dims import ParallelDims
from runner.distributed.world import World
from runner.evaluation.evaluate import loss_over, read_model
from runner.evaluation.options import parse_eval
from runner.evaluation.scores import TokenLosses
from runner.parallel.mesh import Mesh
from tests.builders import pack
from tests.fast.manifests.models.catalogued import save_tiny
from tests.fast.runner.tiny import load_model, save_model

SEQ_LEN, EOS = 16, 301
DOCUMENTS = [[(7 * row + place * place) % 300 for place in range(3 + row * 5 % 23)] + [EOS] for row in range(20)]


@pytest.fixture
def world() -> Iterator[World]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(rank=0, local_rank=0, size=1, local_size=1)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("scores")
    save_model(place / "source", bos_token_id=300, eos_token_id=EOS)
    words = {f"w{number}": number for number in range(300)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(place / "source" / "tokenizer.json"))
    texts = (" ".join(f"w{token}" for token in document[:-1]) for document in DOCUMENTS)
    (place / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pack(place / "source", place / "packed", "pp=1")
    return place


def score(
    place: Path, out: Path, world: World, *flags: str, data: Path | None = None
) -> tuple[float, int, list[dict[str, Any]]]:
    words = ["--seq-len", str(SEQ_LEN), "--microbatch", "2", "--no-self-check", "--out", str(out)]
    options = parse_eval([str(place / "packed"), "--data", str(data or place / "text.jsonl"), *words, *flags])
    loss, num_tokens = loss_over(options, open_packed(place / "packed"), world, torch.device("cpu"))
    return loss, num_tokens, parquet.read_table(out).to_pylist()


def outputs_of(place: Path, ids: Sequence[int]) -> dict[str, list[Any]]:
    """Return what transformers' model computes of each token that predicts one."""
    with torch.no_grad():
        output = load_model(place / "source")(torch.tensor([ids[:-1]]), output_hidden_states=True)
    largest = output.logits[0].topk(3)
    return {
        "losses": cross_entropy(output.logits[0], torch.tensor(ids[1:]), reduction="none").tolist(),
        "top_ids": largest.indices.tolist(),
        "top_logits": largest.values.tolist(),
        "hidden_states": output.hidden_states[1][0].tolist(),  # of the first layer
    }


def check(rows: list[dict[str, Any]], expected: list[dict[str, list[Any]]]) -> None:
    assert len(rows) == len(expected)
    for row in rows:
        values = expected[row["document"]]
        assert row["labels"] == values["labels"]
        for name in ("losses", "top_logits", "hidden_states"):
            if name in row:
                torch.testing.assert_close(torch.tensor(row[name]), torch.tensor(values[name]), rtol=1e-4, atol=1e-5)
        assert row.get("top_ids", values["top_ids"]) == values["top_ids"]
        assert (row["loss"], row["num_tokens"]) == (math.fsum(row["losses"]), len(row["labels"]))


def test_packed_documents_have_the_losses_of_their_own_tokens(place: Path, world: World, tmp_path: Path) -> None:
    flags = ("--top-k", "3", "--hidden-states", "model.layers.0")
    loss, num_tokens, rows = score(place, tmp_path / "scores.parquet", world, *flags)
    joined = [token for document in DOCUMENTS for token in document]
    numbers = [number for number, document in enumerate(DOCUMENTS) for _ in document]
    expected: list[dict[str, list[Any]]] = [{} for _ in DOCUMENTS]
    for begin in range(0, len(joined) - 1, SEQ_LEN):
        window = joined[begin : begin + SEQ_LEN + 1]
        values = {"tokens": window[:-1], "labels": window[1:], **outputs_of(place, window)}
        for index, number in enumerate(numbers[begin + 1 : begin + SEQ_LEN + 1]):
            for name, column in values.items():
                expected[number].setdefault(name, []).append(column[index])
    check(rows, expected)
    assert [row["document"] for row in rows] == list(range(len(DOCUMENTS)))
    assert [token for row in rows for token in row["tokens"]] == joined[:-1]
    tokens = [loss for row in rows for loss in row["losses"]]
    assert num_tokens == len(tokens) == len(joined) - 1
    assert loss == pytest.approx(math.fsum(tokens) / num_tokens, rel=1e-15)


def test_folder_that_a_rank_cannot_write_is_named(place: Path, world: World, tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        score(place, out := tmp_path / "none" / "scores.parquet", world)
    assert caught.value.code == "output.unwritable"
    assert str(out) in str(caught.value)


def test_documents_that_are_rows_are_scored_alone(place: Path, world: World, tmp_path: Path) -> None:
    loss, num_tokens, rows = score(place, tmp_path / "scores.parquet", world, "--no-packing")
    texts = [document[: SEQ_LEN + 1] for document in DOCUMENTS]
    check(rows, [{"labels": text[1:], **outputs_of(place, text)} for text in texts])
    assert num_tokens == sum(len(text) - 1 for text in texts)
    assert loss == pytest.approx(math.fsum(row["loss"] for row in rows) / num_tokens, rel=1e-15)


@pytest.mark.parametrize("packing", ["--packing", "--no-packing"])
def test_rows_of_prompts_alone_are_in_the_file(packing: str, place: Path, world: World, tmp_path: Path) -> None:
    """Of the second prompt, packed rows have nothing else, and a row for itself ends before its completion."""
    lengths, data = ((3, 5), (3 * SEQ_LEN, 2), (1, 4)), tmp_path / "prompts.jsonl"
    texts = [[" ".join(f"w{place}" for place in range(length)) for length in pair] for pair in lengths]
    data.write_text("".join(json.dumps({"text": text, "answer": answer}) + "\n" for text, answer in texts))
    flags = (packing, "--completion-field", "answer", "--hidden-states", "model.layers.0")
    loss, num_tokens, rows = score(place, tmp_path / "scores.parquet", world, *flags, data=data)
    documents = [[*range(prompt), *range(completion), EOS] for prompt, completion in lengths]
    assert [row["document"] for row in rows] == [0, 1, 2]
    tokens = [token for row in rows for token in row["tokens"]]
    if packing == "--packing":
        assert tokens == [token for document in documents for token in document][:-1]
        assert [row["num_tokens"] for row in rows] == [6, 3, 5]
    else:
        assert tokens == [token for document in documents for token in document[:-1][:SEQ_LEN]]
        assert [row["num_tokens"] for row in rows] == [6, 0, 5]
    assert all(len(row["hidden_states"]) == len(row["losses"]) == len(row["tokens"]) for row in rows)
    assert loss == pytest.approx(math.fsum(row["loss"] for row in rows) / num_tokens, rel=1e-15)


@pytest.mark.parametrize("packing", ["--packing", "--no-packing"])
def test_rows_have_the_numbers_of_their_documents_in_the_data(
    packing: str, place: Path, world: World, tmp_path: Path
) -> None:
    """Documents that are empty or skipped have no row, and those after them keep their numbers."""
    data = tmp_path / "gaps.jsonl"
    texts = {1: "w1 w2", 3: "w3 " * 3 * SEQ_LEN, 4: "w4", 7: "w5 w6", 8: "w7 " * (SEQ_LEN - 1)}
    lines = [json.dumps({"text": texts.get(number, "")}) for number in range(10)]
    data.write_text("\n".join([*lines[:5], "{", *lines[6:]]))
    flags = (packing, "--skip-bad-documents", "--no-add-eos-token")
    _, num_tokens, rows = score(place, tmp_path / "scores.parquet", world, *flags, data=data)
    packed = {number: [int(word[1:]) for word in text.split()] for number, text in texts.items()}
    packed[1] = packed[1][1:]  # the first token of all is not predicted
    alone = {number: ids[1 : SEQ_LEN + 1] for number, ids in packed.items() if number in (3, 7, 8)} | {1: [2]}
    expected = packed if packing == "--packing" else dict(sorted(alone.items()))
    assert {row["document"]: row["labels"] for row in rows} == expected
    assert len(rows) == len(expected)
    assert num_tokens == sum(map(len, expected.values()))


def test_file_of_an_evaluation_that_fails_is_not_left(place: Path, world: World, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        score(place, tmp_path / "scores.parquet", world, "--hidden-states", "model.layers.9")
    assert (caught.value.where, caught.value.code) == ("rank 0: --hidden-states model.layers.9", "options.scores")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--top-k", "2"), "options.scores"),
        (("--hidden-states", "model.norm"), "options.scores"),
        (("--nnodes", "2", "--node-rank", "2", "--rendezvous", "a:1"), "launch.nodes"),
        (("--nnodes", "2"), "launch.nodes"),
        (("--nnodes", "2", "--rendezvous", "a"), "launch.nodes"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: tuple[str, ...], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_eval(["packed", "--data", "a.txt", *flags])
    assert caught.value.code == code


def test_more_logits_than_the_vocabulary_has_are_refused(place: Path, world: World, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        score(place, tmp_path / "scores.parquet", world, "--top-k", "999")
    assert (error.value.where, error.value.code) == ("rank 0: --top-k", "options.scores")


def test_disk_that_fills_while_scores_are_written_is_an_error_of_the_file(
    place: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("runner.evaluation.scores._MOST_ROWS", 2)
    monkeypatch.setattr(parquet.ParquetWriter, "write_table", fill)
    with pytest.raises(OutputError) as error:
        score(place, out := tmp_path / "scores.parquet", world)
    assert (error.value.where, error.value.code) == (f"rank 0: {out}", "output.disk-full")
    assert list(tmp_path.iterdir()) == []


# A packed model opened for `runner eval`, by one rank in this process.


@pytest.mark.parametrize("flags", [(), ("--no-self-check",)])
def test_generic_family_is_compared_with_the_whole_model_before_it_is_read(
    flags: tuple[str, ...], world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path / "source", "Olmo3ForCausalLM")
    pack(tmp_path / "source", tmp_path / "packed", "pp=1", "--quiet")
    options = parse_eval([str(tmp_path / "packed"), "--data", "a.txt", "--seq-len", "8", *flags])
    with caplog.at_level(logging.INFO, "runner"):
        mesh = Mesh(degrees=ParallelDims(pipeline=1), rank=0)
        read_model(open_packed(tmp_path / "packed"), options, world, mesh, torch.device("cpu"), TokenLosses())
    assert ("self-check: a tiny Olmo3ForCausalLM" in caplog.text) == (not flags)
