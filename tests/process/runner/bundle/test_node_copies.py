"""Nodes that have copies of their own: ranks never train on two models, or evaluate on two texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import pack
from tests.fast.runner.data.words import BOS, EOS, write_documents, write_tokenizer
from tests.fast.runner.tiny import save_model
from tests.process.torchrun import started

RUN = ("packed/manifest.json", "--data", "synthetic", "--seq-len", "16", "--steps", "1", "--log-dir", "log",
       "--no-self-check")  # fmt: skip


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with the same model, each the current folder of a rank."""
    source = tmp_path / "source"
    save_model(source, num_hidden_layers=2, bos_token_id=BOS, eos_token_id=EOS)
    write_tokenizer(source, **json.loads((source / "config.json").read_text()))
    nodes = (tmp_path / "node0", tmp_path / "node1")
    for node in nodes:
        node.mkdir()
        pack(source, node / "packed")
    return nodes


def test_nodes_with_different_copies_of_a_checkpoint_are_refused(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_model(other, num_hidden_layers=2, bos_token_id=BOS, eos_token_id=EOS, initializer_range=0.05)
    write_tokenizer(other, **json.loads((other / "config.json").read_text()))
    pack(other, nodes[1] / "packed", "pp=2", "--force")
    check_refused(nodes, *RUN, code="manifest.differs-between-ranks", where="packed/manifest.json")


def test_nodes_with_different_evaluation_data_are_refused_before_the_first_step(nodes: tuple[Path, Path]) -> None:
    for number, node in enumerate(nodes):
        write_documents(node / "text.jsonl", [[1, 2, 3]] * (2 + number))
    words = (*RUN, "--eval-data", "text.jsonl")
    check_refused(nodes, *words, code="data.differs-between-ranks", where="--eval-data text.jsonl")


def test_same_copies_train(nodes: tuple[Path, Path]) -> None:
    for node in nodes:
        write_documents(node / "text.jsonl", [[1, 2, 3]])
    with started(2, "../../runner/train.py", *RUN, "--eval-data", "text.jsonl", folders=nodes) as ranks:
        assert [rank.wait(60) for rank in ranks] == [0, 0], ranks[0].said
    assert ["loss" in line or "eval_loss" in line for line in lines_in(nodes[0])].count(True) == 2


def check_refused(nodes: tuple[Path, Path], *words: str, code: str, where: str) -> None:
    """See that both ranks end before the first step, and that the error names the rank that differs."""
    with started(2, "../../runner/train.py", *words, folders=nodes) as ranks:
        codes, said = [rank.wait(60) for rank in ranks], ranks[0].said
    assert codes == [5, 3], said  # 5: no error of its own
    (line,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert line.startswith("error: rank 1")
    assert f"{where}: " in line
    assert line.endswith(f"[{code}]")
    assert not any("loss" in line for line in lines_in(nodes[0]))


def lines_in(node: Path) -> Iterator[dict[str, object]]:
    metrics = node / "log" / "metrics.jsonl"
    yield from map(json.loads, metrics.read_text().splitlines() if metrics.exists() else ())
