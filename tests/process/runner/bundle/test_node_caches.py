"""`--stage-to-local` on several nodes: each shard is read from the store once, and sent to the others."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stores.open import open_manifest
from tests.builders import flip, pack
from tests.fast.runner.data.words import BOS, EOS, write_documents, write_tokenizer
from tests.fast.runner.tiny import load_model, save_model
from tests.process.torchrun import started

NUM_NODES = 3


def cache_on_nodes(packed: Path, place: Path, case: str) -> list[dict[str, Any]]:
    """Return what each node has copied, or its error."""
    with started(NUM_NODES, "runner/bundle/node_cache_worker.py", packed, place, case) as ranks:
        assert [rank.wait(60) for rank in ranks] == [0] * NUM_NODES, [rank.said for rank in ranks]
    return [json.loads((place / f"{case}-{rank}.json").read_text()) for rank in range(NUM_NODES)]


def shards_of(packed: Path) -> dict[str, bytes]:
    return {shard.path: (packed / shard.path).read_bytes() for shard in open_manifest(packed).manifest.shards}


def cached_on(place: Path, case: str, node: int) -> dict[str, bytes]:
    folder = place / case / f"node{node}"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("case", "num_read", "num_received", "num_reused"),
    [("empty", 2, 4, 0), ("cached", 0, 4, 2), ("damaged", 2, 2, 2)],
)
def test_each_shard_is_read_once_from_the_store_or_a_node_that_has_it(
    case: str, num_read: int, num_received: int, num_reused: int, packed: Path, tmp_path: Path
) -> None:
    """Two shards on three nodes, equal in bytes to a thousandth. A damaged copy is found by those that receive it."""
    shards = shards_of(packed)
    if case != "empty":
        for path in shards:
            (tmp_path / case / "node1" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(packed / path, tmp_path / case / "node1" / path)
    if case == "damaged":
        flip(tmp_path / case / "node1" / min(shards), -5)
    reports = cache_on_nodes(packed, tmp_path, case)
    nbytes = sum(map(len, shards.values())) / 2
    counts = [
        round(sum(map(count, reports)) / nbytes)
        for count in (
            lambda report: report["nbytes"] - report["peer_nbytes"],
            lambda report: report["peer_nbytes"],
            lambda report: report["reused_nbytes"],
        )
    ]
    assert counts == [num_read, num_received, num_reused]
    for node in (0, 2):
        assert cached_on(tmp_path, case, node) == shards


@pytest.mark.parametrize(
    ("case", "code"),
    [("lost", "store.unreadable"), ("link", "store.cache-unwritable"), ("hangs", "store.stalled")],
)
def test_node_that_fails_ends_the_load_on_all(case: str, code: str, packed: Path, tmp_path: Path) -> None:
    """One cannot read what it sends; one cannot write what it receives; the disk of one does not answer."""
    if case == "link":
        for path in shards_of(packed):
            partial = tmp_path / case / "node2" / Path(path).parent / f".{Path(path).name}.partial"
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.symlink_to(tmp_path / "elsewhere")
    reports = cache_on_nodes(packed, tmp_path, case)
    assert [report["code"] for report in reports] == [code] * NUM_NODES
    assert not (tmp_path / "elsewhere").exists()


def test_node_waits_for_others_that_are_at_transfers_of_their_own(packed: Path, tmp_path: Path) -> None:
    """A shard has 8 rounds, each of which takes a sixth of the timeout."""
    shards, (*_, last) = shards_of(packed), open_manifest(packed).manifest.stages
    reports = cache_on_nodes(packed, tmp_path, "busy")
    assert [report.get("code") for report in reports] == [None] * NUM_NODES
    assert [cached_on(tmp_path, "busy", node) for node in (0, 1)] == [shards] * 2
    assert cached_on(tmp_path, "busy", 2).keys() == {shard.path for shard in last.shards}


# Nodes that have copies of their own: ranks never train on two models, or evaluate on two texts.


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


def test_nodes_with_different_parameter_groups_are_refused(nodes: tuple[Path, Path]) -> None:
    for node, rate in zip(nodes, (1.0, 2.0), strict=True):
        (node / "groups.toml").write_text(f'[[group]]\nalgorithm = "adamw"\nrate_factor = {rate}\n')
    words = (*RUN, "--optimizer", "groups.toml")
    check_refused(nodes, *words, code="options.differs-between-ranks", where="--optimizer")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of peft
@pytest.mark.parametrize("change", [{"lora_alpha": 3}, {"init_lora_weights": "gaussian"}], ids=["config", "weights"])
def test_nodes_with_different_adapters_are_refused(change: dict[str, Any], nodes: tuple[Path, Path]) -> None:
    from peft import LoraConfig, get_peft_model

    for node, changes in zip(nodes, ({}, change), strict=True):
        config = LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **changes})
        torch.manual_seed(0)
        get_peft_model(load_model(node.parent / "source"), config).save_pretrained(node / "adapter")
    words = (*RUN, "--lora-from", "adapter")
    check_refused(nodes, *words, code="options.differs-between-ranks", where="--lora-from")


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        (lambda text: 2 * text, "data.differs-between-ranks", "--eval-data text.jsonl"),
        (lambda text: None, "data.no-files", "text.jsonl"),
        (lambda text: "{" * len(text), "data.not-json", "text.jsonl:1"),
    ],
    ids=["grows", "is removed", "is damaged"],
)
def test_evaluation_data_that_changes_on_one_node_ends_all_at_the_next_evaluation(
    change: Callable[[str], str | None], code: str, where: str, nodes: tuple[Path, Path]
) -> None:
    for node in nodes:
        write_documents(node / "text.jsonl", [[1, 2, 3]])
    words = (*RUN, "--steps", "100000", "--eval-data", "text.jsonl", "--eval-every", "2")
    with started(2, "../../runner/train.py", *words, folders=nodes) as ranks:
        metrics, until_s = nodes[0] / "log" / "metrics.jsonl", time.monotonic() + 60
        while not (metrics.exists() and "eval_loss" in metrics.read_text()):
            assert time.monotonic() < until_s, ranks[0].said
            time.sleep(0.02)
        changed, text = nodes[1] / "changed", change((nodes[1] / "text.jsonl").read_text())
        if text is None:
            (nodes[1] / "text.jsonl").unlink()
        else:
            changed.write_text(text)
            changed.replace(nodes[1] / "text.jsonl")
        codes, said = [rank.wait(60) for rank in ranks], ranks[0].said + ranks[1].said
    assert codes == [5, 3], said
    (line,) = (line for line in said.splitlines() if line.startswith("error: rank 1"))
    assert f": {where}: " in line
    assert line.endswith(f"[{code}]")


def test_same_copies_train(nodes: tuple[Path, Path]) -> None:
    for node in nodes:
        write_documents(node / "text.jsonl", [[1, 2, 3]])
    with started(2, "../../runner/train.py", *RUN, "--eval-data", "text.jsonl", folders=nodes) as ranks:
        assert [rank.wait(60) for rank in ranks] == [0, 0], ranks[0].said
    assert ["loss" in line or "eval_loss" in line for line in lines_in(nodes[0])].count(True) == 2


def test_node_reads_its_own_copy_at_a_path_that_others_do_not_have(nodes: tuple[Path, Path]) -> None:
    for node, of_other in zip(nodes, (2, 1), strict=True):
        (node / "packed" / f"model-0000{of_other}-of-00002.safetensors").unlink()
    with started(2, "../../runner/train.py", *RUN, folders=nodes) as ranks:
        assert [rank.wait(60) for rank in ranks] == [0, 0], ranks[0].said
    assert ["loss" in line for line in lines_in(nodes[0])].count(True) == 1


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
