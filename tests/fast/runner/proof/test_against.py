"""`runner prove --against`: a dump of a step that is right, one with each of several mistakes, and no dump."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Lfm2Config, LlamaConfig, Qwen3MoeConfig, RwkvConfig
from transformers.core_model_loading import revert_weight_conversion

from manifests.errors import UserError
from runner.commands import cli
from runner.proof.against import Rows, run_rows

SIZES: Mapping[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1,
}  # fmt: skip
LLAMA = LlamaConfig(**SIZES, tie_word_embeddings=True)
CONVOLUTION = Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
MOE = Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
RWKV = RwkvConfig(vocab_size=SIZES["vocab_size"], hidden_size=32, num_hidden_layers=8, context_length=64)
HEAD, EMBEDDING, DOWN = "lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"
ROWS, SEQ_LEN = 4, 24
LENGTHS = (9, 1, 14)  # of the documents of every row

Tensors = dict[str, torch.Tensor]


class Step:
    """A training step of transformers' model, as another trainer computes it."""

    def __init__(self, folder: Path, config: Any = LLAMA, dtype: str = "float32") -> None:
        torch.manual_seed(0)
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.model.save_pretrained(folder)
        self.model.to(getattr(torch, dtype)).eval()
        tokens = torch.randint(SIZES["vocab_size"], (ROWS, SEQ_LEN + 1))
        self.rows: Tensors = {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}
        self.rows["labels"][0, :15] = -100
        self.folder, self.dtype, self.losses = folder, dtype, [0.0]

    def losses_of(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return the summed loss of each row."""
        labels = self.rows["labels"][rows]
        logits = self.model(input_ids=self.rows["input_ids"][rows], use_cache=False).logits.float()
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels).sum(1)

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)
        self.losses.append(loss.item())

    def run(self) -> None:
        self.backward(self.losses_of().sum() / self.num_tokens)

    @property
    def num_tokens(self) -> int:
        return int((self.rows["labels"] >= 0).sum())

    def gradients(self) -> Tensors:
        gradients = {name: weight.grad for name, weight in self.model.named_parameters() if weight.grad is not None}
        return {name: tensor.clone() for name, tensor in revert_weight_conversion(self.model, gradients).items()}

    def write(self, gradients: Tensors | None = None, **numbers: object) -> None:
        gradients = self.gradients() if gradients is None else gradients
        norm = torch.stack([gradient.double().norm() for gradient in self.gradients().values()]).norm()
        step = {"loss": sum(self.losses), "grad_norm": norm.item(), "dtype": self.dtype, "reduction": "mean"}
        (self.folder / "step.json").write_text(json.dumps(step | numbers))
        save_file({name: rows.clone() for name, rows in self.rows.items()}, self.folder / "tokens.safetensors")
        for number, names in enumerate((sorted(gradients)[::2], sorted(gradients)[1::2])):
            save_file(
                {name: gradients[name].clone() for name in names}, self.folder / f"gradients-{number}.safetensors"
            )


def prove(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["prove", *map(str, arguments)])


def prove_json(folder: Path) -> tuple[int, dict[str, Any]]:
    done = prove("--against", folder, "--json")
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_step_is_equal(dtype: str, tmp_path: Path) -> None:
    step = Step(tmp_path, dtype=dtype)
    step.run()
    step.write()
    code, compared = prove_json(tmp_path)
    assert (code, compared["equal"], compared["differences"]) == (0, True, [])
    assert compared["num_tensors"] == 20
    assert prove(tmp_path, "--against", tmp_path).stdout.startswith("equal to one process: loss ")
    step.write(step.gradients() | {DOWN: step.gradients()[DOWN] * 1.2})
    code, compared = prove_json(tmp_path)
    assert (code, [wrong["name"] for wrong in compared["differences"]]) == (4, [DOWN])


def test_tolerance_limits_a_dump_in_bfloat16_too(tmp_path: Path) -> None:
    step = Step(tmp_path, dtype="bfloat16")
    step.run()
    step.write()
    limit = 1e-6
    done = prove("--against", tmp_path, "--tolerance", limit, "--json")
    differences = json.loads(done.stdout)["differences"]
    assert (done.exit_code, {wrong["allowed"] for wrong in differences}) == (4, {limit})
    assert prove("--against", tmp_path, "--tolerance", 1).exit_code == 0


class Bigrams(nn.Module):
    """Logits of the next token by the token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SIZES["vocab_size"], SIZES["vocab_size"])

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table(input_ids))


