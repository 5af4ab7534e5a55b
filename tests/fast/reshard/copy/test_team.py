"""A large tensor is copied by several threads, and its digest is that of its bytes in order."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from blake3 import blake3
from safetensors import deserialize

from manifests.errors import UnreachableError
from reshard.copy import runs as team
from reshard.copy.destination import open_target
from reshard.copy.engine import WriteOptions
from reshard.copy.parallelism import Parallelism
from reshard.copy.runs import Run, SharedRun, with_teams
from reshard.estimate.assumptions import Assumptions
from reshard.formats.open import open_source
from reshard.packing.plan import LayoutRequest, lay_out
from reshard.plans.pack_plan import OutputShard
from reshard.tensors.lazy import derive
from tests.builders import files_in, llama_config, reshard, write_model

EMBEDDING, MIB, NUM_THREADS = "model.embed_tokens.weight", 1 << 20, 3


@pytest.fixture
def embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The bytes of one of two large tensors in `source`: 5 MB, where 1 MiB is worth another thread."""
    monkeypatch.setattr(team, "_LARGE_NBYTES", 2 * MIB)
    monkeypatch.setattr(team, "_SHARE_NBYTES", MIB)
    return write_model(tmp_path / "source", llama_config(vocab_size=160_001))[EMBEDDING].data


def pack(tmp_path: Path, name: str, *more: str) -> Path:
    out = tmp_path / name
    ended = reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", out, *more)
    assert ended.code == 0, ended.err
    return out


def planned(tmp_path: Path) -> tuple[OutputShard, ...]:
    source = open_source(str(tmp_path / "source"))
    return tuple(lay_out("tiny", source, LayoutRequest(spec="pp=2"), Assumptions()).plan.shards_on())


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_bytes_and_digest_are_the_tensors(tmp_path: Path, embedding: bytes, io: str) -> None:
    out = pack(tmp_path, "out", "--threads", str(NUM_THREADS), "--io", io)
    shard = dict(deserialize((out / "model-00001-of-00002.safetensors").read_bytes()))
    assert shard[EMBEDDING]["data"] == embedding
    rows = reshard("inspect", out, "--tensors", "--json").json["tensors"]
    assert {row["fqn"]: row["blake3"] for row in rows}[EMBEDDING] == blake3(embedding).hexdigest()
    assert files_in(out) == files_in(pack(tmp_path, "alone", "--threads", "1"))


def test_every_thread_copies_blocks_of_it_and_one_gets_the_digest(tmp_path: Path, embedding: bytes) -> None:
    tensor = open_source(str(tmp_path / "source")).tensors[EMBEDDING]
    runs = with_teams([Run([tensor], 0)], NUM_THREADS)
    assert len(runs) == NUM_THREADS
    all_are_at_it, digests = threading.Barrier(NUM_THREADS, timeout=120), list[list[str] | None]()

    def help_team(run: Run) -> None:
        first = iter([True])
        assert isinstance(run, SharedRun)
        digests.append(run.team.help(lambda nbytes: next(first, False) and all_are_at_it.wait(), threading.Event()))

    helpers = [threading.Thread(target=help_team, args=(run,)) for run in runs]
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join(240)
    assert sorted(digests, key=bool) == [None, None, [blake3(embedding).hexdigest()]]


def test_thread_that_fails_ends_the_others_and_the_rest_is_resumed(tmp_path: Path, embedding: bytes) -> None:
    shards, options = planned(tmp_path), Parallelism(num_threads=NUM_THREADS)

    def fail(nbytes: int) -> None:
        budget_nbytes[0] -= nbytes
        if budget_nbytes[0] < 0:
            raise UnreachableError("server", "is away", code="store.unreachable")

    budget_nbytes = [1.5 * len(embedding)]
    with pytest.raises(UnreachableError), open_target(tmp_path / "out", shards, force=False) as target:
        target.write_shards(shards, WriteOptions(progress=fail, parallelism=options))
    resumed = pack(tmp_path, "out", "--threads", str(NUM_THREADS))
    assert files_in(resumed) == files_in(pack(tmp_path, "alone", "--threads", "1"))


@pytest.mark.usefixtures("embedding")
def test_computed_bytes_are_made_in_order_by_one_thread(tmp_path: Path) -> None:
    tensor = open_source(str(tmp_path / "source")).tensors[EMBEDDING]
    cast = derive(tensor, "F32", "cast", (tensor,), lambda: iter(()))
    assert len(with_teams([Run([cast], 0)], NUM_THREADS)) == 1
