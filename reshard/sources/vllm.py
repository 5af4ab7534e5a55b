"""A folder of vLLM's `sharded_state`: the files of each rank, and the model's config.json.

Weights are packed whole, as Hugging Face's model has them. What several ranks have alike (norms, few key heads, a tied
head) is read from each of them, and must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import product

from manifests.errors import SourceError, UsageError
from manifests.index import INDEX_NAME
from manifests.models import ModelShape, model_shape
from manifests.safetensors import nbytes_of
from manifests.schema import ModelDescription, Source
from manifests.slices import Slice
from reshard.sources.huggingface import CONFIG_NAME, OTHER_WEIGHTS, auxiliary_files, check_coverage, drop_tensors
from reshard.sources.torch_files import index_of, recorded_anew
from reshard.sources.vllm_names import (
    BY_COLUMNS,
    EMBEDDING,
    FUSED,
    HEAD,
    LAYER,
    RANK_FILE,
    SCALES,
    check_family,
    heads_in,
    rows_of_part,
    rows_of_vocabulary,
    what_is_uneven,
)
from reshard.tensors.checkpoint import Checkpoint, OriginalFiles, TensorAt, tensors_in
from reshard.tensors.lazy import Buffer, derive, read_blocks
from reshard.tensors.slices import merge_slices
from reshard.tensors.source_index import SourceRecord
from stores.base import Folder, read_config
from stores.bundles import join_slices
from stores.headers import each_file_header

__all__ = ["open_vllm", "stored_by_ranks"]

_DTYPES = ("F32", "F16", "BF16")
_COPY = "copy the files of all ranks again, from one run of vLLM"
_ORIGINAL = "pack the Hugging Face model that vLLM loaded"

_SCALES = ("model.layers.*.self_attn.attn.*_scale",)

_Rank = tuple[int, int]  # pipeline stage, tensor-parallel rank
_Region = tuple[str, Slice | None]  # FQN, and what of it a rank has


def open_vllm(
    folder: Folder, drop: frozenset[str] = frozenset(), description: ModelDescription | None = None
) -> Checkpoint:
    """Read the headers of all ranks' files and check that their tensors cover the model exactly.

    Raises:
        SourceError: no config.json, files or tensors of ranks missing, ranks that cannot share the model, or tensors
            missing, unknown or of the wrong shape. When bytes are read: ranks that have different ones.
        ModelError: an invalid config, or an architecture whose layout in vLLM is not known.
        ShardError: an invalid header, or slices that are not all of a tensor.
        UsageError: the model is described.
    """
    if description is not None:
        problem = "is for Hugging Face folders; vLLM's layout of a described model is not known"
        raise UsageError("--model", problem, "leave it out", code="options.model-of-manifest")
    files = folder.names()
    if CONFIG_NAME not in files:
        hint = "copy the config.json (and tokenizer files) of the Hugging Face model into the folder"
        raise SourceError(f"{folder}/{CONFIG_NAME}", "no such file", hint, code="source.no-config")
    stored = stored_by_ranks(folder)
    config_file = folder.file(CONFIG_NAME)
    config = read_config(config_file)
    shape = model_shape(config, str(config_file))
    check_family(shape, _ORIGINAL)
    tp = 1 + max(rank for _, rank in stored)
    heads = heads_in(config)
    if uneven := what_is_uneven(shape, heads, tp):
        raise _bad_ranks(folder, f"files of {tp} ranks, which cannot share {uneven} evenly")
    weights = _merged(stored, shape, heads[1], tp)
    dropped = drop_tensors(weights, drop, shape)
    check_coverage(weights, shape, str(folder), frozenset(dropped))
    ordered = {fqn: weights[fqn] for fqn in (*shape.tensors, *weights) if fqn in weights}
    shards = recorded_anew(list(ordered.values()))
    ranks = [name for name in files if RANK_FILE.fullmatch(name)]
    others = [name for name in files if name == INDEX_NAME or name.endswith(OTHER_WEIGHTS)]
    has_scales = any(tensor.name.endswith(SCALES) for tensors in stored.values() for tensor in tensors)
    return Checkpoint(
        shape=shape,
        tensors=ordered,
        auxiliary=auxiliary_files(folder, files, {*ranks, *others}),
        record=SourceRecord(shards=shards, index=index_of(shards) if len(shards) > 1 else None, dropped=dropped),
        source=Source(
            kind=folder.kind,
            location=folder.location,
            revision=folder.revision,
            left_out=(*others, *(_SCALES if has_scales else ())),
        ),
        originals=OriginalFiles(
            location=folder.location, revision=folder.revision, files={name: folder.file(name) for name in ranks}
        ),
        merges_slices=True,
    )


def stored_by_ranks(folder: Folder) -> dict[_Rank, list[TensorAt]]:
    """Return the tensors that each rank has, under vLLM's names.

    Raises:
        SourceError: a rank's file is missing, or it has a tensor twice.
        ShardError: an invalid header.
    """
    parts: dict[_Rank, list[int]] = {}
    paths: dict[str, _Rank] = {}
    for name in folder.names():
        if match := RANK_FILE.fullmatch(name):
            rank = (int(match[1] or 0), int(match[2]))
            parts.setdefault(rank, []).append(int(match[3]))
            paths[name] = rank
    if len({name.startswith("model-pp-") for name in paths}) > 1:
        raise _bad_ranks(folder, "files of runs with and without pipeline stages")
    stages, ranks = (range(1 + max(numbers)) for numbers in zip(*parts, strict=True))
    if absent := next((rank for rank in product(stages, ranks) if rank not in parts), None):
        raise _bad_ranks(folder, f"no file of stage {absent[0]}, rank {absent[1]}")
    for at, numbers in parts.items():
        if sorted(numbers) != list(range(len(numbers))):
            raise _bad_ranks(folder, f"{len(numbers)} parts up to {max(numbers)} of stage {at[0]}, rank {at[1]}")
    found: dict[_Rank, dict[str, TensorAt]] = {rank: {} for rank in sorted(parts)}
    for name, (file, header) in zip(paths, each_file_header([folder.file(name) for name in paths]), strict=True):
        tensors = found[paths[name]]
        for tensor in tensors_in(file, header):
            if tensors.setdefault(tensor.name, tensor) is not tensor:
                problem = f"is in {tensors[tensor.name].file} too"
                raise SourceError(f"{file}: {tensor.name!r}", problem, _COPY, code="source.tensor-twice")
    return {rank: list(tensors.values()) for rank, tensors in found.items()}


def _bad_ranks(folder: Folder, found: str) -> SourceError:
    problem = f"expected the files of every rank, model-rank-R-part-N or model-pp-P-tp-T-part-N, found {found}"
    return SourceError(str(folder), problem, _COPY, code="source.vllm-ranks")


def _merged(
    stored: Mapping[_Rank, Sequence[TensorAt]], shape: ModelShape, num_keys: int, tp: int
) -> dict[str, TensorAt]:
    """Return the weights, whole, by FQN."""
    _check_all_ranks(stored, tp)
    owners = {fqn: group[0] for group in shape.ties for fqn in group}
    copies: dict[_Region, list[TensorAt]] = {}
    for (_, rank), tensors in stored.items():
        for tensor in tensors:
            for part in _parts(tensor, shape, num_keys, rank, tp):
                fqn = owners.get(part.name, part.name)
                copies.setdefault((fqn, part.part), []).append(replace(part, name=fqn))
    joined = join_slices(_only(alike) for (_, part), alike in copies.items() if part is None or alike[0].nbytes)
    return {fqn: merge_slices(slices) for fqn, slices in joined.items()}


def _check_all_ranks(stored: Mapping[_Rank, Sequence[TensorAt]], tp: int) -> None:
    """Refuse a tensor that not all ranks of one stage have."""
    places: dict[str, list[tuple[_Rank, TensorAt]]] = {}
    for rank, tensors in stored.items():
        for tensor in tensors:
            places.setdefault(tensor.name, []).append((rank, tensor))
    for name, found in places.items():
        file = found[-1][1].file
        if len({stage for (stage, _), _ in found}) > 1:
            raise SourceError(f"{file}: {name!r}", "is on another stage, too", _COPY, code="source.tensor-twice")
        if len(found) != tp:
            there = sorted(rank for (_, rank), _ in found)
            problem = f"expected it of {tp} ranks, found it of {', '.join(map(str, there[:8]))}"
            raise SourceError(f"{file}: {name!r}", problem, _COPY, code="source.missing-tensor")


def _parts(tensor: TensorAt, shape: ModelShape, num_keys: int, rank: int, tp: int) -> Iterator[TensorAt]:
    """Yield what of which tensors of Hugging Face's model a rank's tensor has; one of an unknown name as it is."""
    match = LAYER.fullmatch(tensor.name)
    layer, (rest, _, leaf) = (match[1], match[2].rpartition(".")) if match else ("", ("", "", ""))
    if rest in FUSED:
        names = {part: f"model.layers.{layer}.{part}.{leaf}" for part in FUSED[rest]}
        if not shape.tensors.keys() >= set(names.values()):
            yield tensor
            return
        rows = {part: rows_of_part(part, shape.tensors[fqn][0], num_keys, rank, tp) for part, fqn in names.items()}
        num_rows = sum(end - begin for begin, end in rows.values())
        columns = shape.tensors[names[FUSED[rest][0]]][1:]
        _check_shape(tensor, (num_rows, *columns))
        position = tensor.begin
        for part, (begin, end) in rows.items():
            yield _rows(tensor, names[part], (begin, end), shape.tensors[names[part]], position)
            position += nbytes_of(tensor.dtype, (end - begin, *columns))
    elif match and match[2] in SCALES:
        return
    elif (whole := shape.tensors.get(tensor.name)) is None:
        yield tensor
    elif tensor.name in (EMBEDDING, HEAD):
        begin, end, num_rows = rows_of_vocabulary(whole[0], rank, tp)
        _check_shape(tensor, (num_rows, *whole[1:]))
        yield _rows(tensor, tensor.name, (begin, end), whole, tensor.begin)
    elif match and match[2] in BY_COLUMNS:
        count = whole[1] // tp
        _check_shape(tensor, (whole[0], count))
        yield replace(tensor, part=_region((0, rank * count), tensor.shape, whole))
    else:
        _check_shape(tensor, whole)
        yield tensor


def _rows(tensor: TensorAt, fqn: str, rows: tuple[int, int], whole: tuple[int, ...], position: int) -> TensorAt:
    """Return rows of a tensor that are at a position of a rank's file."""
    shape = (rows[1] - rows[0], *whole[1:])
    part = _region((rows[0], *(0 for _ in whole[1:])), shape, whole)
    nbytes = nbytes_of(tensor.dtype, shape)
    return replace(tensor, name=fqn, shape=shape, begin=position, nbytes=nbytes, part=part)


