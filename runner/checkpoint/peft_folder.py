"""The PEFT folder of adapters that --save writes and --lora-from reads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from manifests.digest import digest_pieces
from manifests.errors import SourceError, refused_by_system
from manifests.models.adapters import (
    BASE_DIGEST,
    BASE_PARENTS,
    BASE_TENSORS,
    LORA_A,
    PEFT_CONFIG,
    PEFT_PREFIX,
    PEFT_WEIGHTS,
)
from manifests.safetensors import encode_header, layout_tensors
from manifests.schema import WEIGHTS
from manifests.store import write_file
from runner.bundle.packed import Packed
from runner.checkpoint.adapter_record import (
    AdapterRecord,
    adapters_of,
    check_base,
    files_of_peft,
    is_other_base,
    record_of,
)
from runner.checkpoint.shard_file import NAMES
from runner.checkpoint.state import Held
from runner.config.flags import TrainOptions
from runner.distributed.fail_together import check_same_option, from_rank_0, raise_on_all_ranks, to_first_rank
from runner.load.stored import StageLoader
from runner.models.adapters import Adapters
from runner.models.family import Family, OnTransformers
from runner.tensors.local_shard import Piece, bytes_of
from stores.folders.publish import Swap, exchange, publishing


def load_adapters(
    pieces: Sequence[Piece], family: Family, options: TrainOptions, stored: StageLoader, origin: Packed
) -> tuple[StageLoader, AdapterRecord]:
    """Fill a run's adapters from a checkpoint of adapters, a PEFT folder, or the seed; every rank calls this.

    `stored` loads the base. Returns the loader of the optimizer state, and what checkpoints say of the adapters.
    """
    assert isinstance(family, OnTransformers)
    adapters, base = family.adapters, stored.origin
    assert adapters is not None
    record: AdapterRecord | None = None
    digest: str | None = None
    with raise_on_all_ranks("load"):
        if dist.get_rank() == 0:
            record = record_of(adapters.lora, adapters.base, base)
            if base is not origin:
                check_base(origin, record)
        if base is origin and options.adapter is not None:
            digest = read_peft(options.adapter, adapters, pieces, record)
        elif base is origin:
            _init_adapters(pieces, options.data.seed)
    check_same_option("--lora-from", digest)
    record = from_rank_0(record)
    assert record is not None
    if base is not origin:
        stored = replace(stored, origin=adapters_of(origin, adapters.shapes), cache=None)
        stored.load(pieces, WEIGHTS)
    return stored, record


def save_peft(
    weights: Held,
    adapters: Adapters,
    record: AdapterRecord | None,
    out: Path,
    *,
    pipeline: dist.ProcessGroup | None,
    swap: Swap | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write adapters as a PEFT folder, on rank 0; every rank calls this with what it has of them, and its pipeline.

    All that is written is in the pipeline of rank 0, which gets no messages of others: each would take the memory of
    the longest. `swap` and `check` are as in `save`.
    """
    mine = {piece.fqn: piece.memory for kinds in weights.values() for piece in kinds[WEIGHTS]}
    parts = to_first_rank(mine, pipeline)
    with raise_on_all_ranks("save"):
        if dist.get_rank() != 0:
            return
        assert record is not None
        tensors = {f"{PEFT_PREFIX}{fqn}": tensor for part in parts for fqn, tensor in part.items()}
        names = {PEFT_CONFIG, PEFT_WEIGHTS}
        target = publishing(out, force=swap is not None, find_owned=files_of_peft, wanted=names, swap=swap or exchange)
        with target as folder:
            write_file(folder / PEFT_WEIGHTS, _shard(dict(sorted(tensors.items())), record))
            write_file(folder / PEFT_CONFIG, _config(adapters, record))
            check()


def read_peft(folder: Path, adapters: Adapters, pieces: Iterable[Piece], record: AdapterRecord | None) -> str:
    """Fill this rank's pieces from a PEFT folder, and return the digest of the whole file.

    `record`, on rank 0, is of the base that is launched.
    """
    path = folder / PEFT_WEIGHTS
    try:
        with open(path, "rb") as stream:  # first: a mapping raises SIGBUS, and safetensors no errno
            digest = digest_pieces(iter(partial(stream.read, 1 << 20), b""))
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            parents = metadata.get(BASE_PARENTS, "").split()
            if record is not None and is_other_base(metadata.get(BASE_DIGEST), parents, record):
                problem = "was trained on other weights than those that are launched"
                hint = "launch the model that it was trained on"
                raise SourceError(str(path), problem, hint, code="source.other-adapter")
            names = file.keys()
            shapes = {name.removeprefix(PEFT_PREFIX): tuple(file.get_slice(name).get_shape()) for name in names}
            if shapes != adapters.shapes:
                odd = next(
                    name for name in {**adapters.shapes, **shapes} if shapes.get(name) != adapters.shapes.get(name)
                )
                expected, stored = adapters.shapes.get(odd), shapes.get(odd)
                problem = f"expected {odd} of shape {expected}, found {stored}"
                if expected is None or stored is None:
                    problem = f"lacks {odd}" if stored is None else f"has {odd}, which this run does not train"
                hint = f"its adapters are of another model, or {PEFT_CONFIG} is of another run"
                raise SourceError(str(path), problem, hint, code="source.other-adapter")
            for piece in pieces:
                piece.memory.copy_(file.get_slice(f"{PEFT_PREFIX}{piece.fqn}")[piece.part.index])
        return digest
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # those of safetensors have none
            raise refused_by_system(str(path), error, code="source.bad-adapter") from error
        raise SourceError(str(path), f"cannot be read: {error}", code="source.bad-adapter") from error


def _init_adapters(pieces: Iterable[Piece], seed: int) -> None:
    """Fill adapters as peft does: A as `nn.Linear`, uniformly, and B with zeros.

    Values depend on the seed and the name alone, whatever ranks there are.
    """
    for piece in pieces:
        if not piece.fqn.endswith(LORA_A):
            piece.memory.zero_()
            continue
        mixed = blake2b(f"{seed} {piece.fqn}".encode(), digest_size=8).digest()
        drawn = torch.Generator().manual_seed(int.from_bytes(mixed, "little") >> 1)
        whole = torch.empty(piece.shape).uniform_(-1, 1, generator=drawn) / math.sqrt(piece.shape[1])
        piece.memory.copy_(whole[piece.part.index])


def _config(adapters: Adapters, record: AdapterRecord) -> bytes:
    lora = adapters.lora
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": record.location,
        "r": lora.rank, "lora_alpha": alpha, "lora_dropout": lora.dropout, "use_rslora": lora.is_rank_scaled,
        "target_modules": list(adapters.target), "target_parameters": list(adapters.parameters) or None,
        "fan_in_fan_out": adapters.is_transposed, "bias": "none", "inference_mode": True,
        "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True,
    }  # fmt: skip
    return (json.dumps(config, indent=2) + "\n").encode()


def _shard(tensors: Mapping[str, torch.Tensor], record: AdapterRecord) -> bytes:
    entries = layout_tensors((name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items())
    parents = " ".join(record.parents)
    of_base = {BASE_DIGEST: record.base_digest, BASE_TENSORS: record.base_tensors, BASE_PARENTS: parents}
    metadata = {"format": "pt", **{name: text for name, text in of_base.items() if text}}
    return b"".join(
        (encode_header(entries, metadata), *(bytes(bytes_of(tensor.contiguous())) for tensor in tensors.values()))
    )
