"""save_stages: write what a training loop of your own has trained, as a run writes its checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from manifests.errors import CheckpointError, ModelError, Parameter, RankError, UsageError, check_count
from manifests.models import module_of
from manifests.schema import (
    MOMENTS,
    WEIGHTS,
    Holds,
    LearningRate,
    OptimizerState,
    ParameterGroup,
    TrainedDtype,
    TrainingState,
)
from manifests.slices import Slice
from runner.bundle.packed import Packed
from runner.checkpoint.save import SaveContext, save
from runner.checkpoint.state import Held
from runner.distributed.fail_together import from_all_ranks, raise_on_all_ranks
from runner.load.own_module import (
    StateDictAdapter,
    check_names,
    check_naming,
    named_tensors,
    on_meta,
    open_stages,
    pieces_of,
)
from runner.tensors.dtensor import in_one_region, local_of, whole_of
from runner.tensors.local_shard import Piece, digest_tensor
from stores.address import check_local
from stores.folders.publish import exchange

_Tensors = dict[str, torch.Tensor]
_ToHF = Callable[[Sequence[_Tensors]], _Tensors]
_Pieces = Mapping[int, tuple[Piece, ...]]  # by stage
_Group = tuple[ParameterGroup, float]  # with its learning rate
_Region = tuple[str, Slice]  # an FQN, and a rank's part
_TiedRegion = tuple[int, Holds, str, Slice]  # of a tie group
_DTYPES: Mapping[torch.dtype, TrainedDtype] = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """What one process has of the tensors of its pipeline rank, and how it trained them."""

    rank: int
    regions: frozenset[_Region]
    dtypes: frozenset[torch.dtype]
    groups: Mapping[_Group, frozenset[str]]  # FQNs
    tied: Mapping[_TiedRegion, str]  # digests


def save_stages(
    manifest: str | Path,
    rank: int,
    model: nn.Module | Sequence[nn.Module],
    out: str | Path,
    *,
    step: int,
    num_tokens: int = 0,
    optimizer: torch.optim.AdamW | None = None,
    max_norm: float = 0.0,
    name_of: Callable[[str], str] | None = None,
    adapter: StateDictAdapter | None = None,
    force: bool = False,
) -> int:
    """Write the modules of all pipeline ranks as a checkpoint at `out`, and return the bytes of its shards.

    The inverse of `load_stages`, with the same `manifest`, `rank`, `model`, `name_of` and `adapter`. Every rank of
    torch.distributed calls it, each with its own pipeline rank, after the same `step`; a process without
    torch.distributed is the only rank. Ranks that have the same stages are replicas, of which the first writes, or
    shards (DTensors), of which each writes its slices. `out` is on a file system that all nodes share, and appears
    when it is whole. Parameters keep their dtype. Tied weights must be equal: sum their gradients on all their stages.

    `runner launch MANIFEST -- --resume OUT` continues from it, at any number of ranks, if there is an `optimizer`: an
    AdamW that has taken `step` steps, whose state is written too. Its learning rates are written as constants: give the
    flags of a schedule. `max_norm` is that of gradient clipping, 0 without it.

    Shapes: parameters as `load_stages` fills them, of the shapes that the files of `manifest` have; slices of DTensors.
    Units: `num_tokens`, tokens that counted in the loss, of the whole run; the result in bytes.
    Raises:
        InputError: the modules are not those of the stages, or have other shapes (`model.*`); `out` exists and `force`
            is not set, or cannot be written (`output.*`).
        UsageError: no such rank (`options.no-such-rank`), or nobody calls with one (`options.missing-rank`); `out` is
            an address, or `step` or `num_tokens` not a count (`options.invalid-value`); `name_of` and `adapter` are
            both given (`options.conflict`).
        CheckpointError: an optimizer whose state the runner cannot resume (`checkpoint.unsupported-optimizer`).
        RankError: copies of a tied weight differ (`rank.tied-weights-differ`).

    Example: see examples/train.py.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    with _all_ranks() as group:
        with raise_on_all_ranks("save", group):
            check_local("out", out)
            check_naming(name_of, adapter)
            for name, count in ("step", step), ("num_tokens", num_tokens):
                check_count(Parameter(name), count, least=0)
            packed, stages = open_stages(manifest, rank)
            states = [_states_of(module, optimizer, step) for module in models]
        # All ranks of a mesh exchange parts: an adapter converts whole tensors, and a shard has one region of each.
        gather = in_one_region if adapter is None else whole_of
        states = [{holds: _gather(tensors, gather) for holds, tensors in state.items()} for state in states]
        with raise_on_all_ranks("save", group):
            to_hf = _namer(name_of, adapter)
            kinds = (WEIGHTS,) if optimizer is None else (WEIGHTS, *MOMENTS)
            named = {holds: to_hf([state[holds] for state in states]) for holds in kinds}
            check_names(packed, stages, {fqn: fqn for fqn in named[WEIGHTS]})
            pieces = {holds: _pieces_of(packed, stages, tensors) for holds, tensors in named.items()}
            exact = (*packed.shape.untrained_suffixes, *packed.shape.float32_suffixes)
            part = _Part(
                rank=rank,
                regions=frozenset(map(_region_of, _all_of(pieces[WEIGHTS]))),
                dtypes=frozenset(
                    piece.memory.dtype for piece in _all_of(pieces[WEIGHTS]) if not piece.fqn.endswith(exact)
                ),
                groups={} if optimizer is None else _groups_of(models, optimizer, to_hf),
                tied=_digests_of_ties(packed, pieces),
            )
        parts = from_all_ranks(part, group)
        with raise_on_all_ranks("save", group):
            _check_parts(packed, parts)
        training = _training_of(parts, TrainingState(step=int(step), num_tokens=int(num_tokens)), max_norm)
        own_state, context = _share_of(packed, pieces, parts)
        return save(own_state, context, Path(out), training, swap=exchange if force else None, group=group)


