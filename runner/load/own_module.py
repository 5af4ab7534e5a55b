"""load_stages: load a pipeline rank's weights into your own module, such as one of transformers or torchtitan."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from manifests.errors import InputError, ModelError, UsageError
from manifests.models import module_of
from runner.bundle.packed import Packed, open_packed
from runner.load.load import LoadReport, load_tensors, some_of
from runner.tensors.dtensor import local_of, local_regions, packed_dim
from runner.tensors.local_shard import Piece, empty_like, persistent_buffers, whole_pieces
from stores.address import is_url


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """What `load_stages` read: `nbytes` of the tensors of `stages`, in `load_s` seconds.

    `num_unverified` tensors have no digest: they are in the original files of a virtual bundle. `meta_buffers` are the
    module's non-persistent buffers (such as a rotary cache) that are still on the meta device: compute them before the
    first forward pass.
    """

    stages: tuple[int, ...]
    num_tensors: int
    nbytes: int
    load_s: float
    num_unverified: int
    meta_buffers: tuple[str, ...]


class StateDictAdapter(Protocol):
    """A conversion between a module's state dict and Hugging Face's, such as torchtitan's `state_dict_adapter`."""

    def to_hf(self, state_dict: dict[str, Any], /) -> dict[str, Any]:
        """Return the tensors under Hugging Face FQNs, in the shapes of Hugging Face files.

        Shapes: those of files; called with tensors on the meta device.
        """

    def from_hf(self, hf_state_dict: dict[str, Any], /) -> dict[str, Any]:
        """Return the tensors under the module's own names.

        Shapes: those of the module.
        """


def load_stages(
    manifest: str | Path,
    rank: int,
    model: nn.Module | Sequence[nn.Module],
    *,
    name_of: Callable[[str], str] | None = None,
    adapter: StateDictAdapter | None = None,
    device: torch.device | str = "cpu",
) -> LoadResult:
    """Fill a module with the weights of a pipeline rank's stages, each byte read once, digests verified.

    `model` has the parameters and persistent buffers of exactly these stages, in one module or in several (such as
    one per virtual stage). Those on the meta device get memory on `device`; the others are filled where they are.
    Tied parameters stay tied; DTensors get this process's part. Every rank calls it for itself: it runs no collectives.

    A parameter's name must be its Hugging Face FQN, numbered as in the whole model. Otherwise `name_of` maps the one to
    the other where only names differ. Where values or shapes differ too, pass an `adapter`: torchtitan's Llama 3
    permutes the rows of query and key projections, which no renaming can do. An adapter needs the memory twice.

    Shapes: parameters as stored, such as `mlp.down_proj.weight` (D, F), D = model width, F = feed-forward width; any
    floating dtype: stored values are cast.
    Units: `nbytes` in bytes, `load_s` in seconds.
    Raises:
        InputError: a shard is missing or damaged, the stages have a tensor that the module lacks
            (`model.missing-parameter`), the module has one that the stages lack (`model.unexpected-parameter`) or ties
            what they do not (`model.tied-parameter`), or a shape differs.
        UsageError: the layout has no such rank (`options.no-such-rank`), the manifest is not on this machine, or
            `name_of` and `adapter` are both given (`options.conflict`).

    Example: see examples/load_stage.py and examples/train.py.
    """
    packed, stages = open_stages(manifest, rank)
    models = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, Iterable) else []
    if not models or not all(isinstance(module, nn.Module) for module in models):
        problem = f"expected a module, or a list of modules, found {str(model)[:80]}"
        raise UsageError("model", problem, code="options.invalid-value")
    check_naming(name_of, adapter)
    for module in models:
        _give_memory(module, torch.device(device))
    if adapter is None:
        report = _load_named(packed, stages, models, name_of)
    else:
        report = _load_adapted(packed, stages, models, adapter)
    return LoadResult(
        stages=stages,
        num_tensors=report.num_tensors,
        nbytes=report.nbytes,
        load_s=report.load_s,
        num_unverified=report.num_unverified,
        meta_buffers=tuple(name for module in models for name, buffer in module.named_buffers() if buffer.is_meta),
    )


def check_naming(name_of: Callable[[str], str] | None, adapter: StateDictAdapter | None) -> None:
    """Refuse two ways to name the tensors of a module."""
    if name_of is not None and adapter is not None:
        problem, hint = "conflicts with adapter, which names tensors itself", "leave one of the two out"
        raise UsageError("name_of", problem, hint, code="options.conflict")


def open_stages(manifest: str | Path, rank: int) -> tuple[Packed, tuple[int, ...]]:
    """Open a manifest of this machine, and return the stages of a pipeline rank."""
    if is_url(manifest):
        hint = "copy it here first: reshard pack URL --out DIR"
        raise UsageError(str(manifest), "is not on this machine", hint, code="options.remote-manifest")
    packed = open_packed(manifest)
    placement = packed.manifest.placement
    if type(rank) is not int or not 0 <= rank < placement.num_ranks:
        problem = f"there is no pipeline rank {rank}: the layout has {placement.num_ranks}"
        raise UsageError("rank", problem, "ranks are counted from 0", code="options.no-such-rank")
    return packed, tuple(placement.stages_on(rank))


