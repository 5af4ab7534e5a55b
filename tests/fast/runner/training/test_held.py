"""What a rank holds, as a checkpoint stores it; copies of it; and random states."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from manifests.errors import InputError
from manifests.placement import Placement
from manifests.schema import MOMENTS, WEIGHTS, RandomState
from runner.bundle.packed import open_packed
from runner.checkpoint import state as state_module
from runner.checkpoint.async_save import Saver
from runner.checkpoint.save import SaveContext
from runner.checkpoint.state import Held, HostCopy, held_state, held_weights, whole_weights
from runner.config.schema import CheckpointOptions, OptimOptions
from runner.distributed.fail_together import OneRankError
from runner.models import family_for
from runner.pipeline.chunk import build_chunks, materialize, named_hf_parameters
from runner.tensors.local_shard import Piece, whole_pieces
from runner.training.optimizer import Optimizer
from runner.training.rng import restore_rng, rng_state, seed_rng
from runner.training.ties import build_ties, lead_parameters
from tests.fast.manifests.models.catalogued import save_tiny
from tests.fast.runner.tiny import CPU, EMBEDDING, HEAD, fill, head_tie, read_config, save_model, split_evenly
from tests.fast.trained import write_trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path, num_hidden_layers=2, tie_word_embeddings=True)
    return path


Named = dict[int, dict[str, dict[str, torch.Tensor]]]


def named(held: Held) -> Named:
    """Give what is held by stage, kind and name; all of it lies here whole."""
    assert all(piece.is_whole for kinds in held.values() for pieces in kinds.values() for piece in pieces)
    return {
        stage: {kind: {piece.fqn: piece.memory for piece in pieces} for kind, pieces in kinds.items()}
        for stage, kinds in held.items()
    }


def hold(folder: Path, num_stages: int) -> tuple[Held, Held, Optimizer]:
    """Hold a tied model on one rank, after a step with gradients of ones."""
    family = family_for(read_config(folder), max_seq_len=8)
    stage_modules = split_evenly(family.modules, num_stages)
    chunks = build_chunks(family, stage_modules, range(num_stages))
    fill(chunks, folder)
    groups = [head_tie(stage_modules)]
    ties = build_ties(groups, chunks, Placement(num_stages=num_stages, num_ranks=1), timedelta(seconds=1))
    optimizer = Optimizer(lead_parameters(chunks, ties), OptimOptions())
    for _, parameter in optimizer.parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0)
    names = {fqn for chunk in chunks for fqn, _ in named_hf_parameters(chunk)}
    assert names >= {EMBEDDING, HEAD}
    return held_state(chunks, groups, ties, optimizer), held_weights(chunks, groups), optimizer


def test_replica_beside_its_owner_is_left_out_and_on_another_stage_it_is_held(folder: Path) -> None:
    for num_stages, is_held in ((1, False), (2, True)):
        state, weights, _ = hold(folder, num_stages)
        last = named(state)[num_stages - 1]
        assert list(last) == ["weights", *MOMENTS]
        assert all((HEAD in tensors) == is_held for tensors in last.values())
        assert {stage: list(kinds) for stage, kinds in weights.items()} == {s: ["weights"] for s in range(num_stages)}


def test_members_of_a_tie_have_the_moments_of_the_one_that_leads(folder: Path) -> None:
    state = named(hold(folder, 2)[0])
    for holds in ("weights", *MOMENTS):
        assert state[1][holds][HEAD].equal(state[0][holds][EMBEDDING])
    assert bool((state[1]["exp_avg"][HEAD] != 0).all())


def test_copy_keeps_what_was_held_when_training_goes_on(folder: Path) -> None:
    held, _, optimizer = hold(folder, 2)
    copy, state = HostCopy(held), named(held)
    kept = named(copy.fill(held))
    before = state[0]["weights"][EMBEDDING].clone()
    optimizer.step(1)
    assert not state[0]["weights"][EMBEDDING].equal(before)
    assert kept[0]["weights"][EMBEDDING].equal(before)
    assert named(copy.fill(held))[0]["weights"][EMBEDDING].equal(state[0]["weights"][EMBEDDING])
    assert {stage: {k: list(tensors) for k, tensors in kinds.items()} for stage, kinds in kept.items()} == {
        stage: {k: list(tensors) for k, tensors in kinds.items()} for stage, kinds in state.items()
    }


class Cudart:
    """What locks memory for a GPU, and how many bytes at which address; and its last error."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.pinned, self.last_error = status, dict[int, int](), 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.status:
            self.last_error = self.status
        else:
            self.pinned[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def on_gpu(shapes: Sequence[tuple[int, ...]]) -> Held:
    """Return what is known of a state on a GPU, of float32, before it is copied."""
    memory = [cast(torch.Tensor, SimpleNamespace(shape=shape, dtype=torch.float32, is_cuda=True)) for shape in shapes]
    pieces = tuple(Piece(fqn=str(n), shape=(), offset=(), memory=each) for n, each in enumerate(memory))
    return {0: {"weights": pieces, "exp_avg": pieces}}


def test_copy_of_a_state_on_a_gpu_pins_no_more_than_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of Qwen2.5-7B, an eighth of each side: torch would round each up to a power of two."""
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(state_module, "_SLAB_NBYTES", 1 << 24)
    shapes = [(19008, 448), *[(2368, 448)] * 5, (448,), (1,), ()]
    copy, nbytes = HostCopy(on_gpu(shapes)), 2 * 4 * sum(map(prod, shapes))
    assert nbytes <= sum(cudart.pinned.values()) <= 1.01 * nbytes
    copies = [piece.memory for kinds in copy._copies.values() for pieces in kinds.values() for piece in pieces]
    assert [tuple(memory.shape) for memory in copies] == shapes * 2
    places = sorted((memory.data_ptr(), memory.data_ptr() + memory.nbytes) for memory in copies)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
    slabs = [(address, address + size) for address, size in cudart.pinned.items()]
    assert all(any(first <= begin and end <= last for first, last in slabs) for begin, end in places)
    del copy
    assert not cudart.pinned  # pages that are given back while they are locked could not be locked again


@pytest.mark.usefixtures("one_rank")
def test_host_memory_that_cannot_be_pinned_ends_the_rank_as_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(status=2))
    with pytest.raises(OneRankError) as refused:
        HostCopy(on_gpu([(3,)]))
    assert (refused.value.code, refused.value.exit_code) == ("system.out-of-memory", 5)


class OnGpu(torch.Tensor):
    is_cuda = True


def test_host_memory_that_cuda_cannot_lock_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """cudaErrorNotSupported, as of devices that are not I/O coherent; torch raises the last error after any kernel."""
    cudart = Cudart(status=801)

    def launch(*size: int, device: str) -> None:
        status, cudart.last_error = cudart.last_error, 0
        if status:
            raise torch.AcceleratorError(f"CUDA error: {status}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "ones", launch)
    tensors = {"a": torch.arange(5.0).as_subclass(OnGpu), "b": torch.arange(9).as_subclass(OnGpu)}
    held: Held = {0: {"weights": whole_pieces(tensors)}}
    copies = named(HostCopy(held).fill(held))[0]["weights"]
    assert all(copies[fqn].equal(tensor) for fqn, tensor in tensors.items())
    assert cudart.last_error == 0


def test_copies_of_tensors_of_any_size_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "_SLAB_NBYTES", 256)
    tensors = {
        "a": torch.arange(3, dtype=torch.bfloat16),
        "b": torch.tensor(7.0),
        "c": torch.empty(0),
        "d": torch.arange(5),
        "e": torch.arange(99.0).view(3, 33).t(),
        "f": torch.full((2,), 9, dtype=torch.int32),
    }
    held: Held = {0: {"weights": whole_pieces(tensors)}}
    copies = named(HostCopy(held).fill(held))[0]["weights"]
    assert all(copies[fqn].equal(tensor) and copies[fqn].dtype == tensor.dtype for fqn, tensor in tensors.items())


@pytest.mark.usefixtures("one_rank")
def test_copy_that_gets_no_memory_ends_a_run_before_its_first_save(tmp_path: Path) -> None:
    model = open_packed(write_trained(tmp_path, "pp=1", num_hidden_layers=1))
    context = SaveContext.of(model, model, num_writers=1)
    options = CheckpointOptions(history=tmp_path / "history", every=None, keep=None, is_async=True)
    too_large = Piece(fqn=HEAD, shape=(1 << 50,), offset=(0,), memory=torch.empty(1 << 50, device="meta"))
    with Saver(context, options, {0: {"weights": (too_large,)}}, timedelta(seconds=10)) as saver:
        pass  # its thread ends
    with pytest.raises(OSError, match="allocate"):
        saver.reports()


def test_optimizer_with_moments_from_the_start_steps_as_torch_does(folder: Path) -> None:
    held, _, optimizer = hold(folder, 1)
    state = named(held)
    weights = {fqn: torch.nn.Parameter(w.clone()) for fqn, w in named(hold(folder, 1)[0])[0]["weights"].items()}
    options = optimizer.options
    fill_with = {
        "lr": options.lr,
        "betas": (options.beta1, options.beta2),
        "eps": options.eps,
        "weight_decay": options.weight_decay,
    }
    plain = torch.optim.AdamW(weights.values(), **fill_with)
    for fqn, weight in weights.items():
        plain.state[weight] = {
            "step": torch.tensor(1.0),
            **{holds: state[0][holds][fqn].clone() for holds in MOMENTS},
        }
        weight.grad = torch.ones_like(weight)
    optimizer.step(1)
    plain.step()
    assert all(weight.equal(state[0]["weights"][fqn]) for fqn, weight in weights.items())


@pytest.mark.parametrize("state", ["", "AAAA", "no base64", "AAA"])
def test_random_state_that_is_none_is_refused(state: str) -> None:
    with pytest.raises(InputError) as error:
        restore_rng((RandomState(rank=0, generator="cpu", state=state),), 0, 1, CPU)
    assert (error.value.code, error.value.where) == ("checkpoint.rng-state", "training.random")


def test_random_numbers_go_on_where_they_were_on_as_many_ranks() -> None:
    other = rng_state(0, CPU)
    first = torch.rand(4)
    state = rng_state(1, CPU)
    expected = torch.rand(4)
    assert restore_rng((other, state), 1, 2, CPU)
    assert torch.rand(4).equal(expected)
    assert restore_rng((other, state), 1, 2, CPU, num_alike=2)  # tensor-parallel ranks, which the run had not
    assert torch.rand(4).equal(first)
    now = torch.get_rng_state()
    alike = RandomState(rank=1, generator="cpu", state=other.state)
    assert not restore_rng((other, alike), 1, 2, CPU)  # the run had them, and the ranks would draw alike for ever
    assert not restore_rng((state,), 1, 2, CPU)
    assert not restore_rng((other, state), 0, 1, CPU)
    assert not restore_rng((), 0, 1, CPU)
    assert torch.get_rng_state().equal(now)


def test_run_on_other_ranks_does_not_draw_again_what_it_began_with() -> None:
    drawn = []
    for rank, step in ((0, 0), (1, 0), (0, 4), (1, 4), (0, 8)):
        seed_rng(5, rank, step)
        drawn.append(tuple(torch.rand(4).tolist()))
    assert len({*drawn}) == 5
    seed_rng(5, 0)
    assert tuple(torch.rand(4).tolist()) == drawn[0]


def test_writer_of_a_part_keeps_no_more_than_that_part(tmp_path: Path) -> None:
    """Experts are views of one parameter."""
    save_tiny(tmp_path, "Qwen3MoeForCausalLM")
    family = family_for(read_config(tmp_path), max_seq_len=8)
    chunks = build_chunks(family, (family.modules,), (0,))
    materialize(chunks[0], device=CPU, dtype=torch.float32)
    parts = [whole_weights(chunks, (), writer=writer, num_writers=2) for writer in range(2)]
    for part in parts:
        memories = [piece.memory for kinds in part.values() for pieces in kinds.values() for piece in pieces]
        kept = {memory.untyped_storage().data_ptr(): memory.untyped_storage().nbytes() for memory in memories}
        assert sum(kept.values()) == sum(memory.nbytes for memory in memories) > 0
    of_stages = {weight.untyped_storage().data_ptr() for chunk in chunks for weight in chunk.parameters()}
    (alone,) = whole_weights(chunks, (), writer=0).values()
    assert {piece.memory.untyped_storage().data_ptr() for piece in alone[WEIGHTS]} <= of_stages  # no copy
