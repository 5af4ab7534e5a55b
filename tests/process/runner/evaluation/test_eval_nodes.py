"""`runner eval` by replicas, also on two nodes: the digits of `runner.evaluate` on one rank."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import parquet

import runner
from tests.builders import pack
from tests.fast.runner.data.words import BOS, EOS, write_documents, write_tokenizer
from tests.fast.runner.tiny import read_config, save_model
from tests.process.forked import Forked
from tests.process.local_jobs import ROOT, forked_runner
from tests.process.runner.distributed.test_faults import free_port
from tests.servers.network import missing_for_network, start_network

MISSING = missing_for_network()
pytestmark = pytest.mark.timeout(300)
NODES = ("node1", "node2")
READ = ("--seq-len", 16, "--microbatch", 2, "--no-self-check", "--json")


def run_forked(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
    """Run a command of `runner` as `subprocess.run` would, but for the start of Python."""
    return forked_runner(*command[command.index("runner.cli") + 1 :])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save a model and a text, and pack the model for a rank and for two."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("runner.evaluation.command.subprocess", SimpleNamespace(run=run_forked))
    save_model(tmp_path / "source", num_hidden_layers=2, hidden_size=32, bos_token_id=BOS, eos_token_id=EOS)
    write_tokenizer(tmp_path / "source", **read_config(tmp_path / "source"))
    for layout in ("pp=1", "pp=2"):
        pack(tmp_path / "source", tmp_path / layout, layout)
    documents = [[(number * place) % 8 for place in range(1 + 7 * number % 29)] for number in range(60)]
    write_documents(tmp_path / "text.jsonl", documents)
    return tmp_path


def check_equal_to_one_rank(printed: dict[str, Any], written: Path, place: Path) -> None:
    alone = runner.evaluate(
        place / "pp=1", place / "text.jsonl", out=place / "alone.parquet", seq_len=16, microbatch=2,
        flags=["--force"], self_check=False,
    )  # fmt: skip
    assert (printed["version"], printed["loss"], printed["num_tokens"]) == (1, alone.loss, alone.num_tokens)
    rows = parquet.read_table(written).to_pylist()
    assert rows == parquet.read_table(place / "alone.parquet").to_pylist()
    losses = [loss for row in rows for loss in row["losses"]]
    assert len(losses) == alone.num_tokens
    assert alone.loss == pytest.approx(math.fsum(losses) / len(losses), rel=1e-15)


def test_replicas_print_and_write_what_one_rank_does(place: Path) -> None:
    words = ("--data", place / "text.jsonl", *READ, "--out", place / "four.parquet", "--nproc-per-node", 4)
    ended = forked_runner("eval", place / "pp=2", *words)
    assert ended.returncode == 0, ended.stderr
    assert f"written: {place / 'four.parquet'}" in ended.stderr.splitlines()
    check_equal_to_one_rank(json.loads(ended.stdout), place / "four.parquet", place)


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=f"no network namespaces: {MISSING}")
def test_replicas_on_two_nodes_print_and_write_what_one_rank_does(place: Path) -> None:
    words = [
        sys.executable, "-m", "runner.cli", "eval", place / "pp=2", "--data", place / "text.jsonl", *READ,
        "--out", place / "nodes.parquet", "--nnodes", 2, "--nproc-per-node", 2, "--rendezvous", "node1:29511",
    ]  # fmt: skip
    with start_network(place, NODES) as network:
        nodes = [
            subprocess.Popen(
                network.on(node, *words, "--node-rank", number),
                cwd=ROOT, env={**os.environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for number, node in enumerate(NODES)
        ]  # fmt: skip
        outputs = [node.communicate(timeout=250) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    check_equal_to_one_rank(json.loads(outputs[0][0]), place / "nodes.parquet", place)


def test_calls_on_two_nodes_return_the_same_loss(place: Path) -> None:
    address = f"127.0.0.1:{free_port()}"

    def evaluate(number: int) -> runner.Evaluation:
        return runner.evaluate(
            place / "pp=2", place / "text.jsonl", seq_len=16, microbatch=2, self_check=False,
            nnodes=2, node_rank=number, nproc_per_node=1, rendezvous=address,
        )  # fmt: skip

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(evaluate, range(2))
    assert first.num_tokens > 0
    assert replace(second, seconds=first.seconds) == first


def evaluate_on_nodes(place: Path, nodes: Sequence[Sequence[object]]) -> list[tuple[int, str]]:
    """Return the exit code of each node's command, and what it printed."""
    meeting = ("--nnodes", len(nodes), "--nproc-per-node", 1, "--rendezvous", f"127.0.0.1:{free_port()}", *READ)
    running = [
        Forked(
            [str(word) for word in ("eval", *words, *meeting, "--node-rank", number)],
            dict(os.environ),
            place / f"node{number}",
        )
        for number, words in enumerate(nodes)
    ]
    return [(node.wait(110), (place / f"node{number}").read_text()) for number, node in enumerate(running)]


@pytest.mark.parametrize("other", ["model", "text", "--no-packing", "--data"])
def test_nodes_that_would_evaluate_other_things_are_refused(other: str, place: Path) -> None:
    """Stages on two nodes: with other files there, tokens would be of one text, and labels of another."""
    node = place / "node"
    save_model(node / "source", num_hidden_layers=2, hidden_size=32, bos_token_id=BOS, eos_token_id=EOS, rope_theta=9)
    write_tokenizer(node / "source", **read_config(node / "source"))
    pack(node / "source", node / "pp=2", "pp=2")
    shutil.copy(place / "text.jsonl", node)
    with open(node / "text.jsonl", "a") as stream:
        stream.write("\n")
    model, text = ((node if other == name else place) for name in ("model", "text"))
    more = {"--no-packing": ["--no-packing"], "--data": ["--data", place / "text.jsonl"]}.get(other, [])
    words = (model / "pp=2", "--data", text / "text.jsonl", *more)
    first, second = evaluate_on_nodes(place, ((place / "pp=2", "--data", place / "text.jsonl"), words))
    assert (first[0], second[0]) == (3, 3), (first, second)
    where, code = {
        "model": (node / "pp=2/manifest.json", "manifest.differs-between-ranks"),
        "text": (f"--data {node / 'text.jsonl'}", "data.differs-between-ranks"),
    }.get(other, ("runner eval", "data.differs-between-ranks"))
    error = json.loads(first[1].splitlines()[-1])["error"]
    assert error["where"].startswith("rank 1, ")
    assert error["where"].endswith(f": {where}")
    assert error["code"] == code


@pytest.mark.parametrize("options", [{"seq_len": 16}, {"force": False, "tokenized": False, "self_check": False}])
def test_errors_of_an_evaluation_have_the_codes_that_the_command_prints(
    tmp_path: Path, options: dict[str, int]
) -> None:
    with pytest.raises(runner.UserError) as caught:
        runner.evaluate(tmp_path / "none", "text.jsonl", **options)
    assert caught.value.code == "manifest.no-such-folder"
