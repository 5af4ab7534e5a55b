"""A checkpoint's tensors into memory, whatever stages hold them: each byte read once, digests checked on the way."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from manifests.digest import PREFIX, Hasher
from manifests.errors import InputError
from manifests.models import ModelShape, module_of
from manifests.schema import WEIGHTS, Holds, Stage
from runner.fill import TORCH_DTYPES, fill
from stores.base import InputFile, Reader, merge_ranges
from stores.bundles import Bundles, TensorAt

__all__ = ["LoadReport", "load_tensors"]

_RUN_NBYTES = 64 << 20  # what a thread reads before it takes more


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What one rank read: `nbytes` of tensor data, in `load_s` seconds."""

    num_tensors: int
    nbytes: int
    load_s: float


def load_tensors(
    tensors: Mapping[str, torch.Tensor], bundles: Bundles, shape: ModelShape, holds: Holds = WEIGHTS
) -> LoadReport:
    """Fill a rank's tensors, keyed by HF FQN, with weights or moments, in place.

    Every rank calls this for what it holds; it runs no collectives, and opens only files of the stages
    that hold these FQNs there, whatever stages are trained here. What is stored in another floating dtype
    is cast. A replica that is not stored beside its owner gets the owner's bytes.

    Shapes: as stored; see `manifests.models`.
    Raises:
        InputError: a shard is missing or damaged, a tensor is missing, unexpected or misshapen, or
            bytes are not what their digest says (those of virtual bundles have none).
    """
    started_s = time.perf_counter()
    wanted: dict[_Bytes, list[str]] = defaultdict(list)  # two tied names may stand for the same bytes
    found: dict[_Bytes, TensorAt] = {}
    for fqn, at in _locate(tensors, bundles, shape, holds).items():
        _check_kind(at, tensors[fqn])
        key = at.file, at.begin, at.shape
        wanted[key].append(fqn)
        found[key] = at
    in_order = sorted(found, key=lambda key: (str(key[0]), key[1]))
    _fill_all([(tensors[wanted[key][0]], found[key]) for key in in_order])
    for first, *others in wanted.values():
        for fqn in others:
            tensors[fqn].detach().copy_(tensors[first].detach())
    return LoadReport(
        num_tensors=len(found),
        nbytes=sum(at.nbytes for at in found.values()),
        load_s=time.perf_counter() - started_s,
    )


_Bytes = tuple[InputFile, int, tuple[int, ...]]  # a file, where in it, and the shape of what begins there
_Job = tuple[torch.Tensor, TensorAt]


def _locate(fqns: Iterable[str], bundles: Bundles, shape: ModelShape, holds: Holds) -> dict[str, TensorAt]:
    manifest, opened = bundles.manifest, dict[int, dict[str, TensorAt]]()
    stage_of = {module: stage.index for stage in manifest.stages for module in stage.modules}
    # A replica on its owner's stage may be left out: it has the owner's bytes.
    owners = {
        replica.fqn: group.owner.fqn
        for group in manifest.ties
        for replica in group.replicas
        if replica.stage == group.owner.stage
    }
    located, missing = dict[str, TensorAt](), defaultdict[int, list[str]](list)
    for fqn in fqns:
        stage = stage_of[module_of(fqn, stage_of) or ""]
        if stage not in opened:
            opened[stage] = _open_stage(manifest.stages[stage], bundles, shape, holds)
        at = opened[stage].get(fqn) or opened[stage].get(owners.get(fqn, ""))
        if at is None:
            missing[stage].append(fqn)
        else:
            located[fqn] = at
    for stage, names in sorted(missing.items()):
        what = "" if holds == WEIGHTS else f"the {holds} of "
        raise InputError(
            f"{bundles.root}: stages[{stage}]",
            f"no shard holds {what}{_some(sorted(names))}",
            "the bundle is incomplete; write it again",
        )
    return located


def _open_stage(stage: Stage, bundles: Bundles, shape: ModelShape, holds: Holds) -> dict[str, TensorAt]:
    """Give what a stage stores of one kind, having seen that it is the model's and the stage's own."""
    modules, found = frozenset(stage.modules), dict[str, TensorAt]()
    ignored = (shape.ignored_suffixes if holds == WEIGHTS else ()) or ("\0",)
    for at in bundles.tensors_on(stage, holds):
        if at.name in found:
            raise InputError(f"{at.file}: {at.name!r}", "is in two shards")
        found[at.name] = at
    unexpected = sorted(
        fqn
        for fqn in found
        if module_of(fqn, modules) is None or (fqn not in shape.tensors and not fqn.endswith(ignored))
    )
    if unexpected:
        raise InputError(
            f"{bundles.root}: stages[{stage.index}]",
            f"its shards hold {_some(unexpected)}, which its modules do not have",
        )
    return found


def _check_kind(at: TensorAt, tensor: torch.Tensor) -> None:
    where = f"{at.file}: {at.name!r}"
    if at.shape != tuple(tensor.shape):
        raise InputError(
            f"{where}.shape",
            f"expected {list(tensor.shape)} (config.json), found {list(at.shape)}",
            "weights and config disagree; pack both from one revision",
        )
    if at.dtype not in TORCH_DTYPES:
        raise InputError(f"{where}.dtype", f"expected one of {', '.join(TORCH_DTYPES)}, found {at.dtype}")


def _fill_all(jobs: Sequence[_Job]) -> None:
    """Fill every tensor, with one thread from the front of the files and one from the back."""
    queue, stop = deque(_runs(jobs)), threading.Event()

    def work(take: Callable[[], list[_Job]]) -> None:
        while not stop.is_set():
            try:
                run = take()
            except IndexError:  # none left
                return
            _fill_run(run, stop)

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(work, take) for take in (queue.popleft, queue.pop)]
        try:
            done, _ = wait(workers, return_when=FIRST_EXCEPTION)
            for worker in done:
                worker.result()
        finally:
            stop.set()


def _runs(jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
    """Cut jobs into runs of whole tensors in one file, each of them a thread's piece of work."""
    run: list[_Job] = []
    nbytes = 0
    for job in jobs:
        at = job[1]
        if run and (nbytes + at.nbytes > _RUN_NBYTES or at.file != run[-1][1].file):
            yield run
            run, nbytes = [], 0
        run.append(job)
        nbytes += at.nbytes
    if run:
        yield run


def _fill_run(run: Sequence[_Job], stop: threading.Event) -> None:
    reader = run[0][1].file.open(merge_ranges((at.begin, at.end) for _, at in run))
    try:
        for tensor, at in run:
            if stop.is_set():
                return
            _fill(tensor, at, reader)
    finally:
        reader.close()


def _fill(tensor: torch.Tensor, at: TensorAt, reader: Reader) -> None:
    hasher = None if at.digest is None else Hasher()
    fill(tensor, TORCH_DTYPES[at.dtype], reader, at.begin, hasher)
    if hasher is not None and hasher.hexdigest() != at.digest:
        raise InputError(
            f"{at.file}: {at.name!r}",
            f"expected {PREFIX}{at.digest}, found {PREFIX}{hasher.hexdigest()}",
            "the shard was damaged after it was written; reshard verify names all damage",
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
