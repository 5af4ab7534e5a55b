"""Training jobs that real ranks run one after the other, out of one launch: see `resume_worker.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.process.torchrun import launch

COMPARED = (
    "DeepseekV3ForCausalLM", "GptOssForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)  # fmt: skip


def job(root: Path, log_dir: Path, *args: object, **more: object) -> dict[str, Any]:
    """Describe a job that trains what is packed in `root` with these flags."""
    log_dir.mkdir(parents=True, exist_ok=True)
    flags = [str(arg) for arg in (*args, "--log-dir", log_dir)]
    architecture = json.loads((root / "config.json").read_text())["architectures"][0]
    flags += ["--no-self-check"] if architecture in COMPARED else []  # compared with transformers here
    return {"root": str(root), "args": flags, "log": str(log_dir / "log"), **more}


def run_jobs(num_ranks: int, jobs: Sequence[dict[str, Any]], timeout_s: float = 150) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "jobs.json")
        path.write_text(json.dumps(jobs, default=str))
        launch(num_ranks, "runner/checkpoint/resume_worker.py", path, timeout_s=timeout_s)


def said(log_dir: Path) -> str:
    """Return what rank 0 logged, and `error: CODE at PLACE` where the job failed."""
    return (log_dir / "log").read_text()


def lines_of(log_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]


def losses_of(log_dir: Path) -> list[float]:
    return [line["loss"] for line in lines_of(log_dir) if "loss" in line]
