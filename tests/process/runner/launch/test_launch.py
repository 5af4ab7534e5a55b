"""`runner launch` as a user calls it: real torchrun ranks on real bundles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from runner.preflight.preflight import TESTED
from stores.open import open_manifest
from tests.builders import pack, reshard
from tests.fast.runner.tiny import save_model
from tests.process.local_jobs import ROOT, forked_runner, runner
from tests.process.runner.training_jobs import job, lines_of, run_jobs, said
from tests.process.torchrun import started

SMALL = ("--seq-len", "16", "--global-batch", "8", "--microbatch", "2", "--steps", "3", "--lr", "1e-3",
         "--no-self-check")  # fmt: skip
WORDS = [f"w{number}" for number in range(300)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tied Llama with a tokenizer of whole words."""
    folder = tmp_path_factory.mktemp("models") / "tied"
    save_model(folder, tie_word_embeddings=True, bos_token_id=300, eos_token_id=301)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    return pack(source, source.parent / "pp2")


@pytest.fixture(scope="module")
def text(source: Path) -> Path:
    """Documents of very different lengths, so that sequences made of them are padded."""
    path = source.parent / "text.jsonl"
    lengths = [3, 40, 9, 17, 2, 25, 31, 5, 12, 8, 19, 4]
    documents = (" ".join(WORDS[(7 * row + 3 * i) % 300] for i in range(n)) for row, n in enumerate(lengths))
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


