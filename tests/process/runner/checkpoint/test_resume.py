"""Training that was interrupted, on the same ranks or on others, against training that was not.

Every resumed run starts in fresh processes. Checkpoints are compared by the digests of their tensors,
weights and moments alike, and losses by their bits.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from manifests.store import open_shard
from runner.checkpoint.history import claim_history
from runner.config.schema import BatchOptions, DataOptions
from runner.data.sequences import read_batches
from stores.open import open_manifest
from tests.builders import flip, pack, reshard
from tests.fast.runner.tiny import load_model, save_model
from tests.process.runner.training_jobs import job, lines_of, run_jobs, said

WEIGHTS = ("tied", "untied")
V = "pp=2,vpp=2,style=v"  # on which ZBVZeroBubble runs
LAYOUTS = {ranks: {"1F1B": f"pp={ranks}", "Interleaved1F1B": f"pp={ranks},vpp=2"} for ranks in (1, 2, 4)}
NAMES = [f"{ranks}-{schedule}-{weights}" for ranks in LAYOUTS for schedule in LAYOUTS[ranks] for weights in WEIGHTS]
# The slow tests have the other layouts; `WHOLE` has what other runs go on from, too.
SAMPLE = ["2-1F1B-untied", "4-1F1B-tied", "4-Interleaved1F1B-untied"]
WHOLE = [*SAMPLE, "4-1F1B-untied"]
REST = [name for name in NAMES if name not in SAMPLE]
STEPS, MIDDLE = 6, 3
SEQ_LEN, GLOBAL_BATCH = 24, 4
LR, WARMUP, MIN_LR, MAX_NORM, WEIGHT_DECAY = 2e-3, 2, 2e-4, 0.5, 0.1
RECIPE = (
    "--seq-len", SEQ_LEN, "--global-batch", GLOBAL_BATCH, "--lr", LR, "--warmup-steps", WARMUP, "--decay", "cosine",
    "--decay-steps", STEPS, "--min-lr", MIN_LR, "--max-norm", MAX_NORM, "--weight-decay", WEIGHT_DECAY,
)  # fmt: skip
WORDS = [f"w{number}" for number in range(300)]


@dataclass(frozen=True)
class Runs:
    """Where everything lies; a run is known by its name."""

    place: Path

    def history(self, name: str) -> Path:
        return self.place / name / "checkpoints"

    def checkpoint(self, name: str, step: int = STEPS) -> Path:
        return self.history(name) / f"step-{step:06d}"

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [line for line in lines_of(self.place / name) if "step" in line]

    def losses(self, name: str) -> dict[int, tuple[float, float, float]]:
        """Give loss, norm and learning rate of each step."""
        steps = (line for line in self.lines(name) if "loss" in line)
        return {line["step"]: (line["loss"], line["grad_norm"], line["lr"]) for line in steps}

    def said(self, name: str) -> str:
        return said(self.place / name)

    def packed(self, weights: str, layout: str) -> Path:
        return self.place / "packed" / weights / layout

    def job(self, name: str, root: Path, *args: object, steps: int = STEPS) -> dict[str, Any]:
        return job(root, self.place / name, *args, "--steps", steps)


def digests_in(checkpoint: Path) -> dict[tuple[str, str], str]:
    """Give the digest of every tensor, by kind and FQN; tied copies of one kind are equal."""
    manifest, found = open_manifest(checkpoint).manifest, dict[tuple[str, str], str]()
    for shard in manifest.shards:
        header = open_shard(checkpoint, shard)
        found |= {(shard.holds, fqn): digest for fqn, digest in header.digests(shard.path).items()}
    for replica in (replica.fqn for group in manifest.ties for replica in group.replicas):
        for holds in ("weights", "exp_avg", "exp_avg_sq"):
            owner = found[holds, manifest.ties[0].owner.fqn]
            assert found.setdefault((holds, replica), owner) == owner
    return found


def data_of(weights: str, place: Path) -> tuple[object, ...]:
    """Text in whole words for the tied model, random tokens for the other."""
    return ("--data", place / "text.jsonl") if weights == "tied" else ("--data", "synthetic", "--seed", 7)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("resume"))
    make_sources(runs.place)
    for weights in WEIGHTS:
        for layout in (V, *(layout for layouts in LAYOUTS.values() for layout in layouts.values())):
            pack(runs.place / weights, runs.packed(weights, layout), layout)
    run_jobs(4, whole(runs, 4, WHOLE))
    run_jobs(2, [*whole(runs, 2, WHOLE), *across(runs, "pp=2", "whole-4-1F1B", MIDDLE, 4), *to_v(runs, "tied")])
    run_jobs(1, across(runs, "pp=1", "across-pp=2", 4, 5))
    run_jobs(
        4,
        [
            *resumed(runs, 4, SAMPLE),
            *across(runs, "pp=4,vpp=2", "across-pp=1", 5, STEPS),
            *from_v(runs, "tied"),
        ],
    )
    spoil_copy(runs)
    with claim_history(runs.history("held")):
        run_jobs(2, [*resumed(runs, 2, SAMPLE), offline(runs, "tied"), *on_two_ranks(runs)])
    return runs


@pytest.fixture(scope="module")
def rest(runs: Runs) -> Runs:
    """What `runs` leaves to the slow tests."""
    for num_ranks in LAYOUTS:
        run_jobs(num_ranks, whole(runs, num_ranks, [name for name in REST if name not in WHOLE]))
    run_jobs(4, resumed(runs, 4, REST))
    run_jobs(2, [*resumed(runs, 2, REST), offline(runs, "untied"), *to_v(runs, "untied")])
    run_jobs(1, resumed(runs, 1, REST))
    run_jobs(4, from_v(runs, "untied"))
    return runs


def make_sources(place: Path) -> None:
    for weights in WEIGHTS:
        sizes = {"num_hidden_layers": 6, "hidden_size": 32, "intermediate_size": 80}
        ends = {"bos_token_id": 300, "eos_token_id": 301}
        save_model(place / weights, tie_word_embeddings=weights == "tied", **sizes, **ends)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(place / "tied" / "tokenizer.json"))
    documents = (" ".join(WORDS[(7 * row + i * i) % 300] for i in range(3 + row % 41)) for row in range(90))
    (place / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))


def whole(runs: Runs, num_ranks: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """Train without interruption, saving in the middle and at the end."""
    return [
        runs.job(
            f"whole-{name}", packed, *RECIPE, *data, "--checkpoint", runs.history(f"whole-{name}"),
            "--checkpoint-every", MIDDLE,
        )
        for name, packed, data in on_ranks(runs, num_ranks, names)
    ]  # fmt: skip


def resumed(runs: Runs, num_ranks: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """Go on from the middle on the same ranks, knowing nothing of the recipe."""
    return [
        runs.job(
            f"resumed-{name}", packed, *data, "--resume", runs.checkpoint(f"whole-{name}", MIDDLE),
            "--checkpoint", runs.history(f"resumed-{name}"), "--checkpoint-sync",
        )
        for name, packed, data in on_ranks(runs, num_ranks, names)
    ]  # fmt: skip


def on_ranks(runs: Runs, num_ranks: int, names: Sequence[str]) -> Iterator[tuple[str, Path, tuple[object, ...]]]:
    """Yield the runs of so many ranks, and what each trains on which data."""
    for name in names:
        ranks, schedule, weights = name.split("-")
        if int(ranks) == num_ranks:
            yield name, runs.packed(weights, LAYOUTS[num_ranks][schedule]), data_of(weights, runs.place)


def across(
    runs: Runs, layout: str, before: str, first: int, last: int, weights: Sequence[str] = WEIGHTS
) -> list[dict[str, Any]]:
    """Go on for a few steps on other ranks than those of the run before."""
    return [
        runs.job(
            f"across-{layout}-{one}", runs.packed(one, layout), *data_of(one, runs.place),
            "--resume", runs.checkpoint(f"{before}-{one}", first) / "manifest.json",
            "--checkpoint", runs.history(f"across-{layout}-{one}"),
            steps=last,
        )
        for one in weights
    ]  # fmt: skip


def to_v(runs: Runs, weights: str) -> list[dict[str, Any]]:
    return across(runs, V, "whole-4-1F1B", MIDDLE, 5, [weights])


def from_v(runs: Runs, weights: str) -> list[dict[str, Any]]:
    return across(runs, "pp=4", f"across-{V}", 5, STEPS, [weights])


def offline(runs: Runs, weights: str) -> dict[str, Any]:
    """Cut a checkpoint of four ranks for two, without torch, and go on from what came of it."""
    cut, name = runs.place / f"cut-{weights}", f"offline-{weights}"
    pack(runs.checkpoint(f"whole-4-1F1B-{weights}", MIDDLE), cut, "pp=2,vpp=2")
    return runs.job(name, cut, *data_of(weights, runs.place), "--resume", "auto", "--checkpoint", runs.history(name))


def spoil_copy(runs: Runs) -> None:
    """Copy a run's checkpoints and flip a bit of the newest one's moments."""
    shutil.copytree(runs.history("whole-2-1F1B-untied"), runs.history("spoiled"))
    shard = runs.checkpoint("spoiled") / "stage-001/exp_avg/model.safetensors"
    flip(shard, -9, 4)


def on_two_ranks(runs: Runs) -> list[dict[str, Any]]:
    packed, data = runs.packed("untied", "pp=2"), data_of("untied", runs.place)
    middle = runs.checkpoint("whole-2-1F1B-untied", MIDDLE)
    (runs.place / "spoiled" / "checkpoints" / ".step-000001.partial").mkdir()
    return [
        runs.job(
            "spoiled", packed, *data, "--resume", "auto", "--checkpoint", runs.history("spoiled"),
            "--checkpoint-every", 2, "--keep", 2,
        ),
        runs.job("held", packed, *RECIPE, *data, "--checkpoint", runs.history("held")),
        runs.job("used", packed, *RECIPE, *data, "--checkpoint", runs.history("whole-2-1F1B-untied")),
        runs.job("anew", middle, *RECIPE, *data, "--resume-weights-only", "--save", runs.place / "saved", steps=1),
        runs.job("unsaid", middle, *RECIPE, *data),
        runs.job("no moments", packed, *RECIPE, *data, "--resume", runs.place / "saved"),
        runs.job("other model", packed, *data, "--resume", runs.checkpoint("whole-4-1F1B-tied", MIDDLE)),
        runs.job("other data", packed, "--data", "synthetic", "--seed", 8, "--resume", middle),
        runs.job("other rate", packed, *data, "--resume", middle, "--lr", 4e-3, steps=4),
    ]  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
def test_resumed_training_is_bitwise_the_uninterrupted_one(name: str, runs: Runs) -> None:
    check_resumed(name, runs)


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_training_is_resumed_bitwise_on_every_layout(name: str, rest: Runs) -> None:
    check_resumed(name, rest)


def after_middle(losses: Mapping[int, Any]) -> dict[int, Any]:
    return {step: losses[step] for step in range(MIDDLE + 1, STEPS + 1)}


def check_resumed(name: str, runs: Runs) -> None:
    expected = runs.losses(f"whole-{name}")
    assert list(expected) == list(range(1, STEPS + 1))
    assert runs.losses(f"resumed-{name}") == after_middle(expected)
    assert digests_in(runs.checkpoint(f"resumed-{name}")) == digests_in(runs.checkpoint(f"whole-{name}"))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_four_ranks_to_two_to_one_to_four_are_bitwise_the_uninterrupted_four(weights: str, runs: Runs) -> None:
    expected = runs.losses(f"whole-4-1F1B-{weights}")
    found = [runs.losses(f"across-{layout}-{weights}") for layout in ("pp=2", "pp=1", "pp=4,vpp=2")]
    assert [list(part) for part in found] == [[4], [5], [6]]
    assert {step: line for part in found for step, line in part.items()} == after_middle(expected)
    last = runs.checkpoint(f"across-pp=4,vpp=2-{weights}")
    assert digests_in(last) == digests_in(runs.checkpoint(f"whole-4-1F1B-{weights}"))
    state = open_manifest(last).manifest.training
    assert state is not None
    assert state.data is not None
    assert (state.step, state.data.num_sequences) == (STEPS, STEPS * GLOBAL_BATCH)


def test_loop_to_v_and_back_is_bitwise_the_uninterrupted_loop(runs: Runs) -> None:
    check_v("tied", runs)


def test_checkpoint_that_was_cut_anew_offline_trains_on_bitwise(runs: Runs) -> None:
    check_cut("tied", runs)


@pytest.mark.slow
def test_untied_weights_go_to_v_and_back_and_are_cut_anew_bitwise(rest: Runs) -> None:
    check_v("untied", rest)
    check_cut("untied", rest)


def check_v(weights: str, runs: Runs) -> None:
    expected = runs.losses(f"whole-4-1F1B-{weights}")
    found = [runs.losses(f"across-{layout}-{weights}") for layout in (V, "pp=4")]
    assert [list(part) for part in found] == [[4, 5], [6]]
    assert {step: line for part in found for step, line in part.items()} == after_middle(expected)
    last = runs.checkpoint(f"across-pp=4-{weights}")
    assert digests_in(last) == digests_in(runs.checkpoint(f"whole-4-1F1B-{weights}"))


def check_cut(weights: str, runs: Runs) -> None:
    cut, parent = runs.place / f"cut-{weights}", runs.checkpoint(f"whole-4-1F1B-{weights}", MIDDLE)
    assert digests_in(cut) == digests_in(parent)
    assert reshard("verify", cut).code == 0
    expected = runs.losses(f"whole-4-1F1B-{weights}")
    assert runs.losses(f"offline-{weights}") == after_middle(expected)
    last = runs.checkpoint(f"offline-{weights}")
    assert digests_in(last) == digests_in(runs.checkpoint(f"whole-4-1F1B-{weights}"))
    locations = [Path(parent.location) for parent in open_manifest(last).manifest.parents]
    assert locations == [runs.packed(weights, "pp=4"), parent, cut]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_resumed_training_agrees_with_transformers_and_plain_adamw(weights: str, runs: Runs) -> None:
    losses, parameters = train_outside(runs, weights)
    found = {}
    for name in ("whole-4-1F1B", "across-pp=2", "across-pp=1", "across-pp=4,vpp=2"):
        found |= runs.losses(f"{name}-{weights}")
    assert [found[step][0] for step in sorted(found)] == pytest.approx(losses, rel=1e-5)
    exported = runs.place / f"exported-{weights}"
    last = runs.checkpoint(f"across-pp=4,vpp=2-{weights}")
    assert reshard("export", last, "--to", "hf", "--out", exported).code == 0
    with safe_open(exported / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(parameters)
        for name, expected in parameters.items():
            assert (file.get_tensor(name) - expected).norm() <= 1e-3 * expected.norm(), name


def train_outside(runs: Runs, weights: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train the `transformers` model on the same batches, whole, with the schedule as SPEC.md writes it."""
    folder = runs.packed(weights, "pp=1")
    data = DataOptions(sources=(str(runs.place / "text.jsonl"),))
    if weights == "untied":
        data = DataOptions(sources=("synthetic",), seed=7)
    sizes = BatchOptions(global_batch=GLOBAL_BATCH, microbatch=1, seq_len=SEQ_LEN)
    batches = read_batches(data, sizes, folder=folder, vocab_size=320)
    model = load_model(runs.place / weights).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=WEIGHT_DECAY)
    losses = []
    for step, batch in zip(range(STEPS), batches, strict=False):
        done = (step - WARMUP) / (STEPS - WARMUP)
        cosine = MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * done)) / 2
        optimizer.param_groups[0]["lr"] = LR * (step + 1) / WARMUP if step < WARMUP else cosine
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch.tokens).logits.flatten(0, 1), batch.labels.flatten())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_each_save_says_how_long_training_paused(runs: Runs) -> None:
    saves = [line for line in runs.lines("whole-4-1F1B-tied") if "checkpoint" in line]
    assert [(line["step"], Path(line["checkpoint"]).name) for line in saves] == [(3, "step-000003"), (6, "step-000006")]
    for line in saves:
        shards = list(open_manifest(Path(line["checkpoint"])).manifest.shards)
        assert line["save_nbytes"] == sum(shard.nbytes for shard in shards)
        assert line["stall_s"] > 0
        assert line["save_s"] > 0


