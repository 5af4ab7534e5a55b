"""Time steps of two tensor-parallel ranks on torchtitan's modules and on transformers', turn by turn.

    python bench/tensor_parallel.py --out bench/results/tensor-parallel.json [--runs 9] [--models llama qwen3]

Both are loaded from the same packed folder, by the same two processes with one thread each, and take steps in turns;
each turn begins with the other. Ratios are medians of ratios within a turn, of wall time and of the processor time of
both ranks, which other work affects less. Their losses are compared.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure

ROADS = ("torchtitan", "transformers")
_SMALL = {"num_hidden_layers": 4, "vocab_size": 4096}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "decoder_sparse_step": 1}
_LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64,
    "v_head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 512, "first_k_dense_replace": 1,
}  # fmt: skip
# By name: a class of transformers, and what is changed of the Llama that other benches train.
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 64, **_EXPERTS}),
    "deepseek-v3": ("DeepseekV3", _LATENT),
    "gpt-oss": ("GptOss", {"head_dim": 64, "intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2}),
}
FLAGS = (
    "--data", "synthetic", "--tp", "2", "--seq-len", str(measure.SEQ_LEN), "--global-batch", "2", "--no-self-check",
)  # fmt: skip


def main() -> None:
    parser = measure.options_of(__doc__, runs=9)
    parser.add_argument("--models", nargs="+", default=tuple(MODELS), choices=MODELS)
    options = parser.parse_args()
    average, turns = [measure.load_average()], dict[str, Any]()
    for name in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-tensor-") as scratch:
            packed = pack(Path(scratch), *MODELS[name])
            measure.run_ranks(2, __file__, "--rank", str(packed), str(options.runs), f"{scratch}/turns.json")
            turns[name] = json.loads(Path(scratch, "turns.json").read_text())
    measure.write_result(
        {
            "what": "steps of two tensor-parallel ranks on transformers' modules over those on torchtitan's, in the "
            "same processes: medians of ratios within a turn",
            **measure.circumstances(),
            "load_average": [*average, measure.load_average()],
            "turns": options.runs,
            "ratios": {name: {what: ratio(of, what) for what in ("wall_s", "cpu_s")} for name, of in turns.items()},
            "taken": turns,
        },
        options.out,
    )


def ratio(turns: Sequence[Mapping[str, Mapping[str, float]]], what: str) -> float:
    ours, theirs = ([turn[road][what] for turn in turns] for road in reversed(ROADS))
    return measure.median_ratio(ours, theirs)


def pack(folder: Path, name: str, changes: Mapping[str, Any]) -> Path:
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**measure.LLAMA, **_SMALL, **changes})
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder / "hf")
    measure.run_quietly([*measure.RESHARD, "pack", str(folder / "hf"), "--layout", "pp=1", "--out", str(folder / "p")])
    return folder / "p"


def run_rank(packed: Path, num_turns: int, out: Path) -> None:
    """Time steps of both on this rank; rank 0 writes what both took."""
    import torch
    from torch import distributed as dist

    from runner.bundle.packed import open_packed
    from runner.checkpoint.resume import Origin
    from runner.config.flags import parse_training
    from runner.distributed.world import World, join_world
    from runner.setup import begin
    from runner.training.step import train_step

    world, device, launched = World.from_environment(os.environ), torch.device("cpu"), open_packed(packed)
    join_world(device, timeout_s=600)
    torch.manual_seed(0)
    words = torch.randint(_SMALL["vocab_size"], (2, measure.SEQ_LEN + 1))
    from runner.data.sequences import Batch

    batch = Batch(tokens=words[:, :-1], labels=words[:, 1:], num_tokens=2 * measure.SEQ_LEN)
    losses: dict[str, list[float]] = {road: [] for road in ROADS}

    def step(road: str, engine: Any) -> dict[str, float]:
        dist.barrier()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        losses[road].append(train_step(engine, batch, len(losses[road])).loss)
        taken = torch.tensor([time.process_time() - cpu_s])
        wall_s = time.perf_counter() - wall_s
        dist.all_reduce(taken)
        return {"wall_s": round(wall_s, 5), "cpu_s": round(float(taken), 5)}

    steps: dict[str, Callable[[], dict[str, float]]] = {}
    for road in ROADS:
        options = parse_training([*FLAGS, "--implementation", road])
        ready = begin(launched, (Origin(folder=launched.root),), options, world, device)
        steps[road] = partial(step, road, ready.engine)
    turns = measure.take_turns(steps, num_turns)
    if any(abs(one - other) > 1e-3 for one, other in zip(*losses.values(), strict=True)):
        raise SystemExit(f"losses differ: {losses}")
    if world.rank == 0:
        out.write_text(json.dumps(turns))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
