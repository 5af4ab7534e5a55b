"""The output of `reshard plan --gpus`: the fastest layouts, what excludes the others, and the commands of the first."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Any

from manifests.command import defaults
from manifests.command.console import table
from manifests.command.sizes import show_bytes, write_size
from manifests.schedules.rules import default_schedule
from reshard.formats.open import find_config
from reshard.search.candidates import MARGIN, SearchRequest
from reshard.search.search import Choice, SearchResult

_HEAD = ("step", "tokens/s", "memory", "bubble", "dp", "tp", "cp", "ep", "mb", "ac", "schedule", "layout")
_DTYPES = {"mixed": ("bf16", "fp32"), "bf16": ("bf16", "bf16"), "fp32": ("fp32", "fp32")}


def search_text(result: SearchResult) -> str:
    """Return the fastest layouts as text."""
    request, shape = result.request, result.shape
    lines = [
        f"{shape.architecture}, {shape.num_layers} layers, {shape.num_params:,} parameters",
        f"{request.gpus:,} GPUs of {show_bytes(request.memory_limit)}, of which {MARGIN:.0%} is planned; "
        f"{request.global_batch:,} sequences of {request.seq_len:,} tokens per step; "
        f"--dtype {_DTYPES[result.policy][0]} --master-dtype {_DTYPES[result.policy][1]}",
        f"assumed: {request.hardware} (--hardware); {_computing(request)}, and wait for what they send",
    ]
    if any(choice.candidate.expert > 1 for choice in result.best):
        lines.append("--ep: all-to-alls send tokens to experts and back at these rates, evenly over ranks")
    if result.best:
        rows = [_HEAD, *(_row(result, choice) for choice in result.best)]
        if all(choice.candidate.context == 1 for choice in result.best):
            rows = [(*row[:6], *row[7:]) for row in rows]
        over = sum(choice.forecast.memory > result.limit for choice in result.choices)
        lines += [
            table(rows[0], rows[1:], left_columns=frozenset({"layout", "schedule", "ac"})),
            "dp: replicas x shards; mb: --microbatch",
            f"of {len(result.choices):,} layouts, {over:,} need more memory; the others are slower",
        ]
    elif result.choices:
        least = min(choice.forecast.memory for choice in result.choices)
        lines.append(
            f"DOES NOT FIT: of {len(result.choices):,} layouts, the smallest needs {show_bytes(least)} of "
            f"{show_bytes(result.limit)}; use more GPUs"
        )
        if result.state_nbytes > request.gpus * result.limit:
            lines.append(
                f"weights, gradients and optimizer state alone are {show_bytes(result.state_nbytes)}, which no layout "
                f"changes: at least {-(-result.state_nbytes // result.limit)} GPUs, or adapters "
                "(planned by runner launch --dry-run -- --lora-rank R)"
            )
    else:
        lines.append("NO LAYOUT: no combination of degrees is possible")
    lines += [f"left out: {reason}" for reason in result.refusals]
    if result.best:
        lines += [pack_command(result, result.best[0]), launch_command(result, result.best[0])]
    return "\n".join(lines)


def _computing(request: SearchRequest) -> str:
    if request.measured is not None:
        return "modules take the seconds of the run (--from-run)"
    return f"ranks reach {request.efficiency:.0%} of the peak (--efficiency)"


def search_json(result: SearchResult) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    first = result.best[0] if result.best else None
    return {
        "version": 1,
        "layouts": [
            {
                **asdict(choice.candidate), "layout": choice.candidate.layout.spec, **asdict(choice.forecast),
                "tokens_per_s": _tokens_per_s(result, choice),
            }
            for choice in result.best
        ],
        "num_layouts": len(result.choices),
        "left_out": list(result.refusals),
        "assumed": asdict(result.request),
        "pack": pack_command(result, first) if first else None,
        "launch": launch_command(result, first) if first else None,
    }  # fmt: skip


def pack_command(result: SearchResult, choice: Choice) -> str:
    drop = [word for module in result.drop for word in ("--drop", module)]
    source = "SOURCE" if find_config(result.source) else result.source  # of a config alone nothing can be packed
    described = ("--model", str(result.model)) if result.model else ()
    words = [source, "--layout", choice.candidate.layout.spec, "--out", _folder(result, choice), *drop, *described]
    return shlex.join(["reshard", "pack", *words, *(("--dequantize", "bf16") if result.is_quantized else ())])


def launch_command(result: SearchResult, choice: Choice) -> str:
    """Return the command that trains on it."""
    request, candidate, per_node = result.request, choice.candidate, result.request.per_node
    placement, (dtype, master) = candidate.layout.placement, _DTYPES[candidate.policy]
    schedule = default_schedule(placement) if placement.num_ranks > 1 else candidate.schedule
    is_new = not result.has_optimizer_state  # otherwise flags that are not given are those of the checkpoint
    flags = {  # with their defaults
        "seq-len": (request.seq_len, None), "global-batch": (request.global_batch, None),
        "microbatch": (candidate.microbatch, 1 if is_new else None), "dtype": (dtype, None),
        "master-dtype": (master, dtype if is_new else None), "resume": (None if is_new else "auto", None),
        "ac": (candidate.recompute, "none"), "schedule": (candidate.schedule, schedule),
        "dp-replicate": (candidate.replicate, 1), "dp-shard": (candidate.shard, 1), "tp": (candidate.tensor, 1),
        "cp": (candidate.context, 1), "ep": (candidate.expert, 1), "optimizer": (request.optimizer, defaults.OPTIMIZER),
        "ema": (request.ema, 0.0),
    }  # fmt: skip
    words = [
        _folder(result, choice),
        "--nproc-per-node",
        str(per_node),
        "--gpu-memory",
        write_size(request.memory_limit),
    ]
    # Slurm may give a job only the GPUs that it asks for, and ranks that see none would train on CPUs.
    nodes = ["--nnodes", str(request.gpus // per_node), f"--sbatch-arg=--gpus-per-node={per_node}"]
    cluster = ["--scheduler", "slurm", *nodes, "--", "--device", "cuda"]
    words += [*(cluster if request.gpus > per_node else ["--"]), "--data", "PATH"]
    words += [word for name, (value, usual) in flags.items() if value != usual for word in (f"--{name}", str(value))]
    return shlex.join(["runner", "launch", *words])


def _tokens_per_s(result: SearchResult, choice: Choice) -> float:
    return result.request.global_batch * result.request.seq_len / choice.forecast.step_s


def _folder(result: SearchResult, choice: Choice) -> str:
    return f"./{result.name}-pp{choice.candidate.pipeline}"


def _row(result: SearchResult, choice: Choice) -> tuple[str, ...]:
    candidate, forecast = choice.candidate, choice.forecast
    return (
        f"{forecast.step_s:.3g} s", f"{_tokens_per_s(result, choice):,.0f}", show_bytes(forecast.memory),
        f"{forecast.bubble:.1%}", f"{candidate.replicate} x {candidate.shard}", str(candidate.tensor),
        str(candidate.context), str(candidate.expert), str(candidate.microbatch), str(candidate.recompute),
        candidate.schedule, candidate.layout.spec,
    )  # fmt: skip
