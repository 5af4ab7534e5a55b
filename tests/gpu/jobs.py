"""Training jobs of small models on a device: what ranks run, by how many, and what came of each.

The same jobs run on a GPU and, as their twins, on the CPU. Ranks that share a GPU use gloo, others NCCL.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.builders import run
from tests.process.torchrun import launch

SEQ_LEN, VOCAB_SIZE = 48, 96  # of all models of tests/data; longer than the tiny windows of 16
_SMALL = ("--data", "synthetic", "--steps", "3", "--seq-len", str(SEQ_LEN), "--global-batch", "8", "--max-norm", "0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A packed model and its training flags, which may replace those of all jobs; `out` gets a file of each rank."""

    packed: str
    out: str
    num_ranks: int = 1
    flags: tuple[str, ...] = ()
    vocab_size: int = VOCAB_SIZE


def pack(source: Path, num_ranks: int) -> Path:
    """Pack a model for so many pipeline ranks, beside it."""
    out = source.with_name(f"{source.name}-pp{num_ranks}")
    if not out.exists():
        run("pack", source, "--layout", f"pp={num_ranks}", "--out", out, "--quiet")
    return out


def run_jobs(jobs: Sequence[Job], device: str, folder: Path, timeout_s: float) -> dict[str, list[dict[str, Any]]]:
    """Run jobs, those of as many ranks in one launch, and return what their ranks found, by `out`."""
    for num_ranks in sorted({job.num_ranks for job in jobs}):
        flags = (*_SMALL, *(["--no-self-check"] if device == "cpu" else []))
        chosen = [asdict(job) | {"flags": [*flags, *job.flags]} for job in jobs if job.num_ranks == num_ranks]
        (folder / f"{num_ranks}.json").write_text(json.dumps(chosen))
        launch(num_ranks, "../gpu/job_worker.py", folder / f"{num_ranks}.json", device, timeout_s=timeout_s)
    return {job.out: [torch.load(f"{job.out}-{rank}.pt") for rank in range(job.num_ranks)] for job in jobs}


def gradients_of(ranks: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the gradients of the first step, of all ranks, by Hugging Face name."""
    return {fqn: gradient for rank in ranks for fqn, gradient in rank["gradients"].items()}
