"""Every algorithm on one rank takes the steps of torch bit by bit, whatever the stages and what modules fuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from manifests.errors import CheckpointError, UsageError
from manifests.models import model_shape
from manifests.optimizer_state import GroupNumbers, kinds_of
from manifests.placement import Placement
from manifests.schema import StateKind
from runner.checkpoint.state import held_state
from runner.config.flags import parse_training
from runner.config.optimizers import optimizer_of
from runner.config.schema import OptimOptions
from runner.models import family_for
from runner.pipeline.chunk import StageChunk, build_chunks, hf_pieces, materialize
from runner.tensors.local_shard import Piece
from runner.training import whole_matrix
from runner.training.algorithms import algorithms_of, declare_kinds
from runner.training.optimizer import Optimizer
from runner.training.ties import build_ties, lead_parameters
from runner.training.whole_matrix import WholeMatrices, assign_owners, cost_of
from tests.fast.runner.tiny import CPU, EMBEDDING, HEAD, head_tie, split_evenly
from tests.toy_optimizers import Relative

Named = Mapping[str, torch.Tensor]
LR = 0.01
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
MODELS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**TINY, intermediate_size=48, architectures=["LlamaForCausalLM"]),
    "tied": lambda: transformers.LlamaConfig(
        **TINY, intermediate_size=48, tie_word_embeddings=True, architectures=["LlamaForCausalLM"]
    ),
    "moe": lambda: transformers.Qwen3MoeConfig(
        **TINY, intermediate_size=48, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8,
        architectures=["Qwen3MoeForCausalLM"],
    ),
    "fused": lambda: transformers.Phi3Config(
        **TINY, intermediate_size=48, pad_token_id=0, architectures=["Phi3ForCausalLM"]
    ),
}  # fmt: skip
SETS: Mapping[str, tuple[str, ...]] = {
    "muon": ("--optimizer", "muon"),
    "adafactor": ("--optimizer", "adafactor"),
    "sgd": ("--optimizer", "sgd", "--weight-decay", "0.01"),
    "adam": ("--optimizer", "adam"),
}


@cache
def config_of(model: str) -> dict[str, Any]:
    config: dict[str, Any] = MODELS[model]().to_dict()
    return config


def optim_of(model: str, *flags: str) -> OptimOptions:
    shape = model_shape(config_of(model), "config.json")
    optim = parse_training(["--data", "synthetic", "--lr", str(LR), *flags]).optim
    return replace(optim, plan=declare_kinds(optimizer_of(optim, shape), shape))


def chunks_of(model: str, num_stages: int) -> tuple[StageChunk, ...]:
    family = family_for(config_of(model), max_seq_len=8)
    chunks = build_chunks(family, split_evenly(family.modules, num_stages), range(num_stages))
    for chunk in chunks:
        materialize(chunk, device=CPU, dtype=torch.float32)
    for piece in (piece for chunk in chunks for piece in hf_pieces(chunk)):
        piece.memory.copy_(drawn(piece.fqn, piece.shape, 0))
    return chunks


def drawn(fqn: str, shape: Sequence[int], step: int) -> torch.Tensor:
    name = EMBEDDING if fqn == HEAD else fqn
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + sum(map(ord, name))))


def gradients(chunks: Iterable[StageChunk], step: int) -> None:
    for chunk in chunks:
        for parameter in chunk.body.parameters():
            parameter.grad = torch.empty_like(parameter)
        for piece in hf_pieces(chunk, lambda parameter: parameter.grad):
            piece.memory.copy_(drawn(piece.fqn, piece.shape, step))


def expected_of(names: Mapping[str, Sequence[int]], flags: str) -> dict[str, torch.Tensor]:
    """Train tensors as files have them, each expert and projection by itself, with torch's own classes."""
    weights = {fqn: torch.nn.Parameter(drawn(fqn, shape, 0)) for fqn, shape in names.items()}
    hidden = [weight for fqn, weight in weights.items() if "layers" in fqn and weight.dim() == 2]
    others = [weight for fqn, weight in weights.items() if "layers" not in fqn or weight.dim() == 1]
    adamw = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    every: list[torch.nn.Parameter] = [*weights.values()]
    optimizers = {
        "muon": lambda: [
            torch.optim.Muon(hidden, lr=LR, weight_decay=0.1, momentum=0.95), torch.optim.AdamW(others, **adamw)
        ],
        "adafactor": lambda: [torch.optim.Adafactor(every, lr=LR, weight_decay=0.1)],
        "sgd": lambda: [torch.optim.SGD(every, lr=LR, weight_decay=0.01, momentum=0.9)],
        "adam": lambda: [torch.optim.Adam(every, **adamw)],
    }[flags]()  # fmt: skip
    for step in range(1, 4):
        for fqn, weight in weights.items():
            weight.grad = drawn(fqn, weight.shape, step)
        for optimizer in optimizers:
            optimizer.step()
    return {fqn: weight.detach() for fqn, weight in weights.items()}


