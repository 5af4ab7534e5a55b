"""What benchmarks share: time and memory of commands, ratios within a turn, and where and when they ran.

A bench calls `take_turns` with the contenders, so that slow phases of the machine affect all of them alike, and ends
with `write_result({"what": …, **circumstances(), …}, options.out)`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
RESHARD = (sys.executable, "-m", "reshard")
SEQ_LEN, GLOBAL_BATCH = 256, 8  # of a timed step
WARM_STEPS = 3  # before those that count
LLAMA: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": SEQ_LEN,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip

_LOOK_S = 0.005  # between samples of a command's memory

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Resources that a command used; `anonymous_nbytes` is the largest anonymous memory that was sampled."""

    wall_s: float
    cpu_s: float
    anonymous_nbytes: int


def run_quietly(command: Sequence[str]) -> None:
    """Run a command that must succeed, and discard its output."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=_environment())


def run_measured(command: Sequence[str], out: Path | None = None) -> Run:
    """Run a command that must succeed; what it wrote to `out` is removed afterwards, and nothing is left to flush."""
    began_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment())
    most = 0
    while process.poll() is None:
        most = max(most, _anonymous_nbytes(process.pid))
        time.sleep(_LOOK_S)
    wall_s = time.perf_counter() - began_s
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} exited with code {process.returncode}")
    if out is not None:
        shutil.rmtree(out)
        os.sync()  # the next run must not wait for the writes of this one
    return Run(wall_s=wall_s, cpu_s=cpu_s_since(before), anonymous_nbytes=most)


def cpu_s_since(before: resource.struct_rusage) -> float:
    """Return the processor time of the commands that ended since then."""
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime, 4)


def run_ranks(num_ranks: int, script: str, *args: str) -> None:
    """Run a script under torchrun, one thread per rank, with these packages importable."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path(ROOT)}
    subprocess.run([*torchrun, script, *args], check=True, env=environment)


def run_runner(*arguments: object, checkout: Path = ROOT, **environment: str) -> None:
    """Run a command of `runner` of a checkout quietly, one thread per rank."""
    command = [sys.executable, "-c", "from runner.cli import main; main()", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path(checkout), **environment}
    subprocess.run(
        command, cwd=checkout, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )


def write_llama(folder: Path, config: Mapping[str, Any] = LLAMA) -> None:
    """Write a small Llama as Hugging Face has it."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).save_pretrained(folder)


def train(packed: Path, log: Path, num_steps: int, *flags: object, checkout: Path = ROOT, **environment: str) -> None:
    """Train two ranks for some steps."""
    run_runner(
        "launch", packed, "--nproc-per-node", 2, "--log-dir", log, "--", "--data", "synthetic", "--seq-len", SEQ_LEN,
        "--global-batch", GLOBAL_BATCH, "--microbatch", 1, "--steps", num_steps, *flags,
        checkout=checkout, **environment,
    )  # fmt: skip


def step_s(packed: Path, num_steps: int, *, checkout: Path = ROOT, **environment: str) -> float:
    """Train two ranks for some steps; return the median seconds of one after the third."""
    with tempfile.TemporaryDirectory(dir=packed.parent) as log:
        train(packed, Path(log), num_steps, checkout=checkout, **environment)
        lines = [json.loads(line) for line in (Path(log) / "metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_s"] for line in lines if line.get("step", 0) > WARM_STEPS and "tokens_per_s" in line]
    return SEQ_LEN * GLOBAL_BATCH / statistics.median(rates)


def take_turns(
    measures: Mapping[str, Callable[[], Found]],
    num_turns: int,
    *,
    pause_s: float = 0.0,
    num_warmup: int = 1,
    most_s: float = math.inf,
) -> list[dict[str, Found]]:
    """Return the results of all measures, turn by turn, after those of warmup; each begins with the next of them.

    No turn begins if it might end later than `most_s` from the start.
    """
    began_s = time.monotonic()

    def one(measure: Callable[[], Found]) -> Found:
        time.sleep(pause_s)
        return measure()

    names, turns = list(measures), list[dict[str, Found]]()
    for turn in range(num_turns + num_warmup):
        if turn > num_warmup and (time.monotonic() - began_s) * (turn + 1) / turn > most_s:
            break
        first = turn % len(names)
        turns.append({name: one(measures[name]) for name in (*names[first:], *names[:first])})
    return turns[num_warmup:]


def median_ratio(ours: Iterable[float], theirs: Iterable[float], digits: int = 3) -> float:
    """Return the median of the ratios of two values of the same turn."""
    return round(statistics.median(one / max(other, 1e-9) for one, other in zip(ours, theirs, strict=True)), digits)


def summary(runs: Sequence[Run]) -> dict[str, object]:
    """Return a command's times and its peak memory."""
    return {
        "wall_s": [round(run.wall_s, 3) for run in runs],
        "median_s": round(statistics.median(run.wall_s for run in runs), 3),
        "median_cpu_s": round(statistics.median(run.cpu_s for run in runs), 3),
        "peak_anonymous_mb": round(max(run.anonymous_nbytes for run in runs) / 1e6, 1),
    }


def load_average() -> float:
    """Return the load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def circumstances() -> dict[str, object]:
    """Return the date, commit and machine that a result records."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }


def options_of(doc: str | None, *, gb: float | None = None, runs: int = 5) -> argparse.ArgumentParser:
    """Return a parser of the options that benchmarks share; `doc` is the benchmark's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if gb is not None:
        parser.add_argument("--gb", type=float, default=gb)
    parser.add_argument("--runs", type=int, default=runs)
    parser.add_argument("--folder", help="scratch folder")
    parser.add_argument("--out", help="file to write the result to")
    return parser


def write_result(result: Mapping[str, Any], out: str | None) -> None:
    """Print a result as JSON, and write it to --out if given."""
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if out:
        Path(out).write_text(text)


def _path(checkout: Path) -> str:
    """Return this process's PYTHONPATH, which may have packages that .venv lacks, after a checkout."""
    return os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))


def _environment() -> dict[str, str]:
    """Return this process's, with which Python keeps what it compiled: or each run would compile all modules again."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _anonymous_nbytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0
