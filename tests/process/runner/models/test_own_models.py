"""Models that only `--model` describes, trained by families of another package: `examples/own_model.py`, and a model
class of transformers under a name that nothing knows. Losses are those of the whole model in this process."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy

from runner.config.flags import parse_training
from runner.data.sequences import read_batches
from tests.builders import run
from tests.process.local_jobs import ROOT, forked_runner
from tests.process.runner.training_jobs import job, losses_of, run_jobs

EXAMPLE = ROOT / "examples" / "own_model.py"
STEPS, LR, EPS = 3, 1e-3, 1e-3  # a smaller epsilon makes steps of gradients that are rounding
FLAGS = (
    "--data", "synthetic", "--seq-len", "16", "--global-batch", "4", "--steps", str(STEPS), "--lr", str(LR),
    "--eps", str(EPS), "--weight-decay", "0", "--max-norm", "0",
)  # fmt: skip
RENAMED = """\
from transformers import Olmo3Config, Olmo3ForCausalLM

import runner


class NewConfig(Olmo3Config):
    model_type = "new_model"


class NewForCausalLM(Olmo3ForCausalLM):
    config_class = NewConfig


def family(request):
    return runner.generic_family(NewForCausalLM, request)
"""
NEW_CONFIG = {
    "architectures": ["NewForCausalLM"], "model_type": "new_model", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "sliding_window": 8, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
NEW_MODEL = """\
inputs = ["model.embed_tokens"]
layers = "model.layers"
outputs = ["model.norm", "lm_head"]
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for PYTHONPATH with both packages as pip would install them."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "own_model.py").write_text(EXAMPLE.read_text())
    (folder / "new_model.py").write_text(RENAMED)
    for module, architecture in (("own_model", "TinyDecoder"), ("new_model", "NewForCausalLM")):
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[runner.families]\n{architecture} = {module}:family\n")
    return folder


def test_architecture_that_nothing_knows_trains_through_an_entry_point(packages: Path, tmp_path: Path) -> None:
    new = imported(packages / "new_model.py")
    fields = {name: value for name, value in NEW_CONFIG.items() if name not in ("architectures", "model_type")}

    torch.manual_seed(0)
    model: nn.Module = new.NewForCausalLM(new.NewConfig(**fields)).eval()
    pack(tmp_path, NEW_CONFIG, NEW_MODEL, model)
    path = os.pathsep.join((str(packages), str(ROOT)))
    launched = forked_runner("launch", tmp_path / "pp2", "--dry-run", "--", *FLAGS, PYTHONPATH=path)
    assert launched.returncode == 0, launched.stderr
    run_jobs(2, [job(tmp_path / "pp2", tmp_path / "log", *FLAGS, *saving(tmp_path), path=packages)])
    check_losses(tmp_path, NEW_CONFIG, model, lambda model, tokens: model(tokens, use_cache=False).logits)


@pytest.mark.parametrize("copies", ["all", "one"])
def test_ties_of_layers_are_kept_whatever_the_config_says_of_the_head(
    packages: Path, tmp_path: Path, copies: str
) -> None:
    """Of two layers on one stage, and of two on two; each tensor is that of one process after three steps."""
    example = imported(packages / "own_model.py")
    sizes = {"depth": 6, "dim": 32, "heads": 4, "vocab_size": 64}
    config = {"architectures": ["TinyDecoder"], **sizes, "tie_word_embeddings": False}
    ties = [["layers.0.up.weight", "layers.2.up.weight"], ["layers.1.down.weight", "layers.4.down.weight"]]
    described = EXAMPLE.read_text().partition("model.toml:\n\n")[2].partition("\n\n")[0] + f"\n    ties = {ties}\n"
    modules = ("embed", *(f"layers.{number}" for number in range(6)), "norm", "head")

    torch.manual_seed(0)
    model = example.Decoder(**sizes, modules=modules)
    for owner, replica in ties:
        model.get_submodule(replica.removesuffix(".weight")).weight = model.get_parameter(owner)
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if copies == "one":
        stored = {name: tensor for name, tensor in stored.items() if name not in dict(ties).values()}
    pack(tmp_path, config, described, model, stored)
    run_jobs(2, [job(tmp_path / "pp2", tmp_path / "log", *FLAGS, *saving(tmp_path), path=packages)])
    train(model, sizes["vocab_size"], tmp_path, lambda model, tokens: model(tokens))
    run("export", tmp_path / "trained", "--to", "hf", "--out", tmp_path / "exported", "--quiet")
    trained = load_file(tmp_path / "exported" / "model.safetensors")
    assert trained.keys() == stored.keys()
    for name, tensor in trained.items():
        expected = model.get_parameter(name).detach()
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6, msg=name)


def pack(
    place: Path,
    config: dict[str, Any],
    description: str,
    model: nn.Module,
    stored: dict[str, torch.Tensor] | None = None,
) -> None:
    source = place / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    tensors = model.state_dict() if stored is None else stored
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, source / "model.safetensors")
    (place / "model.toml").write_text(description)
    run("pack", source, "--layout", "pp=2", "--model", place / "model.toml", "--out", place / "pp2")


def saving(place: Path) -> tuple[str | Path, ...]:
    return "--save", place / "trained", "--no-packing"


def check_losses(
    place: Path, config: dict[str, Any], model: nn.Module, logits_of: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> None:
    """Train `model` as the ranks have, and compare its losses, and its logits with those of what they saved."""
    expected = train(model, config["vocab_size"], place, logits_of)
    assert losses_of(place / "log") == pytest.approx(expected, rel=1e-5)
    assert expected[0] != expected[-1]
    exported = place / "exported"
    run("export", place / "trained", "--to", "hf", "--out", exported, "--quiet")
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        expected_logits = logits_of(model, tokens)
        model.load_state_dict(load_file(exported / "model.safetensors"))
        torch.testing.assert_close(logits_of(model, tokens), expected_logits, rtol=1e-4, atol=1e-5)


def train(
    model: nn.Module, vocab_size: int, place: Path, logits_of: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> list[float]:
    """Train the whole model in place on the batches of FLAGS, and return its losses."""
    options = parse_training(list(FLAGS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0)
    batches: Any = read_batches(options.data, options.batch, folder=place, vocab_size=vocab_size)
    losses = []
    for batch in islice(batches, STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(logits_of(model, batch.tokens).flatten(0, 1), batch.labels.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