def _load_named(
    packed: Packed, stages: Sequence[int], models: Sequence[nn.Module], name_of: Callable[[str], str] | None
) -> LoadReport:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in (named for model in models for named in named_tensors(model)):
        if name in tensors:
            hint = "number layers as in the whole model, in each of the modules"
            raise ModelError(f"model: {name!r}", "is in two modules", hint, code="model.duplicate-parameter")
        tensors[name] = tensor
    fqns = {name: name if name_of is None else name_of(name) for name in tensors}
    check_names(packed, stages, fqns)
    pieces = [
        piece for name, tensor in tensors.items() if local_of(tensor).numel() for piece in pieces_of(fqns[name], tensor)
    ]
    return load_tensors(_once(pieces, packed), packed.bundles, packed.shape, num_ranks=_num_local_ranks())


def _load_adapted(
    packed: Packed, stages: Sequence[int], models: Sequence[nn.Module], adapter: StateDictAdapter
) -> LoadReport:
    owned: list[dict[str, Any]] = [model.state_dict() for model in models]
    stored = [adapter.to_hf({name: on_meta(tensor) for name, tensor in states.items()}) for states in owned]
    check_names(packed, stages, {fqn: fqn for tensors in stored for fqn in tensors})
    read = {fqn: torch.empty(like.shape, dtype=like.dtype) for tensors in stored for fqn, like in tensors.items()}
    report = load_tensors(whole_pieces(read), packed.bundles, packed.shape, num_ranks=_num_local_ranks())
    for model, states, tensors in zip(models, owned, stored, strict=True):
        converted = adapter.from_hf({fqn: read[fqn] for fqn in tensors})
        if lacking := sorted(states.keys() - converted.keys()):
            raise _missing(packed, f"the adapter makes no value for {some_of(lacking)}")
        names: dict[int, str] = {}
        for name, tensor in states.items():
            first = names.setdefault(local_of(tensor).data_ptr(), name)
            is_shared = first != name and tensor.shape == states[first].shape and tensor.numel()
            if is_shared and not torch.equal(converted[first], converted[name]):
                raise _tied(packed, first, name)
        model.load_state_dict({name: _like(tensor, converted[name]) for name, tensor in states.items()})
    return report


def _num_local_ranks() -> int:
    """Return how many ranks torchrun has started on this node; 1 without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the whole shape, without memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _like(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return `whole`, as a DTensor with this process's part of it if `tensor` is one."""
    if not isinstance(tensor, DTensor):
        return whole
    parts = [
        whole[tuple(slice(begin, begin + size) for begin, size in zip(offset, memory.shape, strict=True))]
        for memory, offset in local_regions(tensor)
    ]
    packed = packed_dim(tensor)
    local = parts[0] if packed is None else torch.cat(parts, packed[0])
    return DTensor.from_local(
        local.to(local_of(tensor).device),
        tensor.device_mesh,
        tensor.placements,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _give_memory(model: nn.Module, device: torch.device) -> None:
    """Replace meta tensors by uninitialized memory; a parameter with several names stays one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                memory = empty_like(parameter.detach(), device)
                made[id(parameter)] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
                made[id(parameter)].__dict__.update(parameter.__dict__)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and name not in module._non_persistent_buffers_set:
                module._buffers[name] = empty_like(buffer, device)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call] # FSDP2 takes note of its new parameters


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers, as `state_dict` names them."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from persistent_buffers(model)


def pieces_of(fqn: str, tensor: torch.Tensor) -> Iterator[Piece]:
    """Yield this process's part of a tensor: of matrices packed into one and each sharded, a piece of each."""
    for memory, offset in local_regions(tensor):
        yield Piece(fqn=fqn, shape=tuple(tensor.shape), offset=offset, memory=memory.detach())


def _once(pieces: Sequence[Piece], packed: Packed) -> list[Piece]:
    """Drop pieces whose memory is already filled under another name of a tied weight."""
    filled: dict[tuple[object, ...], Piece] = {}
    for piece in pieces:
        first = filled.setdefault((piece.memory.data_ptr(), piece.offset, piece.memory.shape), piece)
        if first.fqn != piece.fqn and not any({first.fqn, piece.fqn} <= {*group} for group in packed.shape.ties):
            raise _tied(packed, first.fqn, piece.fqn)
    return list(filled.values())


def _tied(packed: Packed, name: str, other: str) -> ModelError:
    problem = f"the module has one parameter for {name} and {other}, which are two weights here"
    hint = "build it from the packed config.json, with tie_word_embeddings set to false"
    return ModelError(packed.where, problem, hint, code="model.tied-parameter")


def check_names(packed: Packed, stages: Sequence[int], fqns: Mapping[str, str]) -> None:
    """Check that the module has all weights of these stages, and no others."""
    modules = frozenset(module for stage in stages for module in packed.manifest.stages[stage].modules)
    expected = {fqn for fqn in packed.shape.tensors if module_of(fqn, modules) is not None}
    if unexpected := sorted(name for name, fqn in fqns.items() if fqn not in expected):
        raise ModelError(
            packed.where,
            f"stages {', '.join(map(str, stages))} have no tensor for the module's {some_of(unexpected)}",
            "build only these stages, with Hugging Face FQNs, or map names with name_of",
            code="model.unexpected-parameter",
        )
    actual = set(fqns.values())
    tied = {fqn for group in packed.shape.ties if actual.intersection(group) for fqn in group}
    if lacking := sorted(expected - actual - tied):
        raise _missing(packed, f"the module has no parameter for {some_of(lacking)}")


def _missing(packed: Packed, problem: str) -> InputError:
    hint = "build all modules of the rank's stages: these weights would not be loaded"
    return ModelError(packed.where, problem, hint, code="model.missing-parameter")