@pytest.mark.parametrize("flags", SETS)
@pytest.mark.parametrize(("model", "num_stages"), [("llama", 1), ("llama", 4), ("moe", 2), ("fused", 1)])
def test_steps_are_bitwise_those_of_torch(model: str, num_stages: int, flags: str) -> None:
    chunks = chunks_of(model, num_stages)
    optimizer = Optimizer(lead_parameters(chunks, ()), optim_of(model, *SETS[flags]), chunks)
    for step in range(1, 4):
        gradients(chunks, step)
        assert optimizer.step(step) == LR
    pieces = [piece for chunk in chunks for piece in hf_pieces(chunk)]
    expected = expected_of({piece.fqn: piece.shape for piece in pieces}, flags)
    assert {piece.fqn for piece in pieces} == expected.keys()
    assert [piece.fqn for piece in pieces if not torch.equal(piece.memory, expected[piece.fqn])] == []


@pytest.mark.parametrize("flags", [*SETS, "muon and ema"])
def test_state_is_held_by_name_and_fills_another_set_of_stages(flags: str) -> None:
    words = ("--optimizer", "muon", "--ema", "0.9") if flags == "muon and ema" else SETS[flags]
    first, second = chunks_of("moe", 1), chunks_of("moe", 2)
    one, other = (Optimizer(lead_parameters(chunks, ()), optim_of("moe", *words), chunks) for chunks in (first, second))
    for step in (1, 2):
        gradients(first, step)
        one.step(step)
    held = held_state(first, (), (), one)[0]
    assert list(held) == ["weights", *(kind.name for kind in kinds_of(one.plan))]
    by_name = {kind: {piece.fqn: piece.memory for piece in pieces} for kind, pieces in held.items()}
    for piece in (piece for chunk in second for piece in hf_pieces(chunk)):
        piece.memory.copy_(by_name["weights"][piece.fqn])
    for kind in kinds_of(other.plan):
        pieces = [piece for chunk in second for piece in other.state_pieces(chunk, kind)]
        assert {piece.fqn for piece in pieces} == by_name[kind.name].keys()
        for piece in pieces:
            piece.memory.copy_(by_name[kind.name][piece.fqn])
    other.resume(2)
    for chunks, optimizer in ((first, one), (second, other)):
        gradients(chunks, 3)
        optimizer.step(3)
    weights = {piece.fqn: piece.memory for chunk in first for piece in hf_pieces(chunk)}
    for piece in (piece for chunk in second for piece in hf_pieces(chunk)):
        assert torch.equal(piece.memory, weights[piece.fqn]), piece.fqn