def test_weights_are_freed_once_only_their_gradients_are_used() -> None:
    tokens, model = torch.arange(8).view(1, -1), Bigrams()
    weight = weakref.ref(model.table.weight)
    gradients = run_rows(model, Rows(tokens=tokens, labels=tokens + 1), torch.device("cpu"))[1]
    (gradient,) = gradients.values()
    del model, gradients
    assert gradient.any()
    assert weight() is None


@pytest.mark.parametrize("in_files", [True, False])
def test_experts_are_compared_by_either_name(in_files: bool, tmp_path: Path) -> None:
    step = Step(tmp_path, MOE)
    step.run()
    gradients = step.gradients() if in_files else {name: weight.grad for name, weight in step.model.named_parameters()}
    step.write(gradients)
    code, compared = prove_json(tmp_path)
    assert (code, compared["differences"], compared["num_tensors"]) == (0, [], len(gradients))
    name = min(name for name in gradients if ".1.mlp.experts." in name)
    gradients[name] = gradients[name].roll(1, 0)
    step.write(gradients)
    assert [wrong["name"] for wrong in prove_json(tmp_path)[1]["differences"]] == [name]


def test_right_step_of_a_model_whose_evaluation_divides_weights_is_equal(tmp_path: Path) -> None:
    step = Step(tmp_path, RWKV)
    step.model.train()
    step.run()
    step.write()
    code, compared = prove_json(tmp_path)
    assert (code, compared["differences"]) == (0, [])


def halve(step: Step) -> None:
    step.backward(step.losses_of().sum() / step.num_tokens / 2)
    step.losses = [step.losses[1] * 2]  # the loss looks right


def keep_last_microbatch(step: Step) -> None:
    for row in range(ROWS):
        step.model.zero_grad()
        step.backward(step.losses_of(slice(row, row + 1)).sum() / step.num_tokens)


def average_means_of_ranks(step: Step) -> None:
    for row in range(ROWS):
        valid = (step.rows["labels"][row] >= 0).sum()
        step.backward(step.losses_of(slice(row, row + 1)).sum() / valid / ROWS)


def sum_tied_twice(step: Step) -> None:
    step.run()
    step.model.model.embed_tokens.weight.grad *= 2


def read_labels_shifted_again(step: Step) -> None:
    right = step.rows["labels"]
    step.rows["labels"] = right.roll(-1, 1)
    step.run()
    step.rows["labels"] = right


@pytest.mark.parametrize(
    ("compute", "wrong", "factor"),
    [
        (halve, {"grad_norm"}, 0.5),
        (keep_last_microbatch, {"grad_norm"}, None),
        (average_means_of_ranks, {"loss", "grad_norm"}, None),
        (read_labels_shifted_again, {"loss", "grad_norm"}, None),
    ],
)
def test_mistake_in_all_gradients_is_found(
    compute: Callable[[Step], None], wrong: set[str], factor: float | None, tmp_path: Path
) -> None:
    step = Step(tmp_path)
    compute(step)
    step.write()
    code, compared = prove_json(tmp_path)
    names = [difference["name"] for difference in compared["differences"]]
    assert (code, set(names) - step.gradients().keys()) == (4, wrong)
    gradients = [name for name in names if name not in wrong]
    assert (len(gradients), gradients[0], gradients[-1]) == (20, "model.norm.weight", EMBEDDING)  # from the loss back
    assert compared["factor"] == (None if factor is None else pytest.approx(factor, rel=1e-4))


def test_mistake_in_one_number_is_named(tmp_path: Path) -> None:
    step = Step(tmp_path)
    sum_tied_twice(step)
    step.write()
    (norm, embedding) = prove_json(tmp_path)[1]["differences"]
    assert (norm["name"], embedding["name"]) == ("grad_norm", EMBEDDING)
    assert (embedding["difference"], embedding["factor"]) == (pytest.approx(1, rel=1e-4), pytest.approx(2, rel=1e-4))

    step = Step(tmp_path)
    step.run()
    right = step.gradients()
    nothing, infinite = dict(right), right[DOWN].clone()
    del nothing[DOWN]
    infinite[0, 0] = torch.inf
    for gradients, name in (
        (nothing, DOWN),
        (right | {DOWN: infinite}, DOWN),
        (right | {DOWN: right[DOWN].T.contiguous()}, DOWN),
        (right | {"model.layers.2.mlp.down_proj.weight": right[DOWN]}, "model.layers.2.mlp.down_proj.weight"),
        (right | {HEAD: right[EMBEDDING] / 2}, HEAD),  # of a tied weight, any name will do, with the whole gradient
    ):
        step.write(gradients)
        code, compared = prove_json(tmp_path)
        assert (code, [wrong["name"] for wrong in compared["differences"]]) == (4, [name])
        assert compared["factor"] is None
    step.write({name: tensor for name, tensor in right.items() if name != EMBEDDING} | {HEAD: right[EMBEDDING]})
    assert prove_json(tmp_path)[0] == 0
    step.write(grad_norm=1e-3)
    done = prove("--against", tmp_path)
    assert (done.exit_code, done.stdout.partition(":")[0]) == (4, "grad_norm")