@contextmanager
def _all_ranks() -> Iterator[dist.ProcessGroup | None]:
    """Yield a gloo group of all ranks until the block ends; a process without torch.distributed is its only rank."""
    if dist.is_initialized():
        group = dist.new_group(backend="gloo")
        try:
            yield group
        finally:
            dist.destroy_process_group(group)
    else:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            yield None
        finally:
            dist.destroy_process_group()


def _states_of(module: nn.Module, optimizer: torch.optim.AdamW | None, step: int) -> dict[Holds, _Tensors]:
    """Return a module's weights and, if there is an optimizer, its state, by the names of the module."""
    weights = dict(named_tensors(module))
    if optimizer is None:
        return {WEIGHTS: weights}
    hint = "pass the AdamW, without amsgrad or maximize, that trains all parameters, after its last step"
    if not isinstance(optimizer, torch.optim.AdamW) or any(group["maximize"] for group in optimizer.param_groups):
        problem = f"expected a torch.optim.AdamW that minimizes, found {type(optimizer).__name__}"
        raise CheckpointError("optimizer", problem, hint, code="checkpoint.unsupported-optimizer")
    states = {name: optimizer.state.get(weight, {}) for name, weight in module.named_parameters(remove_duplicate=False)}
    for name, state in states.items():
        if set(state) != {"step", *MOMENTS}:
            problem = f"expected step, exp_avg and exp_avg_sq of {name}, found {', '.join(sorted(state)) or 'nothing'}"
            raise CheckpointError("optimizer", problem, hint, code="checkpoint.unsupported-optimizer")
        if int(state["step"]) != step:
            problem = f"expected {step} steps, found {int(state['step'])} of {name}"
            raise CheckpointError("optimizer", problem, hint, code="checkpoint.unsupported-optimizer")
    return {WEIGHTS: weights, **{moment: {name: states[name][moment] for name in states} for moment in MOMENTS}}


