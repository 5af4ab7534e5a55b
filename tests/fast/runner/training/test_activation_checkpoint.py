"""Recomputed layers: the gradients of transformers' whole model, whatever is changed in place, by one recomputation.

The catalogue's architectures are in test_generic_steps.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from manifests.errors import ModelError
from manifests.models.training import Recompute
from runner.pipeline.chunk import layers_of
from runner.training.activation_checkpoint import recompute_layers
from tests.fast.runner.models.decoders import SEQ_LEN, save_decoder
from tests.fast.runner.models.titans import (
    batch_of,
    chunks_of,
    forward,
    gradients_in,
    loss_of,
)
from tests.fast.runner.training.test_compute import peak_nbytes_of

NUM_MICROBATCHES = 3
PARTS: Sequence[Recompute] = ("full", "selective", 2)
EACH_OR_PARTS = ("full", "selective", pytest.param(2, marks=pytest.mark.slow))  # 2: as "full", of each second layer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_decoder(folder, "tiny-llama")
    return folder


def product_plus(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    result = hidden @ weight
    result += hidden  # the product's memory, but not its version counter
    return result.tanh()


def slice_times(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    result = hidden @ weight
    result.transpose(0, 1)[..., 1:5].mul_(hidden.transpose(0, 1)[..., :4])
    return result.tanh()


def list_plus(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    results = [hidden @ weight, hidden @ weight.T]
    torch._foreach_add_(results, 1.0)
    return results[0].tanh() * results[1].tanh()


def shares_of_topk(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    shares, chosen = (hidden @ weight).softmax(-1).topk(4)
    shares /= shares.sum(-1, keepdim=True)
    return torch.zeros_like(hidden).scatter(-1, chosen, shares.tanh())


def without_autograd(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    result = hidden @ weight
    result.data.mul_(0.5)
    return result.tanh()


@pytest.mark.parametrize("recompute", EACH_OR_PARTS)
@pytest.mark.parametrize("change", [product_plus, slice_times, list_plus, shares_of_topk, without_autograd])
def test_a_result_that_a_layer_changes_in_place_is_recomputed_as_it_was(
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], recompute: Recompute, llama: Path
) -> None:
    def run(layer: torch.nn.Module, before: Callable[..., torch.Tensor], hidden: torch.Tensor, **kwargs: Any) -> Any:
        weight = next(parameter for parameter in layer.parameters() if parameter.shape == (hidden.shape[-1],) * 2)
        return before(hidden + change(hidden, weight), **kwargs)

    assert_equal_to_plain(llama, recompute, run)


@pytest.mark.parametrize("recompute", PARTS)
def test_a_result_that_is_changed_after_its_layer_is_recomputed_as_it_was(recompute: Recompute, llama: Path) -> None:
    def forward(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = hidden @ weight
        return result, (result * 2).sin()

    gradients = []
    for part in ("none", recompute):
        (chunk,) = chunks_of(llama, 1)
        ((_, layer), *_) = layers_of(chunk)
        layer.forward = forward
        recompute_layers((chunk,), part)
        drawn = torch.Generator().manual_seed(0)
        inputs = [torch.randn(8, 2, 8, generator=drawn), torch.randn(8, 8, generator=drawn)]
        result, other = layer(*(tensor.requires_grad_() for tensor in inputs))
        result += 1
        torch.autograd.backward((result * other).sum())
        gradients.append([tensor.grad for tensor in inputs])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("recompute", PARTS)
def test_a_layer_that_changes_its_input_is_refused(
    recompute: Recompute, llama: Path, wording: Callable[[str], None]
) -> None:
    def run(layer: torch.nn.Module, before: Callable[..., torch.Tensor], hidden: torch.Tensor, **kwargs: Any) -> Any:
        hidden += 1
        return before(hidden, **kwargs)

    with pytest.raises(ModelError) as caught:
        assert_equal_to_plain(llama, recompute, run)
    assert (caught.value.where, caught.value.code) == ("--ac", "model.not-recomputable")
    if recompute == "full":
        wording(str(caught.value))


def wide(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight).topk(4).values.tanh().sum(-1, keepdim=True)


def narrow(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight).topk(2).values.tanh().sum(-1, keepdim=True)


def nothing(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros(())


def other_way_round(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (hidden.topk(4).values @ weight[:4]).tanh()


@pytest.mark.parametrize(
    ("again", "recompute"),
    [(narrow, "full"), (nothing, "full"), (other_way_round, "selective"), (nothing, "selective")],
)
def test_a_layer_that_computes_something_else_again_is_refused(
    again: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], recompute: Recompute, llama: Path
) -> None:
    (chunk,) = chunks_of(llama, 1)
    ((_, layer), *_) = layers_of(chunk)
    functions = iter((wide, again))
    layer.forward = lambda hidden, weight: next(functions)(hidden, weight)
    recompute_layers((chunk,), recompute)
    hidden, weight = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    with pytest.raises(ModelError) as caught:
        torch.autograd.backward(layer(hidden, weight).sum())
    assert (caught.value.where, caught.value.code) == ("--ac", "model.not-recomputable")


def assert_equal_to_plain(folder: Path, recompute: Recompute, run: Callable[..., Any]) -> None:
    """Compare the gradients of layers that `run` runs, recomputed and not."""
    found = []
    for part in ("none", recompute):
        chunks = chunks_of(folder, 2)
        for _, layer in (layer for chunk in chunks for layer in layers_of(chunk)):
            layer.forward = partial(run, layer, layer.forward)
        recompute_layers(chunks, part)
        torch.autograd.backward(loss_of(forward(chunks, batch_of(0).tokens), batch_of(0)))
        found.append(gradients_in(chunks, tied=False))
    assert found[0].keys() == found[1].keys()
    assert [fqn for fqn, gradient in found[0].items() if not torch.equal(gradient, found[1][fqn])] == []


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("recompute", PARTS)
def test_layers_run_twice_for_a_microbatch_with_dropout_too(
    recompute: Recompute, is_split: bool, tmp_path: Path
) -> None:
    save_decoder(tmp_path, "tiny-gpt2", resid_pdrop=0.1, attn_pdrop=0.1)
    expected, _ = middle_stage(tmp_path, "none", is_split=False)
    found, counts = middle_stage(tmp_path, recompute, is_split=is_split)
    assert [fqn for fqn, gradient in found.items() if not torch.equal(gradient, expected[fqn])] == []
    every = recompute if isinstance(recompute, int) else 1
    assert counts == {number: NUM_MICROBATCHES * (1 + (number % every == 0)) for number in (1, 2)}


def test_a_backward_in_two_parts_frees_what_it_recomputed(tmp_path: Path) -> None:
    save_decoder(tmp_path, "tiny-llama", num_hidden_layers=8)
    parts: Sequence[Recompute] = ("none", "full")
    peaks = [peak_nbytes_of(partial(middle_stage, tmp_path, part, is_split=True)) for part in parts]
    assert peaks[1] < 0.7 * peaks[0]


def middle_stage(folder: Path, recompute: Recompute, *, is_split: bool) -> tuple[dict[str, torch.Tensor], Counter[int]]:
    """Return the gradients of a stage of layers, and how often each of them ran."""
    chunk = chunks_of(folder, 3)[1]
    counts = Counter[int]()
    for number, layer in layers_of(chunk):
        layer.forward = partial(_counted, layer.forward, counts, number)
    recompute_layers((chunk,), recompute)
    chunk.train()
    torch.manual_seed(0)
    (width,) = {parameter.shape[0] for name, parameter in chunk.named_parameters() if "norm" in name or "ln_1" in name}
    arrived = [torch.randn(1, SEQ_LEN, width, requires_grad=True) for _ in range(NUM_MICROBATCHES)]
    left = [chunk(hidden).clone() for hidden in arrived]
    for hidden, output in zip(arrived, left, strict=True):
        towards = output.detach().sin()
        if is_split:
            _, groups = stage_backward_input([output], [towards], [hidden], chunk.parameters())
            stage_backward_weight(chunk.parameters(), groups)
        else:
            torch.autograd.backward(output, towards)
    return gradients_in((chunk,), tied=False), counts


def _counted(before: Callable[..., Any], counts: Counter[int], number: int, *args: Any, **kwargs: Any) -> Any:
    counts[number] += 1
    return before(*args, **kwargs)