@pytest.mark.parametrize("config", [LLAMA, CONVOLUTION], ids=["attention", "convolution"])
def test_documents_are_kept_apart_and_positions_are_only_positions(config: Any, tmp_path: Path) -> None:
    step = Step(tmp_path, config)
    first = 0
    for length in LENGTHS:
        part = slice(first, first + length)
        logits = step.model(input_ids=step.rows["input_ids"][:, part], use_cache=False).logits
        labels = step.rows["labels"][:, part].flatten()
        step.backward(cross_entropy(logits.flatten(0, 1), labels, reduction="sum") / step.num_tokens)
        first += length
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).repeat(ROWS, 1)
    documents = torch.repeat_interleave(torch.tensor([7, 5, 7]), torch.tensor(LENGTHS)).repeat(ROWS, 1)
    plain = step.rows
    for more, code in (
        ({"document_ids": documents}, 0),
        ({"document_ids": documents, "position_ids": positions}, 0),
        ({"position_ids": positions}, 4),
        ({}, 4),
    ):
        step.rows = plain | more
        step.write()
        assert prove("--against", tmp_path).exit_code == code


def refusal(*arguments: object) -> tuple[int, str]:
    error = prove(*arguments).exception
    assert isinstance(error, UserError), error
    return error.exit_code, error.code


def test_what_is_no_dump_is_refused(tmp_path: Path) -> None:
    step = Step(tmp_path)
    step.run()
    plain, tokens = step.rows, step.rows["input_ids"]
    bad: tuple[Tensors, ...] = (
        {"input_ids": tokens},
        plain | {"mask": tokens},
        plain | {"labels": plain["labels"].int()},
        plain | {"labels": plain["labels"][:, 1:].clone()},
        plain | {"labels": tokens.clone()},
        plain | {"labels": torch.full_like(tokens, -100)},
        plain | {"labels": tokens.flip(1) - 200},
        plain | {"input_ids": tokens + SIZES["vocab_size"]},
    )
    for rows in bad:
        step.rows = rows
        step.write()
        assert refusal("--against", tmp_path) == (3, "source.bad-dump")
    step.rows = plain
    for numbers in ({"loss": "2.5"}, {"dtype": "float16"}, {"reduction": "sum"}, {"lr": 1.0}, {"loss": True}):
        step.write(**numbers)
        assert refusal("--against", tmp_path) == (3, "source.bad-dump")
    step.write(step.gradients() | {DOWN: tokens})
    assert refusal("--against", tmp_path) == (3, "source.bad-dump")
    step.write()
    save_file({DOWN: step.gradients()[DOWN]}, tmp_path / "gradients-again.safetensors")
    assert refusal("--against", tmp_path) == (3, "source.bad-dump")
    for file in tmp_path.glob("gradients*"):
        file.unlink()
    assert refusal("--against", tmp_path) == (3, "source.bad-dump")


def test_weights_that_are_not_of_the_config_are_refused(tmp_path: Path) -> None:
    step = Step(tmp_path / "model")
    step.run()
    step.write()
    weights = {name: tensor for name, tensor in step.model.state_dict().items() if name != HEAD}
    file = tmp_path / "model" / "model.safetensors"
    for other in (
        {name: tensor for name, tensor in weights.items() if name != DOWN},  # transformers would draw it at random
        weights | {"model.layers.2.mlp.down_proj.weight": weights[DOWN].clone()},
        weights | {DOWN: weights[DOWN].T.contiguous()},
    ):
        save_file(other, file, {"format": "pt"})
        assert refusal("--against", tmp_path / "model") == (3, "model.no-reference")
    file.unlink()
    assert refusal("--against", tmp_path / "model") == (3, "model.no-reference")
    assert refusal(tmp_path / "nowhere", "--against", tmp_path / "model")[0] == 3