def test_auto_names_what_is_damaged_and_resumes_from_the_checkpoint_before(runs: Runs) -> None:
    newest = runs.checkpoint("spoiled")
    assert (
        f"warning: {newest} cannot be resumed: rank 1: {newest}/stage-001/exp_avg/model.safetensors: "
    ) in runs.said("spoiled")
    assert f"resuming from {runs.checkpoint('spoiled', MIDDLE)} at step 3 " in runs.said("spoiled")
    # The damaged one gave way, and older ones were taken away.
    names = ["step-000004", "step-000006", "step-000006.set-aside-1"]
    assert sorted(path.name for path in runs.history("spoiled").iterdir()) == names
    assert reshard("verify", newest).code == 0
    assert digests_in(newest) == digests_in(runs.checkpoint("whole-2-1F1B-untied"))


def test_weights_only_begins_at_step_0_and_says_what_stays_behind(runs: Runs) -> None:
    middle = runs.checkpoint("whole-2-1F1B-untied", MIDDLE)
    assert f"starting at step 0 with the weights of {middle}; " in runs.said("anew")
    assert "not resumed: AdamW state at step 3" in runs.said("anew")
    assert [line["step"] for line in runs.lines("anew")] == [1]
    state = open_manifest(runs.place / "saved").manifest.training
    assert state is not None
    assert (state.step, state.optimizer) == (1, None)


@pytest.mark.parametrize(
    ("name", "code", "where"),
    [
        ("held", "launch.folder-in-use", "--checkpoint {runs}/held/checkpoints"),
        ("used", "checkpoint.folder-in-use", "{runs}/whole-2-1F1B-untied/checkpoints"),
        ("unsaid", "resume.undecided", "{runs}/whole-2-1F1B-untied/checkpoints/step-000003/manifest.json"),
        ("no moments", "resume.no-optimizer-state", "{runs}/saved/manifest.json"),
        ("other model", "resume.other-model", "{runs}/whole-4-1F1B-tied/checkpoints/step-000003/manifest.json"),
        ("other data", "resume.other-data", "--data"),
    ],
)
def test_what_cannot_be_resumed_is_refused(name: str, code: str, where: str, runs: Runs) -> None:
    said = runs.said(name)
    assert said[said.index("error: ") :] == f"error: {code} at rank 0: {where.format(runs=runs.place)}\n"
    assert not any("loss" in line for line in said.splitlines())
