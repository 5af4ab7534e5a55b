"""A checkpoint of the tiny model after its step: the ranks save it as the run does, and one process loads it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from manifests.errors import UserError
from manifests.models import ModelShape
from manifests.models.adapters import is_adapter
from manifests.optimizer_state import kinds_of, shape_of
from manifests.schema import (
    WEIGHTS,
    Holds,
    Layout,
    Manifest,
    Model,
    Source,
    Stage,
    StateKind,
    TrainingState,
)
from manifests.slices import Slice
from runner.checkpoint.save import SaveContext, save
from runner.checkpoint.state import held_state
from runner.distributed.fail_together import from_all_ranks, from_rank_0
from runner.load.load import load_tensors
from runner.parallel.mesh import Mesh
from runner.pipeline.chunk import StageChunk, hf_constants, hf_pieces
from runner.proof.combination import Combination
from runner.proof.reference import Reference
from runner.tensors.local_shard import Piece, digest_tensor, whole_pieces
from runner.training.mixed_precision import master_of
from runner.training.step import Engine
from stores.bundles import Bundles
from stores.open import open_manifest

logger = logging.getLogger("runner")

_UNSAVED = ("output.disk-full", "output.unwritable", "checkpoint.not-shared")  # the disk's fault
_OF_WEIGHTS = StateKind(name=WEIGHTS, shape="parameter")
# What a rank has of a tensor: its kind, FQN and region, with the dtype and the digest of the bytes.
_Part = tuple[Holds, str, Slice]
_Digests = Mapping[_Part, tuple[torch.dtype, str]]


def reload_problem(
    run: Combination, chunks: Sequence[StageChunk], engine: Engine, mesh: Mesh, reference: Reference
) -> str | None:
    """Save the state of all ranks, load it in one process, and return what is not bitwise what a rank has.

    Every rank calls this. Ranks on several nodes save in the run's log folder, which they may share.
    """
    digests = from_all_ranks(dict(_digests(chunks, engine)))
    is_elsewhere = len({*from_all_ranks(socket.gethostname())}) > 1
    place = run.options.log_dir if is_elsewhere else None
    is_rank_0 = dist.get_rank() == 0
    temporary: AbstractContextManager[str | None] = nullcontext()
    if is_rank_0:
        try:
            temporary = TemporaryDirectory(prefix=".self-check-", dir=place)
        except OSError as error:  # the machine's fault, as in _UNSAVED
            logger.info("self-check: no checkpoint could be tried: %s", error)
    with temporary as path:
        root = from_rank_0(path)
        if root is None:
            return None
        folder = Path(root) / "step-1"
        context = SaveContext(manifest=_manifest(run), root=folder, parents=(), num_writers=mesh.num_writers)
        state = held_state(chunks, run.stages.ties, engine.ties, engine.optimizer, mesh.owns)
        try:
            training = TrainingState(step=1, num_tokens=1, optimizer=engine.optimizer.plan)
            save(state, context, folder, training)
        except UserError as error:
            if error.code not in _UNSAVED:
                return f"its checkpoint cannot be saved: {error.problem}"
            if is_rank_0:
                logger.info("self-check: no checkpoint could be tried: %s", error)
            return None
        kinds = kinds_of(engine.optimizer.plan)
        return from_rank_0(_compare(folder, digests, reference, kinds) if is_rank_0 else None)


def _digests(chunks: Sequence[StageChunk], engine: Engine) -> Iterator[tuple[_Part, tuple[torch.dtype, str]]]:
    leaders = {id(member): tie.leader for tie in engine.ties for member in tie.members}

    for chunk in chunks:
        weights = (*hf_pieces(chunk, master_of), *hf_constants(chunk, master_of))
        pieces = {WEIGHTS: tuple(p for p in weights if is_adapter(p.fqn)) if chunk.has_adapters else weights}
        pieces |= {
            kind.name: (*engine.optimizer.state_pieces(chunk, kind, leaders),)
            for kind in kinds_of(engine.optimizer.plan)
        }
        for holds, parts in pieces.items():
            for piece in parts:
                yield (holds, piece.fqn, piece.part), (piece.memory.dtype, digest_tensor(piece.memory))


def _compare(folder: Path, digests: Sequence[_Digests], reference: Reference, kinds: Sequence[StateKind]) -> str | None:
    """Load whole tensors, and return the first that another rank has other bytes of."""
    shapes = {fqn: tuple(tensor.shape) for fqn, tensor in reference.weights.items()}
    shape = ModelShape(architecture="", num_layers=0, modules=(), tensors=shapes)
    try:
        bundles = Bundles(open_manifest(folder).manifest, folder)
        loaded = {
            kind.name: {piece.fqn: piece for piece in _load(bundles, shape, kind, digests, reference)}
            for kind in (_OF_WEIGHTS, *kinds)
        }
    except UserError as error:
        return f"its checkpoint cannot be loaded in one process: {error.problem} ({error.where})"
    for rank, of_rank in enumerate(digests):
        for (holds, fqn, region), (dtype, digest) in of_rank.items():
            if digest_tensor(loaded[holds][fqn].memory[region.index].to(dtype)) != digest:
                what = "" if holds == WEIGHTS else f" {holds} of"
                return f"its checkpoint, loaded in one process, has other bytes of{what} {fqn} than rank {rank}"
    return None


def _load(
    bundles: Bundles, shape: ModelShape, kind: StateKind, digests: Sequence[_Digests], reference: Reference
) -> tuple[Piece, ...]:
    fqns = dict.fromkeys(fqn for of_rank in digests for holds, fqn, *_ in of_rank if holds == kind.name)
    dtype = next(iter(reference.gradients.values())).dtype
    empty = {
        fqn: torch.empty_like(weight) if not (weight := reference.weights[fqn]).is_floating_point()
        else torch.empty(shape_of(kind, tuple(weight.shape)) or (), dtype=dtype)
        for fqn in fqns
    }  # fmt: skip
    pieces = whole_pieces(empty)
    load_tensors(pieces, bundles, shape, kind.name)
    return pieces


def _manifest(run: Combination) -> Manifest:
    placement = run.stages.placement
    stages = (
        Stage(
            index=index, rank=placement.rank_of(index), virtual=placement.virtual_of(index), modules=modules,
            num_tensors=0, num_params=0, nbytes=0, shards=(),
        )
        for index, modules in enumerate(run.stages.modules)
    )  # fmt: skip
    return Manifest(
        created_by="",
        model=Model(architecture=run.family.architecture, num_layers=0, num_params=0),
        source=Source(kind="", location=""),
        layout=Layout(
            spec="", style=placement.style, num_stages=placement.num_stages, num_ranks=placement.num_ranks,
            num_virtual=placement.num_virtual,
        ),
        stages=tuple(stages),
        ties=run.stages.ties,
    )  # fmt: skip
