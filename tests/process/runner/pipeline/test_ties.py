"""Tie groups of several members on several ranks, as four real ranks see them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.builders import pack
from tests.fast.runner.tiny import EMBEDDING, SIZES, save_model
from tests.process.runner.pipeline.ties_worker import QUERY, UP
from tests.process.runner.training_jobs import job, lines_of, said
from tests.process.torchrun import launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ties")
    save_model(folder / "model")
    launch(4, "runner/pipeline/ties_worker.py", folder / "model", folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


QUERIES, UPS = QUERY.format(4), UP.format(7)  # groups go by their owners


def test_each_rank_knows_its_own_groups(ranks: list[dict[str, Any]]) -> None:
    assert [rank["ties"] for rank in ranks] == [
        {QUERIES: [0, 1, 2], EMBEDDING: [0, 3]},
        {QUERIES: [0, 1, 2]},
        {QUERIES: [0, 1, 2]},
        {EMBEDDING: [0, 3]},
    ]


def test_members_on_one_rank_share_storage_and_one_leads(ranks: list[dict[str, Any]]) -> None:
    assert [rank["shared"] for rank in ranks] == [[QUERIES], [], [], [UPS]]
    assert [rank["led"] for rank in ranks] == [[QUERY.format(0)], [], [], [UP.format(3)]]
    assert all(rank["followers"] == [] for rank in ranks)


def test_gradients_are_summed_once_over_all_members(ranks: list[dict[str, Any]]) -> None:
    queries, ups, embedding = [5 + 1 + 2 + 0.0], [8 + 4.0], [11 + 11.0]
    assert [rank["sums"] for rank in ranks] == [
        {QUERIES: queries, EMBEDDING: embedding},
        {QUERIES: queries},
        {QUERIES: queries},
        {UPS: ups, EMBEDDING: embedding},
    ]


def test_norm_counts_each_group_once(ranks: list[dict[str, Any]]) -> None:
    width, ffn, vocab, kv_width = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["vocab_size"], 32
    query, up = width * width, ffn * width
    square = 8**2 * query + 12**2 * up + 22**2 * vocab * width + 11**2 * width
    for layer in range(8):
        others = query + 2 * kv_width * width + 2 * up + 2 * width  # without q_proj and up_proj
        others += query * (layer not in (0, 1, 4, 6)) + up * (layer not in (3, 7))
        square += (layer + 1) ** 2 * others
    assert [rank["totals"] for rank in ranks] == [[math.sqrt(square)]] * 4


def test_one_step_leaves_all_copies_equal(ranks: list[dict[str, Any]]) -> None:
    copies = [tuple(member) for rank in ranks for members in rank["stepped"].values() for member in members]
    assert all(len(copy) == 1 and copy[0] != 0.5 for copy in copies)
    assert len(set(copies)) == 1


@pytest.mark.parametrize("what", ["unequal", "unequal_masters"])
def test_copies_that_differ_are_refused_on_all_ranks_alike(what: str, ranks: list[dict[str, Any]]) -> None:
    assert all(rank[what] == ranks[0][what] for rank in ranks)
    refusal = ranks[0][what]
    assert (refusal["code"], refusal["where"]) == ("rank.tied-weights-differ", EMBEDDING)
    assert all(f"rank {rank} blake3:" in refusal["problem"] for rank in (0, 3))
    assert all(weights == [0.5] for rank in ranks for weights in rank["weights"])


def test_gradient_that_is_not_finite_is_named_on_all_ranks_alike(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        refusal = rank["not_finite"]
        assert (refusal["code"], refusal["where"]) == ("rank.not-finite", "rank 2")
        assert UP.format(2) in refusal["problem"]


@pytest.mark.parametrize(("every", "num_steps"), [(1, 2), (3, 3)])
def test_tie_that_breaks_in_a_run_ends_it_at_the_next_check(every: int, num_steps: int, tmp_path: Path) -> None:
    """Step 2 of 4 leaves rank 1 with another weight, as a fault of its memory would."""
    save_model(tmp_path / "model", tie_word_embeddings=True, num_hidden_layers=2)
    pack(tmp_path / "model", tmp_path / "packed", "pp=2", "--quiet")
    assert steps_with_a_broken_tie(tmp_path, "--steps", 4, "--check-ties-every", every) == list(range(1, num_steps + 1))


def test_tie_that_breaks_is_found_before_the_checkpoint_of_a_run_that_is_stopped(tmp_path: Path) -> None:
    save_model(tmp_path / "model", tie_word_embeddings=True, num_hidden_layers=2)
    pack(tmp_path / "model", tmp_path / "packed", "pp=2", "--quiet")
    steps = steps_with_a_broken_tie(tmp_path, "--steps", 1000, "--check-ties-every", 1000, stops=True)
    assert len(steps) < 1000


def steps_with_a_broken_tie(place: Path, *flags: object, **more: object) -> list[int]:
    """Train until the tie's check ends the run, see that nothing wrong was saved, and return the steps taken."""
    fixed = ("--data", "synthetic", "--seq-len", 8, "--global-batch", 2, "--checkpoint", place / "history")
    described = job(place / "packed", place / "log", *fixed, *flags, **more)
    (place / "job.json").write_text(json.dumps(described))
    launch(2, "runner/pipeline/broken_tie_worker.py", place / "job.json")
    assert f"error: rank.tied-weights-differ at {EMBEDDING}\n" in said(place / "log")
    assert not list((place / "history").glob("step-*"))
    return [line["step"] for line in lines_of(place / "log") if "loss" in line]
