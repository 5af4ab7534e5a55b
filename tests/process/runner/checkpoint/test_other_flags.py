"""A run that is resumed with other flags, or on fewer ranks, says what differs, and takes no newer checkpoint away."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from runner.checkpoint.history import checkpoint_path
from runner.report.read import read_run
from tests.builders import files_in, flip, pack
from tests.fast.runner.tiny import save_model
from tests.process.runner.training_jobs import job, lines_of, run_jobs, said
from tests.process.torchrun import started

pytestmark = pytest.mark.timeout(300)
SIZES = ("--data", "synthetic", "--seq-len", 16, "--global-batch", 4)
ONLY, AUTO = ("--train-only", r"layers\.0\."), ("--resume", "auto")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("flags")
    save_model(place / "model", num_hidden_layers=1, hidden_size=32, intermediate_size=80)
    packed = pack(place / "model", place / "packed", "pp=1")

    def run(name: str, log: str, *flags: object) -> dict[str, object]:
        return job(packed, place / log, *SIZES, *flags, "--checkpoint", place / name)

    run_jobs(2, [run("traced", "traced-log", "--trace", "1-2", "--steps", 2)])
    jobs = [
        run("traced", "traced-log", "--trace", "3-4", "--steps", 4, *AUTO),
        run("averaged", "all", "--ema", 0.9, "--steps", 4, "--checkpoint-every", 2),
        run("averaged", "narrowed", *ONLY, "--steps", 6, *AUTO),
        run("plain", "frozen", "--optimizer", "sgd", "--momentum", 0, *ONLY, "--steps", 2),
        run("plain", "unfrozen", "--steps", 3, *AUTO),
    ]
    run_jobs(1, jobs)
    shutil.copytree(place / "averaged", place / "before")
    run_jobs(1, [run("averaged", "widened", "--steps", 8, *AUTO)])
    return place


def test_checkpoint_that_other_flags_do_not_fit_is_not_passed_over_for_an_older_one(place: Path) -> None:
    newest = checkpoint_path(place / "averaged", 6)
    assert said(place / "widened") == f"error: resume.no-optimizer-state at rank 0: {newest}/manifest.json\n"
    assert files_in(place / "averaged") == files_in(place / "before")


def test_averages_that_a_narrower_run_does_not_keep_are_named(place: Path) -> None:
    (note,) = (line for line in said(place / "narrowed").splitlines() if line.startswith("note: the average"))
    assert note.startswith("note: the average of 3 tensors, such as model.embed_tokens.weight, is not kept")
    assert f"reshard export {checkpoint_path(place / 'averaged', 4)} --to hf --weights ema" in note


def test_parameters_that_were_frozen_and_need_no_optimizer_state_are_named(place: Path) -> None:
    (note,) = (line for line in said(place / "unfrozen").splitlines() if "frozen" in line)
    assert note.startswith("note: training 3 tensors, such as model.embed_tokens.weight, that were frozen")
    assert not any("frozen" in line for line in said(place / "frozen").splitlines())


def test_traces_of_more_ranks_before_are_not_left_beside_new_ones(place: Path) -> None:
    assert [path.name for path in (place / "traced-log" / "trace").iterdir()] == ["rank-00000.json"]
    traces = read_run(place / "traced-log").traces
    assert traces is not None
    assert [step.step for step in traces.steps] == [3, 4]


def test_damage_found_in_the_background_names_the_checkpoint_before_and_how_to_resume_from_it(place: Path) -> None:
    history = shutil.copytree(place / "averaged", place / "damaged")
    newest, older = checkpoint_path(history, 4), checkpoint_path(history, 2)
    shutil.rmtree(checkpoint_path(history, 6))
    flip(newest / "stage-000/exp_avg/model.safetensors", -9, 4)
    words = ("--steps", "5", *AUTO, "--checkpoint", history, "--log-dir", place / "damaged-log", "--no-self-check")
    flags = (*map(str, SIZES), *words, "--digests", "background")
    with started(1, "../../runner/train.py", place / "packed/manifest.json", *flags) as (rank,):
        code, printed = rank.wait(60), rank.said
    assert code == 3, printed
    assert "[shard.digest-mismatch]" in printed
    (hint,) = (line for line in printed.splitlines() if line.startswith("hint: "))
    assert hint.endswith(f"; --digests foreground with --resume auto resumes from an older checkpoint: {older}")
    assert sorted(path.name for path in history.glob("step-*")) == [older.name, newest.name]
    foreground = job(place / "packed", place / "foreground", *SIZES, "--steps", 5, *AUTO, "--checkpoint", history)
    run_jobs(1, [foreground])
    assert f"resuming from {older} at step 2 " in said(place / "foreground")
    assert [line["step"] for line in lines_of(place / "foreground") if "loss" in line] == [3, 4, 5]
    assert json.loads((checkpoint_path(history, 5) / "manifest.json").read_text())["training"]["step"] == 5


def test_newest_that_one_rank_does_not_see_is_not_passed_over_for_an_older_one(place: Path) -> None:
    packed, unseen = pack(place / "model", place / "packed2", "pp=2"), place / "unseen"
    run_jobs(2, [job(packed, place / "first", *SIZES, "--steps", 3, "--checkpoint-every", 1,
                     "--checkpoint", place / "whole")])  # fmt: skip
    shard = Path("checkpoints/step-000003/stage-001/exp_avg/model.safetensors")

    def resumed(name: str, *paths_by_rank: Path | None) -> dict[str, object]:
        """Resume in a folder of each rank's own that misses something on either."""
        for rank, path in enumerate(paths_by_rank):
            shutil.copytree(place / "whole", unseen / name / str(rank) / "checkpoints")
            if path is not None:
                missing = unseen / name / str(rank) / path
                shutil.rmtree(missing) if missing.is_dir() else missing.unlink()
        flags = (*SIZES, "--steps", 2, *AUTO, "--checkpoint", "checkpoints")
        return job(packed, unseen / f"{name}-log", *flags, cwd=unseen / name / "{rank}")

    newest = Path("checkpoints/step-000003")
    run_jobs(2, [
        resumed("folder", None, newest),
        resumed("folder-0", newest, None),
        resumed("shard", None, shard),
        resumed("both", shard, shard),
    ])  # fmt: skip
    ends = [said(unseen / f"{name}-log").splitlines()[-1] for name in ("folder", "folder-0", "shard")]
    assert ends == [
        f"error: checkpoint.not-shared at rank 1: {newest}",
        f"error: checkpoint.not-shared at rank 0: {newest}",
        f"error: checkpoint.not-shared at rank 1: {shard}",
    ]
    assert "/step-000002 at step 2 " in said(unseen / "both-log")  # of which no rank sees the shard
