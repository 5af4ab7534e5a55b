"""`runner eval` against `transformers`, over pipelines of real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3ForCausalLM, LlamaForCausalLM, RwkvForCausalLM

from tests.builders import pack
from tests.fast.manifests.models.catalogued import save_tiny
from tests.fast.runner.data.words import BOS, EOS, write_documents, write_tokenizer
from tests.fast.runner.models.decoders import Variant, save_decoder
from tests.fast.runner.models.titans import load
from tests.fast.runner.tiny import load_model, read_config, save_model
from tests.process.runner.pipeline.mtp_oracle import config_of, random_weights
from tests.process.runner.training_jobs import job, lines_of, losses_of, run_jobs
from tests.process.torchrun import launch

WORDS = [f"w{number}" for number in range(300)]
ENDS = {"bos_token_id": 60, "eos_token_id": 61}
ROWS = torch.randint(1, 96, (6, 13), generator=torch.Generator().manual_seed(0))
LAYOUTS = {1: ("pp=1",), 2: ("pp=2", "pp=2,vpp=2", "pp=2,vpp=2,style=v"), 4: ("pp=4", "pp=4,vpp=2")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model with a tokenizer of whole words, and a text of uneven documents."""
    place = tmp_path_factory.mktemp("reading")
    save_model(place / "source", tie_word_embeddings=True, bos_token_id=300, eos_token_id=301)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(place / "source" / "tokenizer.json"))
    documents = (" ".join(WORDS[(7 * row + i * i) % 300] for i in range(3 + row % 41)) for row in range(40))
    (place / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    for layout in (layout for layouts in LAYOUTS.values() for layout in layouts):
        pack(place / "source", place / layout, layout)
    return place


def loss_of(model: LlamaForCausalLM, text: Path) -> tuple[float, int]:
    """All documents end to end, eos after each, every token predicted once in windows of 32."""
    ids: list[int] = []
    for line in text.read_text().splitlines():
        ids += [*(int(word[1:]) for word in json.loads(line)["text"].split()), 301]
    total, count = 0.0, len(ids) - 1
    for begin in range(0, count, 32):
        window = torch.tensor([ids[begin : begin + 33]])
        num_labels = window.shape[1] - 1
        with torch.no_grad():
            logits = model(window[:, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, window[0, 1:]).item() * num_labels
    return total / count, count


def evaluate(num_ranks: int, place: Path, *words: object) -> tuple[float, int]:
    """Return the loss that so many ranks find, and the number of tokens."""
    (place / "jobs.json").write_text(json.dumps([list(map(str, words))]))
    launch(num_ranks, "runner/evaluation/reading_worker.py", place / "jobs.json", place / "evaluated.jsonl")
    loss, num_tokens = json.loads((place / "evaluated.jsonl").read_text())
    return loss, num_tokens


def check(place: Path, layout: str) -> None:
    num_ranks = next(ranks for ranks, layouts in LAYOUTS.items() if layout in layouts)
    data = ("--data", place / "text.jsonl", "--seq-len", 32, "--microbatch", 2)
    loss, num_tokens = evaluate(num_ranks, place, place / layout, *data)
    expected, count = loss_of(load_model(place / "source"), place / "text.jsonl")
    assert (loss, num_tokens) == (pytest.approx(expected, rel=1e-6), count)


@pytest.mark.parametrize("layout", ["pp=2"])
def test_pipeline_evaluates_as_transformers_does(place: Path, layout: str) -> None:
    check(place, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [layout for layouts in LAYOUTS.values() for layout in layouts if layout != "pp=2"])
def test_every_layout_evaluates_as_transformers_does(place: Path, layout: str) -> None:
    check(place, layout)


def test_rows_that_are_written_are_sent_to_rank_0_alone(place: Path) -> None:
    """Each of the others would need memory for those of all replicas."""
    words = ("--data", place / "text.jsonl", "--seq-len", 32, "--out", place / "scores.parquet",
             "--hidden-states", "model.layers.0")  # fmt: skip
    (place / "jobs.json").write_text(json.dumps([list(map(str, (place / "pp=2", *words)))]))
    said = launch(2, "runner/evaluation/reading_worker.py", place / "jobs.json", place / "evaluated.jsonl")
    sizes = [int(text.rpartition("longest message to all: ")[2]) for text in said]
    num_rows, width = 2, 64  # of a batch
    assert 0 < max(sizes) < num_rows * 32 * width * 4  # float32
    assert len(parquet.read_table(place / "scores.parquet")["hidden_states"][0][0]) == width


LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
LENGTHS = (3, 9, 15, 16, 17, 20, 9, 12, 18)  # of documents; frequencies change after 16
DEPENDENT: dict[str, Variant] = {
    "longrope": ("tiny-phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 16}),
    "dynamic": ("tiny-qwen2", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16}),
}


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What models whose RoPE depends on the length lose, under several --seq-len; one launch."""
    place = tmp_path_factory.mktemp("lengths")
    ids = {word: index for index, word in enumerate(WORDS[:60])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    lines = [" ".join(f"w{token}" for token in tokens_of(length - 1)) for length in LENGTHS]  # and eos
    (place / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    jobs = []
    for name, (config, changes) in DEPENDENT.items():
        save_decoder(place / name, config, **changes, **ENDS)
        tokenizer.save(str(place / name / "tokenizer.json"))
        packed = place / f"{name}-pp=2"
        pack(place / name, packed)
        text = ["--data", str(place / "text.jsonl"), "--seq-len"]
        jobs += [[str(packed), *text, *how] for how in (["20", "--no-packing"], ["41", "--no-packing"], ["32"])]
    (place / "jobs.json").write_text(json.dumps(jobs))
    launch(2, "runner/evaluation/reading_worker.py", place / "jobs.json", place / "found.jsonl")
    return place


def tokens_of(length: int) -> list[int]:
    return [1 + (7 * i + i * i + length) % 59 for i in range(length)]


@pytest.mark.slow  # `tests/fast/runner/models/test_lengths.py` has the logits
@pytest.mark.parametrize("name", DEPENDENT)
def test_loss_is_that_of_each_text_alone_where_frequencies_depend_on_the_length(name: str, lengths: Path) -> None:
    found = [json.loads(line) for line in (lengths / "found.jsonl").read_text().splitlines()]
    short, long, packed = found[:3] if name == "longrope" else found[3:6]
    texts = [[*tokens_of(length - 1), 61] for length in LENGTHS]
    joined = [token for text in texts for token in text]
    for (loss, num_tokens), windows in ((short, texts), (long, texts), (packed, windows_of(joined, 32))):
        total, count = loss_alone(lengths / name, windows)
        assert (loss, num_tokens) == (pytest.approx(total / count, rel=1e-6), count)


def windows_of(ids: list[int], seq_len: int) -> list[list[int]]:
    return [ids[begin : begin + seq_len + 1] for begin in range(0, len(ids) - 1, seq_len)]


def loss_alone(folder: Path, windows: list[list[int]]) -> tuple[float, int]:
    """Sum the losses of sequences without any padding, each by a model that has seen no other; and count them."""
    total = 0.0
    for window in windows:
        with torch.no_grad():
            logits = load(folder).eval()(torch.tensor([window[:-1]])).logits[0].float()
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum").item()
    return total, sum(len(window) - 1 for window in windows)


# Evaluations between steps: their losses, and that training is the same without them.


def evaluations_of(log_dir: Path) -> dict[int, float]:
    return {line["step"]: line["eval_loss"] for line in lines_of(log_dir) if "eval_loss" in line}


def test_evaluations_between_steps_are_those_after_them_and_change_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_model(source, num_hidden_layers=2, hidden_size=32, bos_token_id=BOS, eos_token_id=EOS)
    write_tokenizer(source, **read_config(source))
    pack(source, tmp_path / "packed", "pp=2")
    documents = [[(number + place) % 8 for place in range(1 + 5 * number % 17)] for number in range(30)]
    data = ("--data", write_documents(tmp_path / "text.jsonl", documents))
    held = ("--eval-data", write_documents(tmp_path / "held.jsonl", documents[:7]))
    flags = (*data, *held, "--seq-len", 16, "--global-batch", 4, "--lr", 1e-2)
    logs = {name: tmp_path / name for name in ("every", "two", "four", "five")}
    run_jobs(
        2,
        [
            job(tmp_path / "packed", logs["every"], *flags, "--steps", 5, "--eval-every", 2),
            job(tmp_path / "packed", logs["two"], *flags, "--steps", 2),
            job(tmp_path / "packed", logs["four"], *flags, "--steps", 4),
            job(tmp_path / "packed", logs["five"], *flags, "--steps", 5),
        ],
    )
    assert losses_of(logs["every"]) == losses_of(logs["five"])
    expected = {step: loss for name in ("two", "four", "five") for step, loss in evaluations_of(logs[name]).items()}
    assert evaluations_of(logs["every"]) == expected
    assert list(expected) == [2, 4, 5]


# `runner eval` of a model with MTP layers is of the model alone, as transformers computes it.


@pytest.mark.parametrize(
    "layout",
    [pytest.param("Ett|ttmL", marks=pytest.mark.slow), "Et|ttt|m|L"],  # the third stage borrows the norm
)
def test_loss_is_that_of_transformers(tmp_path: Path, layout: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({**config_of(1), "dtype": "float32"}))
    weights = {name: tensor.clone() for name, tensor in random_weights(1).items()}
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    pack(source, tmp_path / "packed", layout)
    loss = evaluate_rows(layout.count("|") + 1, tmp_path)
    model = DeepseekV3ForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    assert loss == pytest.approx(loss_of_rows(model), abs=1e-6)


def evaluate_rows(num_ranks: int, place: Path) -> float:
    """Return the loss of what is packed in a folder, over `ROWS`."""
    data = place / "rows.jsonl"
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ROWS.tolist()))
    words = ("--data", data, "--seq-len", 13, "--tokenized", "--no-self-check")
    loss, num_tokens = evaluate(num_ranks, place, place / "packed", *words)
    assert num_tokens == ROWS[:, 1:].numel()
    return loss


def loss_of_rows(model: Any) -> float:
    with torch.no_grad():
        return cross_entropy(model(ROWS).logits[:, :-1].flatten(0, 1), ROWS[:, 1:].flatten()).item()


def test_stages_of_rwkv_do_not_halve_hidden_states_again(tmp_path: Path) -> None:
    """transformers halves them in evaluation mode alone, which the epsilon of norms shows."""
    save_tiny(tmp_path / "source", "RwkvForCausalLM", num_hidden_layers=14)
    pack(tmp_path / "source", tmp_path / "packed", "pp=2")
    loss = evaluate_rows(2, tmp_path)
    model = RwkvForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    for is_training, tolerance in ((True, 1e-6), (False, 1e-4)):
        assert loss == pytest.approx(loss_of_rows(model.train(is_training)), rel=tolerance)