def _gather(tensors: _Tensors, gather: Callable[[torch.Tensor], torch.Tensor]) -> _Tensors:
    return {name: gather(tensor) for name, tensor in tensors.items()}


def _namer(name_of: Callable[[str], str] | None, adapter: StateDictAdapter | None) -> _ToHF:
    """Return a function from the tensors of modules to those of Hugging Face files."""

    def to_hf(tensors: Sequence[_Tensors]) -> _Tensors:
        named: _Tensors = {}
        for of_module in tensors:
            converted = of_module if adapter is None else adapter.to_hf(of_module)
            for name, tensor in converted.items():
                fqn = name_of(name) if adapter is None and name_of is not None else name
                if fqn in named:
                    problem = "is the name of two parameters"
                    hint = "number layers as in the whole model, in each of the modules"
                    raise ModelError(f"model: {fqn!r}", problem, hint, code="model.duplicate-parameter")
                named[fqn] = tensor
        return named

    return to_hf


def _pieces_of(packed: Packed, stages: Sequence[int], tensors: _Tensors) -> _Pieces:
    """Return this rank's parts of the tensors by stage; of tied weights, all members that the stages store."""
    tensors = dict(tensors)
    for group in packed.manifest.ties:
        members = [member.fqn for member in group.members if member.stage in stages]
        weight = next((tensors[fqn] for fqn in members if fqn in tensors), None)
        if weight is not None:
            tensors |= {fqn: tensors.get(fqn, weight) for fqn in members}
        for replica in group.replicas:
            if replica.stage == group.owner.stage:
                tensors.pop(replica.fqn, None)
    for fqn, tensor in tensors.items():
        if tuple(tensor.shape) != packed.shape.tensors[fqn]:
            problem = f"expected {list(packed.shape.tensors[fqn])} (config.json), found {list(tensor.shape)}"
            raise ModelError(f"model: {fqn!r}", problem, code="model.wrong-shape")
    pieces = {}
    for stage in stages:
        modules = frozenset(packed.manifest.stages[stage].modules)
        of_stage = {fqn: tensor for fqn, tensor in tensors.items() if module_of(fqn, modules) is not None}
        here = ((fqn, tensor) for fqn, tensor in of_stage.items() if local_of(tensor).numel())
        pieces[stage] = tuple(piece for fqn, tensor in here for piece in pieces_of(fqn, tensor))
    return pieces


def _groups_of(models: Sequence[nn.Module], optimizer: torch.optim.AdamW, to_hf: _ToHF) -> dict[_Group, frozenset[str]]:
    """Return the FQNs of the parameters that each group of an optimizer trains."""
    fqns: dict[_Group, frozenset[str]] = {}
    for options in optimizer.param_groups:
        trained = {id(weight) for weight in options["params"]}
        # An adapter gets no shards: of names and shapes, it has enough.
        named = [
            {name: on_meta(tensor) for name, tensor in named_tensors(module) if id(tensor) in trained}
            for module in models
        ]
        beta1, beta2 = map(float, options["betas"])
        group = ParameterGroup(
            beta1=beta1, beta2=beta2, eps=float(options["eps"]), weight_decay=float(options["weight_decay"])
        )
        fqns[group, float(options["lr"])] = fqns.get((group, float(options["lr"])), frozenset()) | to_hf(named).keys()
    return fqns


def _digests_of_ties(packed: Packed, pieces: Mapping[Holds, _Pieces]) -> dict[_TiedRegion, str]:
    """Return the digest of each region of tied tensors."""
    numbers = {member.fqn: number for number, group in enumerate(packed.manifest.ties) for member in group.members}
    return {
        (numbers[piece.fqn], holds, piece.fqn, piece.part): digest_tensor(piece.memory)
        for holds, by_stage in pieces.items()
        for piece in _all_of(by_stage)
        if piece.fqn in numbers
    }