def launch(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return runner("launch", *arguments, **environment)


@pytest.mark.slow
def test_torch_newer_than_those_tested_is_noted_once_and_trains(packed: Path, tmp_path: Path) -> None:
    """It is this torch, with metadata of another release before its own."""
    metadata = tmp_path / "torch-2.99.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.99.0\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    done = launch(packed, "--", "--data", "synthetic", *SMALL, "--log-dir", tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "2.99.0" in line)
    assert all(release in line for release in TESTED)


def test_trained_weights_export_to_a_folder_that_transformers_loads_with_the_same_loss(
    packed: Path, text: Path, tmp_path: Path
) -> None:
    trained, exported = tmp_path / "trained", tmp_path / "exported"
    done = forked_runner(
        "launch", packed, "--", "--data", text, "--eval-data", text, *SMALL, "--no-packing",
        "--save", trained, "--log-dir", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = lines_of(tmp_path)
    check_ranks(lines, packed)
    steps = [line for line in lines if "step" in line]
    assert [step["step"] for step in steps] == [1, 2, 3, 3]
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    assert lines[0] == "LlamaForCausalLM, 390,208 parameters in fp32"
    assert lines[-1] == f"next: reshard export {trained} --to hf --out {trained}-hf"
    assert reshard("export", trained, "--to", "hf", "--out", exported).code == 0
    for folder in (exported, trained):  # what was saved is a Hugging Face folder too
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        loss, num_tokens = loss_of(model, text)
        assert num_tokens == steps[-1]["eval_num_tokens"]
        assert loss == pytest.approx(steps[-1]["eval_loss"], rel=1e-6)
    assert sorted(path.name for path in exported.iterdir()) == sorted(
        path.name for path in (packed.parent / "tied").iterdir()
    )


@pytest.mark.parametrize(
    "degrees",
    [("--dp-shard", "2"), pytest.param(("--tp", "2", "--dp-replicate", "2"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_slices_are_merged_as_they_are_saved_and_transformers_has_the_same_loss(
    degrees: tuple[str, ...], packed: Path, text: Path, tmp_path: Path
) -> None:
    saved, history = tmp_path / "saved", tmp_path / "history"
    asked = ("--data", text, "--eval-data", text, *SMALL, "--no-packing", "--save", saved, "--checkpoint", history)
    run_jobs(8 if "--tp" in degrees else 4, [job(packed, tmp_path, *asked, *degrees)])
    assert "--save merges them" in said(tmp_path)
    (checkpoint,) = history.glob("step-*")
    assert not list(checkpoint.glob("model*"))
    merged = tmp_path / "merged"
    for command in (("verify", saved), ("pack", checkpoint, "--merge-slices", "--out", merged)):
        assert reshard(*command).code == 0
    found, expected = tensors_in(saved), tensors_in(merged)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[fqn], tensor) for fqn, tensor in expected.items())
    (eval_loss,) = (line["eval_loss"] for line in lines_of(tmp_path) if "eval_loss" in line)
    loss, _ = loss_of(AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32), text)
    assert loss == pytest.approx(eval_loss, rel=1e-6)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in the root of a folder."""
    return {fqn: tensor for path in folder.glob("*.safetensors") for fqn, tensor in load_file(path).items()}


def check_ranks(lines: list[dict[str, Any]], packed: Path) -> None:
    """See what is said of each rank before the first step and after the last, and where a step's time went."""
    manifest, before, after = open_manifest(packed).manifest, lines[:2], lines[-2:]
    assert [(line["rank"], line["stages"], line["load_nbytes"]) for line in before] == [
        (stage.index, [stage.index], stage.nbytes) for stage in manifest.stages
    ]
    assert all(0 < line["planned_nbytes"] < line["base_nbytes"] for line in before)  # a tiny model
    assert all(line["load_gib_per_s"] == line["load_nbytes"] / 2**30 / line["load_s"] for line in before)
    assert [line["rank"] for line in after] == [0, 1]
    for line in (line for line in lines if "loss" in line):
        # Until the norm of the gradients is known; then comes the optimizer.
        parts = [line[f"{part}_s"] for part in ("data", "compute", "communication", "bubble")]
        assert all(len(part) == 2 and min(part) >= 0 for part in parts)
        assert 0 < sum(part[0] for part in parts) < line["step_s"]
        assert 0 < line["peak_nbytes"] <= after[0]["peak_nbytes"]
        assert "mfu" not in line


def loss_of(model: LlamaForCausalLM, text: Path) -> tuple[float, int]:
    """One document a sequence, eos after it, as this tokenizer adds no bos, cut at 16 tokens."""
    total, count = 0.0, 0
    for line in text.read_text().splitlines():
        ids = [*(int(word[1:]) for word in json.loads(line)["text"].split()), 301][:17]
        with torch.no_grad():
            logits = model(torch.tensor([ids[:-1]])).logits[0]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()
        count += len(ids) - 1
    return total / count, count


@pytest.mark.slow
def test_tied_weight_stored_once_trains_on_one_rank(source: Path, tmp_path: Path) -> None:
    packed = pack(source, tmp_path / "pp1", "pp=1")
    trained = tmp_path / "trained"
    done = launch(packed, "--", "--data", "synthetic", *SMALL, "--save", trained, "--log-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    two = pack(trained, tmp_path / "pp2")
    assert launch(two, "--", "--data", "synthetic", *SMALL, "--log-dir", tmp_path).returncode == 0


def test_worker_refuses_a_wrong_world_size_before_any_collective(packed: Path, tmp_path: Path) -> None:
    # Rank 0 of 3 alone: a collective would wait for the others until the timeout.
    words = (packed / "manifest.json", "--data", "synthetic", "--log-dir", tmp_path)
    with started(1, "../../runner/train.py", *words, WORLD_SIZE="3") as (rank,):
        assert rank.wait(60) == 3, rank.said
        assert "error: manifest needs 2 ranks, " in rank.said


@pytest.mark.parametrize(
    "begun_s", [pytest.param(0.8, marks=pytest.mark.slow), 2.0, pytest.param(4.0, marks=pytest.mark.slow)]
)
def test_ctrl_c_while_ranks_are_being_started_ends_all_without_a_traceback(
    begun_s: float, packed: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "runner.cli", "launch", packed, "--", "--data", "synthetic", "--log-dir", tmp_path]
    process = subprocess.Popen(
        [*command, "--steps", "100000", "--timeout", "8"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    time.sleep(begun_s)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said = process.communicate(timeout=60)[1]
    assert process.returncode in (130, -signal.SIGINT), said
    assert "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