@pytest.mark.parametrize("flags", ["adam", "sgd"])
def test_parameters_without_gradients_count_their_own_steps_from_one_set_of_stages_to_another(flags: str) -> None:
    """As in torch, whose class steps the same weights; a fused parameter counts for all that it is made of."""
    whole, expected = (chunks_of("fused", 1) for _ in range(2))
    first = Optimizer(lead_parameters(whole, ()), optim_of("fused", *SETS[flags]), whole)
    weights_of_torch = list(expected[0].body.parameters())
    of_torch: torch.optim.Optimizer = torch.optim.Adam(weights_of_torch, lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    if flags == "sgd":
        of_torch = torch.optim.SGD(weights_of_torch, lr=LR, weight_decay=0.01, momentum=0.9)
    one, chunks = first, whole
    for step in range(1, 6):
        if step == 4:  # resume on two stages
            chunks = chunks_of("fused", 2)
            one = resumed_on(chunks, first, whole, optim_of("fused", *SETS[flags]), step - 1)
        for stages in (chunks, expected):
            gradients(stages, step)
            for chunk in stages:
                for name, parameter in chunk.body.named_parameters():
                    if "qkv_proj" in name and step in (1, 3, 5):
                        parameter.grad = None
        one.step(step)
        of_torch.step()
    weights = {piece.fqn: piece.memory for piece in hf_pieces(expected[0])}
    pieces = [piece for chunk in chunks for piece in hf_pieces(chunk)]
    assert [piece.fqn for piece in pieces if not torch.equal(piece.memory, weights[piece.fqn])] == []
    counts = {fqn: count for chunk in chunks for fqn, count in one.differing_steps(chunk, 5).items()}
    counted = {fqn: 2 for fqn in weights if "qkv_proj" in fqn}
    assert counts == ({} if flags == "sgd" else counted), "SGD counts no steps"


def resumed_on(
    chunks: Sequence[StageChunk], one: Optimizer, before: Sequence[StageChunk], optim: OptimOptions, num_steps: int
) -> Optimizer:
    held = held_state(before, (), (), one)[0]
    by_name = {kind: {piece.fqn: piece.memory for piece in pieces} for kind, pieces in held.items()}
    other = Optimizer(lead_parameters(chunks, ()), optim, chunks)
    for chunk in chunks:
        for piece in hf_pieces(chunk):
            piece.memory.copy_(by_name["weights"][piece.fqn])
        for kind in kinds_of(other.plan):
            for piece in other.state_pieces(chunk, kind):
                piece.memory.copy_(by_name[kind.name][piece.fqn])
    other.resume(num_steps, one.differing_steps(before[0], num_steps))
    return other


def test_step_counts_are_of_all_tensors_of_a_parameter_or_refused() -> None:
    experts = [f"model.layers.0.mlp.experts.{number}.down_proj.weight" for number in range(4)]
    (chunk,) = chunks = chunks_of("moe", 1)
    optimizer = Optimizer(lead_parameters(chunks, ()), optim_of("moe", *SETS["adam"]), chunks)
    optimizer.resume(3, dict.fromkeys(experts, 1))
    assert optimizer.differing_steps(chunk, 3) == dict.fromkeys(experts, 1)
    for expert in experts:  # the first, which the parameter is named after, and others
        with pytest.raises(CheckpointError) as error:
            optimizer.resume(3, {expert: 1})
        assert (error.value.code, experts[0] in str(error.value.where)) == ("resume.other-optimizer", True)


def test_whole_tensors_resume_each_with_its_step_count() -> None:
    """As in torch, whose Adafactor steps each expert by itself."""
    counts = {"model.layers.0.mlp.experts.2.down_proj.weight": 1, "model.layers.1.mlp.experts.0.up_proj.weight": 7}
    (chunk,) = chunks = chunks_of("moe", 1)
    optimizer = Optimizer(lead_parameters(chunks, ()), optim_of("moe", *SETS["adafactor"]), chunks)
    optimizer.resume(3, counts)
    assert optimizer.differing_steps(chunk, 3) == counts
    weights = {piece.fqn: torch.nn.Parameter(piece.memory.clone()) for piece in hf_pieces(chunk)}
    expected = torch.optim.Adafactor([*weights.values()], lr=LR, weight_decay=0.1)
    gradients(chunks, 3)
    for fqn, weight in weights.items():
        rows = {"row_var": weight.new_zeros(len(weight), 1), "col_var": weight.new_zeros(1, weight.shape[-1])}
        variance = rows if weight.dim() > 1 else {"variance": torch.zeros_like(weight)}
        expected.state[weight] |= {"step": torch.tensor(float(counts.get(fqn, 3))), **variance}
        weight.grad = drawn(fqn, weight.shape, 3)
    expected.step()
    optimizer.step(3)
    assert [piece.fqn for piece in hf_pieces(chunk) if not torch.equal(piece.memory, weights[piece.fqn])] == []
    assert optimizer.differing_steps(chunk, 4) == {fqn: count + 1 for fqn, count in counts.items()}


def test_parts_of_one_parameter_in_two_groups_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "groups.toml"
    file.write_text('[[group]]\nalgorithm = "muon"\npatterns = ["*.experts.0.*"]\n[[group]]\nalgorithm = "adamw"')
    chunks = chunks_of("moe", 1)
    with pytest.raises(UsageError) as error:
        Optimizer(lead_parameters(chunks, ()), optim_of("moe", "--optimizer", str(file)), chunks)
    assert error.value.code == "options.optimizer-pattern"
    assert "experts.1." in str(error.value.where)


def test_tied_weights_are_one_parameter_with_one_state() -> None:
    chunks = chunks_of("tied", 2)
    groups = [head_tie([chunk.module_names for chunk in chunks])]
    ties = build_ties(groups, chunks, Placement(num_stages=2, num_ranks=1), timedelta(seconds=1))
    names = [[member.fqn for member in group.members] for group in groups]
    optimizer = Optimizer(lead_parameters(chunks, ties), optim_of("tied", *SETS["adafactor"]), chunks, ties=names)
    gradients(chunks, 1)
    optimizer.step(1)
    held = held_state(chunks, groups, ties, optimizer)
    rows = [{piece.fqn: piece.memory for piece in held[stage]["row_var"]} for stage in (0, 1)]
    assert torch.equal(rows[0][EMBEDDING], rows[1][HEAD])
    assert bool((rows[0][EMBEDDING] != 0).all())


def test_average_follows_the_weights_and_a_group_may_be_left_out_of_clipping(tmp_path: Path) -> None:
    file = tmp_path / "groups.toml"
    file.write_text(
        '[[group]]\nalgorithm = "sgd"\npatterns = ["*norm*"]\nclip = false\nrate_factor = 2\n'
        '[[group]]\nalgorithm = "sgd"'
    )
    optim = optim_of("llama", "--optimizer", str(file), "--ema", "0.75", "--weight-decay", "0")
    chunks = chunks_of("llama", 1)
    optimizer = Optimizer(lead_parameters(chunks, ()), optim, chunks)
    gradients(chunks, 1)
    optimizer.step(0)
    (ema,) = (kind for kind in kinds_of(optimizer.plan) if kind.name == "ema")
    averages = {piece.fqn: piece.memory for piece in optimizer.state_pieces(chunks[0], ema)}
    for piece in hf_pieces(chunks[0]):
        start, factor = drawn(piece.fqn, piece.shape, 0), 2 if "norm" in piece.fqn else 1
        assert torch.allclose(piece.memory, start - factor * LR * drawn(piece.fqn, piece.shape, 1))
        assert torch.allclose(averages[piece.fqn], 0.75 * start + 0.25 * piece.memory)
    clipped = {fqn for fqn, parameter in optimizer.parameters if optimizer.is_clipped(parameter)}
    assert clipped == {fqn for fqn, _ in optimizer.parameters if "norm" not in fqn}


@pytest.mark.parametrize(("factor", "elementwise"), [(0.5, "true"), (0.5, "false"), (0, "true")])
def test_class_is_constructed_with_the_peak_rate_of_its_group(tmp_path: Path, factor: float, elementwise: str) -> None:
    file = tmp_path / "groups.toml"
    text = f'[[group]]\nalgorithm = "tests.toy_optimizers.Relative"\nrate_factor = {factor}\n'
    file.write_text(f"{text}elementwise = {elementwise}")
    optim = optim_of("llama", "--optimizer", str(file), "--warmup-steps", "2")
    chunks, expected = chunks_of("llama", 1), chunks_of("llama", 1)
    optimizer = Optimizer(lead_parameters(chunks, ()), optim, chunks)
    of_package = Relative(expected[0].body.parameters(), lr=factor * LR or 1.0)
    for step in range(3):
        for stages in (chunks, expected):
            gradients(stages, step)
        of_package.param_groups[0]["lr"] = factor * optimizer.step(step)
        of_package.step()
    weights = {piece.fqn: piece.memory for piece in all_pieces(expected)}
    assert [piece.fqn for piece in all_pieces(chunks) if not torch.equal(piece.memory, weights[piece.fqn])] == []


def test_average_of_bfloat16_weights_moves_by_less_than_they_can() -> None:
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Optimizer([("weight", weight)], OptimOptions(lr=0.0, weight_decay=0.0, ema=0.999))
    weight.data.fill_(1.5)
    for step in range(100):
        weight.grad = torch.zeros_like(weight)
        optimizer.step(step)
    average = optimizer.state_of(weight, StateKind(name="ema", shape="parameter"))
    assert average is not None
    assert torch.allclose(average, torch.full((4,), 1.5 - 0.5 * 0.999**100))


def test_step_of_a_whole_tensor_looks_at_no_other() -> None:
    chunks, counts = chunks_of("llama", 1), list[int]()
    optimizer = Optimizer(lead_parameters(chunks, ()), optim_of("llama", *SETS["adafactor"]), chunks)
    (of_torch,) = optimizer.torch_optimizers
    of_torch.register_step_pre_hook(lambda of, *_: counts.append(len(of.param_groups[0]["params"])))
    gradients(chunks, 1)
    optimizer.step(1)
    assert set(counts) == {1}
    assert len(of_torch.param_groups[0]["params"]) == len(counts) > 1


class Noted:
    """A collective in flight, of which is noted when it is waited for."""

    def __init__(self, work: Any, number: int, events: list[tuple[str, int]]) -> None:
        self.work, self.number, self.events = work, number, events

    def wait(self) -> None:
        self.events.append(("waited", self.number))
        self.work.wait()


def test_exchanges_of_whole_tensors_are_in_flight_while_others_are_stepped(
    one_rank: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, alone, optim = chunks_of("llama", 1), chunks_of("llama", 1), optim_of("llama", *SETS["muon"])
    assert optim.plan is not None
    algorithms, groups = algorithms_of(optim.plan), GroupNumbers(optim.plan.groups)
    for of in (chunks, alone):
        gradients(of, 1)
    numbers, others = (
        {id(parameter): 0 for fqn, parameter in lead_parameters(of, ()) if groups.of(fqn) == 0}
        for of in (chunks, alone)
    )
    events, exchange, number = list[tuple[str, int]](), dist.all_to_all_single, count()

    def noted(*arguments: Any, **options: Any) -> Noted:
        events.append(("sent", started := next(number)))
        return Noted(exchange(*arguments, **options), started, events)

    monkeypatch.setattr(dist, "all_to_all_single", noted)
    monkeypatch.setattr(whole_matrix, "_ROUND", 1)  # each tensor by itself
    whole = WholeMatrices(chunks, numbers, algorithms, one_rank, LR)
    whole.optimizers[0].register_step_pre_hook(lambda *_: events.append(("stepped", 0)))
    whole.step()
    WholeMatrices(alone, others, algorithms, None, LR).step()
    assert all(torch.equal(one.memory, two.memory) for one, two in zip(*map(all_pieces, (chunks, alone)), strict=True))
    # Tensors arrive by the exchanges 0, 1, 3, 5, ..., and leave by 2, 4, 6, ..., the last.
    last = len(whole.units) - 1
    arriving, leaving = [0, *range(1, 2 * last, 2)], [*range(2, 2 * last + 1, 2), 2 * last + 1]
    expected = [("sent", 0)]
    for tensor in range(last + 1):
        expected += [("waited", arriving[tensor]), *([("sent", arriving[tensor + 1])] if tensor < last else [])]
        expected += [("stepped", 0), ("sent", leaving[tensor])]
        expected += [("waited", leaving[tensor - 1])] if tensor else []
    assert events == [*expected, ("waited", leaving[last])]


def all_pieces(chunks: Iterable[StageChunk]) -> list[Piece]:
    return [piece for chunk in chunks for piece in hf_pieces(chunk)]


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


def test_owners_are_balanced_by_cost() -> None:
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)] * 8
    costs = {(layer, str(layer)): cost_of(shape, is_muon=True) for layer, shape in enumerate(shapes)}
    owners = assign_owners(costs, 4)
    loads = [sum(cost for key, cost in costs.items() if owners[key] == rank) for rank in range(4)]
    assert max(loads) <= 1.05 * sum(loads) / 4
    assert set(owners) == set(costs)