def _region(offset: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> Slice | None:
    return None if shape == whole else Slice(offset=offset, shape=shape, whole_shape=whole)


def _check_shape(tensor: TensorAt, expected: tuple[int, ...]) -> None:
    where = f"{tensor.file}: {tensor.name!r}"
    if tensor.shape != expected:
        problem = f"expected {list(expected)} (a rank's part, {CONFIG_NAME}), found {list(tensor.shape)}"
        raise SourceError(f"{where}.shape", problem, _COPY, code="source.shape-mismatch")
    if tensor.dtype not in _DTYPES:
        problem = f"expected {', '.join(_DTYPES)}, found {tensor.dtype}: quantized weights are not supported"
        raise SourceError(f"{where}.dtype", problem, _ORIGINAL, code="source.quantized-dtype")


def _only(copies: Sequence[TensorAt]) -> TensorAt:
    """Return the tensor that several ranks have alike; when it is read, they are compared."""
    first = copies[0]
    if len(copies) == 1:
        return first
    for other in copies[1:]:
        if other.dtype != first.dtype:
            raise _different(first, other)
    return derive(first, first.dtype, f"as {len(copies)} ranks have it", tuple(copies), partial(_compared, copies))


def _compared(copies: Sequence[TensorAt]) -> Iterator[Buffer]:
    with ExitStack() as stack:
        blocks = [stack.enter_context(closing(read_blocks(one))) for one in copies]
        for first, *others in zip(*blocks, strict=True):
            expected = bytes(first)  # comparing views compares their elements one by one
            for copy, other in zip(copies[1:], others, strict=True):
                if expected != bytes(other):
                    raise _different(copies[0], copy)
            yield expected


def _different(first: TensorAt, other: TensorAt) -> SourceError:
    problem = f"is not what {first.file} has, of the same part of {first.name}"
    return SourceError(f"{other.file}: {other.name!r}", problem, _COPY, code="source.ranks-differ")