def _check_parts(packed: Packed, parts: Sequence[_Part]) -> None:
    """Check that the ranks together have every tensor once, with optimizer state if any has, and equal ties."""
    counts = Counter(part.rank for part in parts)
    expected = packed.manifest.placement.num_ranks
    if len(counts) != expected or len(set(counts.values())) != 1:
        problem = f"expected calls with the {expected} pipeline ranks, equally many with each, found {dict(counts)}"
        raise UsageError("rank", problem, "every rank of the job calls save_stages", code="options.missing-rank")
    if any(part.groups for part in parts):
        for number, part in enumerate(parts):
            if part.regions and not part.groups:
                problem = f"other ranks pass one, and rank {number} does not"
                raise CheckpointError("optimizer", problem, code="checkpoint.unsupported-optimizer")
    sizes: Counter[str] = Counter()
    for fqn, region in {region for part in parts for region in part.regions}:
        sizes[fqn] += prod(region.shape)
    for fqn, size in sorted(sizes.items()):
        if size != prod(packed.shape.tensors[fqn]):
            problem = f"expected all {prod(packed.shape.tensors[fqn])} elements once, found {size} on all ranks"
            raise ModelError(f"model: {fqn!r}", problem, code="model.partial-parameter")
    digests: dict[object, dict[str, str]] = {}
    for part in parts:
        for (number, holds, fqn, region), digest in part.tied.items():
            other = digests.setdefault((number, holds, region), {fqn: digest})
            if digest not in other.values():
                problem = f"its copies differ: {holds} of {fqn} and {', '.join(other)}"
                hint = "sum the gradients of a tied weight on all its stages before each step"
                raise RankError(fqn, problem, hint, code="rank.tied-weights-differ")


def _training_of(parts: Sequence[_Part], training: TrainingState, max_norm: float) -> TrainingState:
    """Return the training state with the dtypes and optimizer groups of all ranks."""
    dtypes = {dtype for part in parts for dtype in part.dtypes if dtype.is_floating_point}
    training = replace(training, dtype=_DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None)
    fqns: dict[_Group, frozenset[str]] = {}
    for part in parts:
        for key, names in part.groups.items():
            fqns[key] = fqns.get(key, frozenset()) | names
    if not fqns:
        return training
    # As a run writes them: the first group has no list, the other has the parameters without weight decay. Rates are
    # multiples of the first one's, which is 0 if all are.
    first, *others = sorted(fqns, key=lambda of: (not of[1], -of[0].weight_decay, -len(fqns[of])))
    peak = first[1]
    groups = [first[0]]
    for group, rate in others:
        factor = None if rate == peak else rate / peak
        groups.append(replace(group, fqns=tuple(sorted(fqns[group, rate])), rate_factor=factor))
    return replace(
        training,
        optimizer=OptimizerState(name="AdamW", max_norm=max_norm, groups=tuple(groups)),
        learning_rate=LearningRate(peak=peak, warmup_steps=0, decay="constant", decay_steps=training.step, minimum=0.0),
    )


def _share_of(packed: Packed, pieces: Mapping[Holds, _Pieces], parts: Sequence[_Part]) -> tuple[Held, SaveContext]:
    """Return the pieces that this rank writes, and how: the first of the ranks with a piece writes it."""
    position = dist.get_rank()
    peers = [number for number, part in enumerate(parts) if part.rank == parts[position].rank]
    earlier = {region for number in peers if number < position for region in parts[number].regions}
    is_sliced = any(region.shape != packed.shape.tensors[fqn] for part in parts for fqn, region in part.regions)
    state = {
        stage: {
            holds: tuple(piece for piece in by_stage[stage] if _region_of(piece) not in earlier)
            for holds, by_stage in pieces.items()
        }
        for stage in pieces[WEIGHTS]
    }
    return state, SaveContext.of(packed, packed, num_writers=len(peers) if is_sliced else 1)


def _all_of(pieces: _Pieces) -> Iterator[Piece]:
    return (piece for of_stage in pieces.values() for piece in of_stage)


def _region_of(piece: Piece) -> _Region:
    return piece.fqn, piece.part
