"""A stage's bundle into its parameters: own shards only, each byte read once, digests checked on the way."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from manifests.digest import PREFIX
from manifests.errors import InputError
from manifests.safetensors import Header, TensorEntry
from manifests.schema import Manifest, Stage
from manifests.store import open_shard
from runner.fill import TORCH_DTYPES, fill
from stores.base import Reader
from stores.local import LocalFile

__all__ = ["LoadReport", "load_bundle"]


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
    jobs = [
        _Job(parameters[entry.name], entry, path, header.nbytes + entry.begin, digests[entry.name])
        for path, header in headers.items()
        for digests in (header.digests(str(path)),)
        for entry in sorted(header.tensors, key=lambda entry: (entry.begin, entry.end))
        if entry.name in parameters
    ]
    _fill_all(jobs)
    for fqn, leader in copies.items():
        parameters[fqn].detach().copy_(parameters[leader].detach())
    return LoadReport(
        stage=stage.index,
        num_tensors=len(jobs),
        nbytes=sum(job.entry.nbytes for job in jobs),
        load_s=time.perf_counter() - started_s,
    )


@dataclass(frozen=True, slots=True)
class _Job:
    parameter: torch.Tensor
    entry: TensorEntry
    path: Path
    position: int
    digest: str


def _fill_all(jobs: Sequence[_Job]) -> None:
    """Fill every parameter, with one thread from the front of the shards and one from the back."""
    queue, stop = deque(jobs), threading.Event()

    def work(take: Callable[[], _Job]) -> None:
        readers: dict[Path, Reader] = {}
        try:
            while not stop.is_set():
                try:
                    job = take()
                except IndexError:  # none left
                    return
                if job.path not in readers:
                    readers[job.path] = LocalFile(job.path).open(())
                _fill(job, readers[job.path])
        finally:
            for reader in readers.values():
                reader.close()

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(work, take) for take in (queue.popleft, queue.pop)]
        try:
            done, _ = wait(workers, return_when=FIRST_EXCEPTION)
            for worker in done:
                worker.result()
        finally:
            stop.set()


def _fill(job: _Job, reader: Reader) -> None:
    found = fill(job.parameter, TORCH_DTYPES[job.entry.dtype], reader, job.position)
    if found != job.digest:
        raise InputError(
            f"{job.path}: {job.entry.name!r}",
            f"expected {PREFIX}{job.digest}, found {PREFIX}{found}",
            "the shard was damaged after it was packed; reshard verify names all damage; pack it again",
        )


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


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
