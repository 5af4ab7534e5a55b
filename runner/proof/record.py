"""A proof is kept in the run's `run.json`, so that a restart or a requeue does not repeat it."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from manifests.digest import digest_bytes
from runner.distributed.fail_together import from_rank_0
from runner.proof.combination import Combination
from runner.proof.proving import prove
from runner.rundir.records import read_run_record, write_run_record

logger = logging.getLogger("runner")

_KEY = "self_check"
_PACKAGES = ("reshard", "torch", "torchtitan", "transformers")


def prove_once(run: Combination, config: Mapping[str, Any], log_dir: Path, *, is_kept: bool) -> None:
    """Check a combination, unless this run's record has the proof; every rank calls this.

    `is_kept`: whether its digest says all that it depends on; a family of another package may change.
    """
    digest = _digest(run, config)
    record = read_run_record(log_dir) if is_kept and dist.get_rank() == 0 else None
    if from_rank_0(record is not None and _object(record.get(_KEY)).get("digest") == digest):
        if dist.get_rank() == 0:
            logger.info("self-check: this combination has passed it in an earlier launch of this run")
        return
    proof = prove(run)
    if dist.get_rank():
        return
    logger.info(
        "self-check: a tiny %s trains on %d rank%s with %s%s as one process trains it: loss to %.0e, norm %.0e, "
        "gradients %.0e, weights %.0e (%.1f s)",
        run.family.architecture, len(run.ranks), "s" * (len(run.ranks) > 1), run.timetable.name, f" {run}".rstrip(),
        proof["loss"], proof["norm"], proof["gradient"], proof["weight"], proof["seconds"],
    )  # fmt: skip
    record = read_run_record(log_dir)
    with contextlib.suppress(OSError):  # training does not depend on it
        if record is not None and is_kept:
            write_run_record(log_dir, {**record, _KEY: {"digest": digest, "ranks": len(run.ranks), **proof}})


def _digest(run: Combination, config: Mapping[str, Any]) -> str:
    options = run.options
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    facts = (run.stages, run.timetable, run.degrees, run.has_documents, run.batch, options.compute, options.optim,
             options.balance, options.degrees.context_method, options.lora, options.train_only, options.loss, versions,
             _code())  # fmt: skip
    return digest_bytes(f"{json.dumps(config, sort_keys=True, default=str)} {facts}".encode())


def _code() -> str:
    """Return the digest of the runner's own code, whose version may stay while it changes."""
    paths = sorted(Path(__file__).parents[1].rglob("*.py"))
    return digest_bytes(b"".join(path.read_bytes() for path in paths))


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
