"""What a checkpoint records of adapters and of their base. No torch.

# Note [Checkpoints of adapters]
A checkpoint of a run that trains adapters has their tensors and optimizer state alone, in folders of their stages, and
`adapter.json`, which says how they were made and which base they belong to: the manifest from which its weights were
read, and a digest of the adapted tensors' digests, which another layout of the same weights has, too. A resumed run
reads the base from the manifest that it launches.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from manifests.errors import CheckpointError
from manifests.jsontext import parse_json_object
from manifests.models.adapters import (
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    RECORD_NAME,
    BaseTensor,
    digest_of_base,
    digest_of_ranges,
    encode_base,
    has_adapters,
)
from manifests.schema import WEIGHTS, TrainingState
from manifests.store import file_digest, read_small_file
from runner.bundle.packed import Packed
from runner.config.flags import TrainOptions
from runner.config.lora import LoraOptions
from stores.bundles import TensorAt, join_slices

_VERSION = 1
logger = logging.getLogger("runner")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRecord:
    """What a checkpoint says of its adapters, and of the base that it refers to."""

    lora: LoraOptions
    location: str  # of the base's manifest
    digest: str  # of that manifest
    base_digest: str | None  # see `digest_of_base`
    base_tensors: str | None = None  # for PEFT folders, see `encode_base`
    parents: tuple[str, ...] = ()  # digests of the manifests that the base descends from

    def encode(self) -> bytes:
        base = {"location": self.location, "digest": self.digest, "tensors": self.base_digest}
        return (json.dumps({"version": _VERSION, "base": base, "lora": asdict(self.lora)}, indent=1) + "\n").encode()


def adapters_of(packed: Packed, shapes: Mapping[str, tuple[int, ...]]) -> Packed:
    """Return a checkpoint of adapters as one of which these are the tensors."""
    return replace(packed, shape=replace(packed.shape, tensors=shapes))


def base_of(launched: Packed, origin: Packed) -> Packed:
    """Return from which manifest a run reads the weights that have no adapters."""
    return launched if has_adapters(origin.manifest) else origin


def record_of(lora: LoraOptions, adapted: Collection[str], base: Packed) -> AdapterRecord:
    """Return what the checkpoints of a run say; this reads the headers of the whole base."""
    adapted, slices = frozenset(adapted), dict[str, tuple[TensorAt, ...]]()
    for stage in base.manifest.stages:
        slices |= join_slices(tensor for tensor in base.bundles.tensors_on(stage, WEIGHTS) if tensor.name in adapted)
    digests = ((fqn, parts[0].digest if parts[0].part is None else None) for fqn, parts in slices.items())
    tensors = {fqn: tensor for fqn, parts in slices.items() if (tensor := _tensor_of(parts)) is not None}
    return AdapterRecord(
        lora=lora,
        location=base.location,
        digest=base.read.digest,
        base_digest=digest_of_base(digests) if slices.keys() == adapted else None,
        base_tensors=encode_base(tensors) if tensors else None,
        parents=tuple(parent.digest for parent in base.manifest.parents),
    )


def check_adapters(origin: Packed, options: TrainOptions, training: TrainingState | None) -> None:
    """Check that a run trains the adapters that a checkpoint has, if it has any."""
    if not has_adapters(origin.manifest):
        if options.lora is not None and training is not None:
            problem = "has no adapters: its optimizer state is of the whole model"
            hint = "--resume DIR --resume-weights-only starts a new run with its weights as the base"
            raise CheckpointError(origin.where, problem, hint, code="resume.other-adapters")
        return
    stored = _decode(origin)["lora"]
    lora = None if options.lora is None else json.loads(json.dumps(asdict(options.lora)))
    if lora != stored:
        mine = {} if lora is None else lora
        odd = next((name for name in {**stored, **mine} if stored.get(name) != mine.get(name)), "none of the options")
        problem = f"has adapters with {odd} {stored.get(odd)!r}, and this run trains "
        problem += f"{odd} {mine[odd]!r}" if odd in mine else "none"
        hint = "repeat --lora-rank and the other LoRA flags of the run that wrote it"
        raise CheckpointError(origin.where, problem, hint, code="resume.other-adapters")


def check_launched(launched: Packed) -> None:
    """Check that what is launched has the weights of a model."""
    if has_adapters(launched.manifest):
        problem = "has adapters alone, of the base that is launched"
        hint = f"launch {_decode(launched)['base'].get('location')}, and resume with --resume {launched.root}"
        raise CheckpointError(launched.where, problem, hint, code="checkpoint.adapters-alone")


def check_base(origin: Packed, record: AdapterRecord) -> None:
    """Check that a checkpoint's adapters belong to the launched base, as far as digests say."""
    stored = _decode(origin)["base"]
    if is_other_base(stored.get("tensors"), [parent.digest for parent in origin.manifest.parents], record):
        raise CheckpointError(
            origin.where,
            f"has adapters of {stored.get('location')}, and the weights of {record.location} differ",
            f"launch {stored.get('location')}, or another layout of it",
            code="resume.other-base",
        )
    if None in (stored.get("tensors"), record.base_digest) and stored.get("digest") != record.digest:
        logger.warning("%s: its adapters are of %s, and no digests tell whether %s has the same weights",
                       origin.where, stored.get("location"), record.location)  # fmt: skip


def is_other_base(base_digest: str | None, parents: Collection[str], record: AdapterRecord) -> bool:
    """Return whether adapters are of other weights than those of a run, as far as digests say.

    `parents` are digests of the manifests that the adapters descend from.
    """
    if base_digest is None and record.base_digest is not None:
        # What descends from weights with digests and has none was trained: ranks wrote it in slices.
        return record.digest in parents
    return None not in (base_digest, record.base_digest) and base_digest != record.base_digest


def files_of_peft(out: Path) -> Collection[str] | None:
    """Return the files of a PEFT folder, which --force may replace."""
    names = {PEFT_CONFIG, PEFT_WEIGHTS}
    return names if all((out / name).is_file() for name in names) else None


def _tensor_of(slices: Sequence[TensorAt]) -> BaseTensor | None:
    """Return a tensor in slices of whole rows that have digests; None for others."""
    digests = [part.digest for part in slices if part.digest and part.shape[1:] == part.whole_shape[1:]]
    if len(digests) < len(slices):
        return None
    sizes = tuple(part.nbytes for part in slices)
    return BaseTensor(dtype=slices[0].dtype, digest=digest_of_ranges(digests), sizes=sizes)


def _decode(origin: Packed) -> Mapping[str, Any]:
    path = origin.root / RECORD_NAME
    record = parse_json_object(read_small_file(path, file_digest(origin.manifest, RECORD_NAME)), str(path))
    if record.get("version") != _VERSION or not all(isinstance(record.get(name), dict) for name in ("base", "lora")):
        raise CheckpointError(str(path), f"expected version {_VERSION}", code="checkpoint.bad-adapter-record")
    return record
