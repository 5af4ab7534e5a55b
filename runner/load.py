"""A stage's bundle into its parameters: own shards only, each byte read once, digests checked on the way."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from manifests.digest import PREFIX, Hasher
from manifests.errors import InputError
from manifests.safetensors import Header, TensorEntry
from manifests.schema import Manifest, Stage
from manifests.store import open_shard

__all__ = ["TORCH_DTYPES", "LoadReport", "load_bundle"]

_BUFFER_NBYTES = 4 << 20
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What one stage read: `nbytes` of tensor data, in `load_s` seconds."""

    stage: int
    num_tensors: int
    nbytes: int
    load_s: float


def load_bundle(
    parameters: Mapping[str, torch.Tensor],
    manifest: Manifest,
    stage: Stage,
    root: Path,
    ignored_suffixes: tuple[str, ...] = (),
) -> LoadReport:
    """Fill a stage's parameters, keyed by HF FQN, with its bundle's tensors, in place.

    Every rank calls this for its own stages; it runs no collectives. A parameter that is stored in
    another floating dtype is cast. A tied parameter that is stored under its group's first name on this
    stage alone is copied from there.

    Shapes: as stored; see `manifests.models`.
    Raises:
        InputError: a shard is missing or damaged, a tensor is missing, unexpected or misshapen, or
            bytes are not what their digest says.
    """
    started_s = time.perf_counter()
    headers = {root / shard.path: open_shard(root, shard) for shard in stage.shards}
    copies = _copies(parameters, headers.values(), manifest, stage)
    _check_names(parameters, headers.values(), stage, copies, ignored_suffixes)
    num_tensors, nbytes = 0, 0
    for path, header in headers.items():
        digests = header.digests(str(path))
        with open(path, "rb", buffering=0) as file:
            for entry in sorted(header.tensors, key=lambda entry: (entry.begin, entry.end)):
                if entry.name not in parameters:
                    continue
                place = f"{path}: {entry.name!r}"
                found = _fill(parameters[entry.name], entry, file.fileno(), header.nbytes, place)
                if found != digests[entry.name]:
                    raise InputError(
                        place,
                        f"expected {PREFIX}{digests[entry.name]}, found {PREFIX}{found}",
                        "the shard was damaged after it was packed; reshard verify names all damage; pack it again",
                    )
                num_tensors, nbytes = num_tensors + 1, nbytes + entry.nbytes
    return LoadReport(stage=stage.index, num_tensors=num_tensors, nbytes=nbytes, load_s=time.perf_counter() - started_s)


def _copies(
    parameters: Mapping[str, torch.Tensor], headers: Iterable[Header], manifest: Manifest, stage: Stage
) -> dict[str, str]:
    """Give each tied parameter that this stage does not store, with the name that it is stored under here."""
    stored = {entry.name for header in headers for entry in header.tensors}
    copies: dict[str, str] = {}
    for group in manifest.ties:
        here = [member.fqn for member in group.members if member.stage == stage.index]
        if here and here[0] in stored:
            copies |= {fqn: here[0] for fqn in here[1:] if fqn not in stored and fqn in parameters}
    return copies


def _check_names(
    parameters: Mapping[str, torch.Tensor],
    headers: Iterable[Header],
    stage: Stage,
    copies: Mapping[str, str],
    ignored_suffixes: tuple[str, ...],
) -> None:
    where = f"stages[{stage.index}]"
    entries = {entry.name: entry for header in headers for entry in header.tensors}
    missing = sorted(parameters.keys() - entries.keys() - copies.keys())
    if missing:
        raise InputError(where, f"no shard holds {_some(missing)}", "the bundle is incomplete; pack it again")
    unexpected = sorted(
        fqn for fqn in entries.keys() - parameters.keys() if not fqn.endswith(ignored_suffixes or ("\0",))
    )
    if unexpected:
        raise InputError(where, f"its shards hold {_some(unexpected)}, which its modules do not have")
    for fqn, parameter in parameters.items():
        entry = entries.get(fqn)
        if entry and entry.shape != tuple(parameter.shape):
            raise InputError(
                f"{where}: {fqn!r}.shape",
                f"expected {list(parameter.shape)} (config.json), found {list(entry.shape)}",
                "weights and config disagree; pack both from one revision",
            )
        if entry and entry.dtype not in TORCH_DTYPES:
            raise InputError(
                f"{where}: {fqn!r}.dtype",
                f"expected one of {', '.join(TORCH_DTYPES)}, found {entry.dtype}",
            )


@torch.no_grad()
def _fill(parameter: torch.Tensor, entry: TensorEntry, file: int, data_begin: int, place: str) -> str:
    """Read one tensor into `parameter` and give the hex digest of its bytes.

    The bytes go straight into the parameter where it lies on the CPU in the stored dtype, and
    through one small buffer where it does not.
    """
    dtype, hasher = TORCH_DTYPES[entry.dtype], Hasher()
    target = parameter.detach().view(-1)
    direct = target.device.type == "cpu" and target.dtype == dtype
    staging = target if direct else torch.empty(_BUFFER_NBYTES // dtype.itemsize, dtype=dtype)
    room = staging.view(torch.uint8).numpy().data
    position = 0
    while position < entry.nbytes:
        part = room[position:][:_BUFFER_NBYTES] if direct else room[: entry.nbytes - position]
        _read_exactly(file, part, data_begin + entry.begin + position, place)
        hasher.update(part)
        if not direct:
            first, count = position // dtype.itemsize, len(part) // dtype.itemsize
            target[first : first + count].copy_(staging[:count])
        position += len(part)
    return hasher.hexdigest()


def _read_exactly(file: int, part: memoryview, position: int, place: str) -> None:
    while part:
        found = os.preadv(file, [part], position)
        if found == 0:
            raise InputError(place, "the file ends within this tensor", "the shard was cut short; pack it again")
        part, position = part[found:], position + found


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
