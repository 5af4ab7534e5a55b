"""Shuffled and weighted data go on where they were, on the same ranks or on others.

Each run starts in fresh processes, and is compared with one that was not interrupted: losses by their
bits, weights and moments by their digests. The sources are small, so that all of them go round.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from manifests.schema import TrainingState
from runner.bundle.packed import open_packed
from runner.checkpoint.data_position import read_skipped
from stores.open import open_manifest
from tests.builders import pack
from tests.fast.runner.data.words import BOS, EOS, write_documents, write_tokenizer
from tests.fast.runner.tiny import save_model
from tests.process.runner.checkpoint.test_resume import MIDDLE, STEPS, Runs, after_middle, digests_in
from tests.process.runner.training_jobs import run_jobs

PACKED, PADDED = "packed", "padded"
NAMES = (PACKED, PADDED)


def data_of(name: str, place: Path) -> tuple[object, ...]:
    """Lines and rows by weight, end to end; or text and rows as one source, a document in each sequence."""
    shuffled = ("--shuffle", "--seed", 5, "--microbatch", 4)
    if name == PADDED:
        return ("--data", place / "rows.parquet", "--data", place / "lines.jsonl", "--no-packing", *shuffled)
    sources = {"lines.jsonl": 3, "rows.parquet": 1, "text.txt": 0.5}
    weights = (("--data", place / file, "--data-weight", weight) for file, weight in sources.items())
    return (*(part for each in weights for part in each), *shuffled)


def spoil(place: Path) -> None:
    """Put what is no text among lines and rows."""
    lines, rows = place / "lines.jsonl", place / "rows.parquet"
    good = lines.read_text().splitlines()
    bad = ['{"text": "w1 \\ud800"}', "{", '{"text": 3}']
    lines.write_text("\n".join(line for pair in zip(good, bad * 7, strict=False) for line in pair))
    texts = parquet.read_table(rows).column(0).to_pylist()
    parquet.write_table(pyarrow.table({"text": [None, *texts[:5], None, *texts[5:]]}), rows, row_group_size=4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("data"))
    source = runs.place / "untied"
    save_model(source, num_hidden_layers=2, bos_token_id=BOS, eos_token_id=EOS)
    write_tokenizer(source, **json.loads((source / "config.json").read_text()))
    documents = [[number % 8, *((number * i * i) % 8 for i in range(3 + 5 * number % 17))] for number in range(60)]
    write_documents(runs.place / "lines.jsonl", documents[:20])
    write_documents(runs.place / "rows.parquet", documents[20:26], group=4)
    spoil(runs.place)
    write_documents(runs.place / "text.txt", documents[57:])
    for layout in ("pp=1", "pp=2"):
        pack(source, runs.packed("untied", layout), layout)
    recipe = ("--skip-bad-documents", "--seq-len", 24, "--global-batch", 8, "--lr", 2e-3, "--checkpoint-every", MIDDLE)
    whole = [(f"whole-{name}", data_of(name, runs.place)) for name in NAMES]
    two, one = runs.packed("untied", "pp=2"), runs.packed("untied", "pp=1")
    run_jobs(2, [runs.job(n, two, *recipe, *data, "--checkpoint", runs.history(n)) for n, data in whole])
    wrong = ("--data", runs.place / "lines.jsonl", "--no-shuffle", "--resume", runs.checkpoint("whole-packed", MIDDLE))
    taken = (*data_of(PACKED, runs.place), "--resume", runs.checkpoint("whole-packed"))
    others = [runs.job("wrong", two, *wrong), runs.job("taken", two, *taken), *attempts(runs, two), stale(runs, two)]
    others += [runs.job("not text", two, "--data", runs.place / "lines.jsonl", "--seq-len", 24, "--global-batch", 2)]
    run_jobs(2, [*(resumed(runs, "same", two, name) for name in NAMES), *others])
    run_jobs(1, [resumed(runs, "fewer", one, name) for name in NAMES])
    return runs


def attempts(runs: Runs, root: Path) -> list[dict[str, object]]:
    """Begin other data at a checkpoint, and start the same job again, as a scheduler does, a step further each time."""
    history = runs.history("attempts")
    shutil.copytree(runs.checkpoint("whole-packed", MIDDLE), history / "step-000003")
    data = ("--data", runs.place / "lines.jsonl", "--skip-bad-documents")
    words = (*data, "--restart-data", "--resume", "auto", "--checkpoint", history)
    return [runs.job(f"attempt-{steps}", root, *words, steps=steps) for steps in (4, 5, 6)]


def stale(runs: Runs, root: Path) -> dict[str, object]:
    """Give each rank a copy of its own, of which the last one lacks a line."""
    for rank in (0, 1):
        node = runs.place / f"node-{rank}"
        node.mkdir()
        lines = (runs.place / "lines.jsonl").read_text().splitlines(keepends=True)
        (node / "lines.jsonl").write_text("".join(lines[rank:]))
    return runs.job("stale", root, "--data", runs.place / "node-{rank}" / "lines.jsonl", "--seq-len", 24, steps=1)


def resumed(runs: Runs, how: str, root: Path, name: str) -> dict[str, object]:
    job, middle = f"{how}-{name}", runs.checkpoint(f"whole-{name}", MIDDLE)
    data = data_of(name, runs.place)
    return runs.job(job, root, *data, "--skip-bad-documents", "--resume", middle, "--checkpoint", runs.history(job))


def state_of(checkpoint: Path) -> TrainingState:
    state = open_manifest(checkpoint).manifest.training
    assert state is not None
    return state


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["same", "fewer"])
def test_shuffled_and_weighted_data_go_on_bitwise(how: str, name: str, runs: Runs) -> None:
    expected = runs.losses(f"whole-{name}")
    assert list(expected) == list(range(1, STEPS + 1))
    assert runs.losses(f"{how}-{name}") == after_middle(expected)
    last, whole = runs.checkpoint(f"{how}-{name}"), runs.checkpoint(f"whole-{name}")
    assert digests_in(last) == digests_in(whole)
    assert state_of(last).data == state_of(whole).data


@pytest.mark.parametrize("name", NAMES)
def test_documents_that_are_no_text_are_counted_alike_whether_resumed_or_not(name: str, runs: Runs) -> None:
    whole, *others = (skipped(runs, f"{how}-{name}") for how in ("whole", "same", "fewer"))
    counts = list(whole.values())
    assert counts == sorted(counts)
    assert 0 < whole[MIDDLE] < whole[STEPS]
    assert others == 2 * [after_middle(whole)]
    repacked = runs.place / f"repacked-{name}"
    pack(runs.checkpoint(f"whole-{name}", MIDDLE), repacked, "pp=1")
    assert [read_skipped(open_packed(folder)) for folder in (repacked, runs.checkpoint(f"fewer-{name}"))] == [
        whole[MIDDLE],
        whole[STEPS],
    ]


def skipped(runs: Runs, name: str) -> dict[int, int]:
    """Return the documents skipped up to each step."""
    return {line["step"]: line["skipped_documents"] for line in runs.lines(name) if "loss" in line}


def test_other_data_is_begun_once_and_gone_on_with_by_later_attempts(runs: Runs) -> None:
    left = [state_of(runs.checkpoint("attempts", step)).data for step in (3, 4, 5, 6)]
    assert [data.num_sequences for data in left if data is not None] == [24, 8, 16, 24]
    assert [list(runs.losses(f"attempt-{step}")) for step in (4, 5, 6)] == [[4], [5], [6]]
    assert "note: --restart-data: starting this data from its first sequence" in runs.said("attempt-4")
    assert "note: --restart-data has no effect: the checkpoint consumed 16 " in runs.said("attempt-6")


def test_documents_skipped_before_other_data_is_begun_are_still_counted(runs: Runs) -> None:
    before = skipped(runs, "whole-packed")[MIDDLE]
    counts = [skipped(runs, f"attempt-{step}")[step] for step in (4, 5, 6)]
    assert before < counts[0] < counts[1] < counts[2]
    assert read_skipped(open_packed(runs.checkpoint("attempts", 6))) == counts[2]


def test_rank_whose_data_is_not_rank_0s_ends_the_run_before_its_first_step(runs: Runs) -> None:
    said = runs.said("stale")
    where = f"rank 1: --data {runs.place}/node-1/lines.jsonl"
    assert said[said.index("error: ") :].splitlines()[0] == f"error: data.differs-between-ranks at {where}"
    assert not any("loss" in line for line in said.splitlines())


def test_line_that_is_no_text_ends_the_run_and_is_named(runs: Runs) -> None:
    said = runs.said("not text")
    assert said[said.index("error: ") :] == f"error: data.lone-surrogate at rank 0: {runs.place}/lines.jsonl:2\n"


def test_run_that_has_taken_all_its_steps_says_so_and_takes_none(runs: Runs) -> None:
    assert f"note: checkpoint is already at --steps {STEPS}" in runs.said("taken")
    assert runs.losses("taken") == {}
