"""What must not grow: memory with microbatches, data with replicas, and rank 0's work beside the model with ranks.

    python bench/growth.py [--runs 5] [--device cuda] [--folder DIR] [--out bench/results/growth.json]

- `memory`: planned bytes of the largest rank of a Llama 70B at pp 16, sequence 8192, bf16, by schedule, with 8, 64 and
  512 microbatches; with 8 the pipeline is not full yet, so 512 is compared with 64.
- `data`: the same global batches of JSONL documents, read by the first and the last rank of 1, 4 and 8 replicas
  (forked, gloo): processor time of the busiest rank for a million tokens.
- `clock`: what rank 0 of Interleaved1F1B at pp 64, vpp 4, 256 microbatches does in a step besides the model's actions,
  by the processor time of its main thread: reading the times of its actions, and handing those of all ranks to the
  process that splits them, as often as that is done; also the seconds until that process has split them.
- `norm`: the norm of 51 M float32 gradients as it is computed, beside one `torch._foreach_norm` in float64. With
  --device cuda this alone, on a GPU.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
SCHEDULES = {
    "1F1B": "pp=16", "Interleaved1F1B": "pp=16,vpp=2", "InterleavedZeroBubble": "pp=16,vpp=2",
    "ZBVZeroBubble": "pp=16,style=v", "DualPipeV": "pp=16,style=v",
}  # fmt: skip
MICROBATCHES = (8, 64, 512)
REPLICAS = (1, 4, 8)
NUM_BATCHES, GLOBAL_BATCH, SEQ_LEN = 24, 64, 512


def memory(scratch: Path) -> dict[str, dict[str, Any]]:
    """Plan each schedule with each number of microbatches."""
    (config := scratch / "config.json").write_text(json.dumps(LLAMA_70B))
    rows = {}
    for schedule, layout in SCHEDULES.items():
        row: dict[str, Any] = {}
        for microbatches in MICROBATCHES:
            command = [*measure.RESHARD, "plan", str(config), "--layout", layout, "--schedule", schedule, "--json"]
            command += ["--microbatches", str(microbatches), "--seq-len", "8192", "--dtype", "bf16"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            plan = json.loads(done.stdout)
            if "stages" not in plan:  # a schedule may need more microbatches than there are
                row[f"{microbatches} microbatches, error"] = plan["error"]["problem"]
                continue
            ranks: dict[int, int] = {}
            for stage in plan["stages"]:
                ranks[stage["rank"]] = ranks.get(stage["rank"], 0) + stage["memory_nbytes"]["total"]
            row[f"{microbatches} microbatches, GiB"] = round(max(ranks.values()) / 2**30, 3)
        if (of_64 := row.get("64 microbatches, GiB")) is not None:
            row["512 over 64"] = round(row["512 microbatches, GiB"] / of_64, 6)
        rows[schedule] = row
    return rows


def data(scratch: Path) -> dict[str, dict[str, Any]]:
    """Read the same batches on more and more ranks."""
    from tokenizers import ByteLevelBPETokenizer

    words = [f"{first}{second}{third}" for first in "bdfgklmnprst" for second in "aeiou" for third in "nrslmt"]
    texts = [" ".join(words[(line * 7 + word * word) % len(words)] for word in range(400)) for line in range(6000)]
    (folder := scratch / "tokenizer").mkdir()
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts[:300], vocab_size=600, min_frequency=1, special_tokens=["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    file = scratch / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    rows: dict[str, dict[str, Any]] = {}
    for replicas in REPLICAS:
        context, size = multiprocessing.get_context("fork"), 2 * replicas
        queue = context.Queue()
        store = scratch / f"store-{replicas}"
        ranks = [context.Process(target=_read, args=(rank, size, folder, file, store, queue)) for rank in range(size)]
        for process in ranks:
            process.start()
        results = [queue.get(timeout=600) for _ in ranks]
        for process in ranks:
            process.join()
        tokens = NUM_BATCHES * GLOBAL_BATCH * SEQ_LEN / 1e6
        busiest = max(cpu_s for cpu_s, _ in results) / tokens
        rows[f"{replicas} replicas"] = {
            "ranks": size,
            "cpu_s a million tokens, busiest rank": round(busiest, 4),
            "of all ranks": round(sum(cpu_s for cpu_s, _ in results) / tokens, 4),
        }
        assert len({digest for _, digest in results}) == replicas, "first and last stage read the same rows"
    alone = rows["1 replicas"]["cpu_s a million tokens, busiest rank"]
    for row in rows.values():
        row["busiest over that of 1 replica"] = round(row["cpu_s a million tokens, busiest rank"] / alone, 3)
    return rows


def _read(rank: int, size: int, folder: Path, file: Path, store: Path, queue: Any) -> None:
    """Read this rank's rows; put its processor time, and a digest of them."""
    import torch
    from blake3 import blake3
    from torch import distributed as dist

    from runner.config.schema import BatchOptions, DataOptions
    from runner.data.read_ahead import GroupExchange
    from runner.data.sequences import Rows, read_batches
    from runner.data.shared import SharedReading

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    shared = SharedReading(GroupExchange(dist.group.WORLD))
    batches = read_batches(
        DataOptions(sources=(str(file),)),
        BatchOptions(global_batch=GLOBAL_BATCH, microbatch=1, seq_len=SEQ_LEN),
        folder=folder,
        vocab_size=600,
        rows=Rows(number=rank // 2, count=size // 2),
        shared=shared,
    )
    next(batches)  # the tokenizer is read, and the first buffers are allocated
    begun_s, digest = time.process_time(), blake3()
    for _ in range(NUM_BATCHES):
        digest.update(next(batches).tokens.numpy().tobytes())
    cpu_s = time.process_time() - begun_s
    dist.barrier()
    queue.put((cpu_s, digest.hexdigest()))
    queue.close()
    queue.join_thread()
    os._exit(0)


def clock(runs: int) -> dict[str, Any]:
    """Time what the clock of rank 0 does in the steps between two that it simulates, and in these."""
    import torch

    from manifests.placement import Placement
    from runner.pipeline.timetable import find_timetable
    from runner.profiling.trace import Clock, Recorder

    placement = Placement(num_stages=256, num_ranks=64)
    timetable = find_timetable("Interleaved1F1B", placement, 256)
    rank_0 = Clock(timetable.planned(256), 0)
    recorder, steps_s, timed_s, splits_s = Recorder(torch.device("cpu")), list[float](), list[float](), list[float]()
    every = next(step for step in range(2, 10**6) if rank_0.times(step)) - 1

    def beside(step: int) -> None:
        begun_s = time.thread_time()
        rank_0.note_data(0.0)
        recorder.start(is_timed=rank_0.times(step))
        recorder.stop()
        row = rank_0.read(recorder)
        rank_0.note_exchange([row] * placement.num_ranks)
        rank_0.split(step)
        (timed_s if rank_0.times(step) else steps_s).append(time.thread_time() - begun_s)

    for step in range(2, 200):
        beside(step)
    for number in range(runs + 1):  # the first is that of a process which is starting
        begun_s = time.perf_counter()
        beside(1 + every * number)
        while not rank_0.split(2):
            time.sleep(0.001)
        splits_s.append(time.perf_counter() - begun_s)
    return {
        "ms in a usual step": round(statistics.median(steps_s) * 1e3, 4),
        "ms in a timed step": round(statistics.median(timed_s[1:]) * 1e3, 4),
        "most ms in a timed step": round(max(timed_s) * 1e3, 4),
        "steps between timed ones": every,
        "ms until split elsewhere": round(statistics.median(splits_s[1:]) * 1e3, 1),
    }


def norm(runs: int, device: str) -> dict[str, dict[str, Any]]:
    """Time both norms of 51 M gradients, in many tensors and in one, in turn: CPU time, or until a GPU is done."""
    import torch

    from runner.training.gradient_norm import sum_squares

    torch.set_num_threads(1)
    layers, embedding = ([torch.randn(size, 1024, device=device) for size in sizes] for sizes in (49 * [1024], [50176]))

    def foreach(gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square()

    def timed(squares: Callable[[list[torch.Tensor]], torch.Tensor], gradients: list[torch.Tensor]) -> float:
        if device == "cpu":
            begun_s = time.process_time()
            squares(gradients)
            return time.process_time() - begun_s
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        squares(gradients)
        torch.cuda.synchronize()
        return time.perf_counter() - begun_s

    rows = {}
    for name, gradients in (("of a Llama's layers", layers), ("an embedding", embedding)):
        assert torch.allclose(sum_squares(gradients), foreach(gradients), rtol=1e-12)
        ways = {"ours": partial(timed, sum_squares, gradients), "foreach": partial(timed, foreach, gradients)}
        turns = measure.take_turns(ways, runs)
        rows[name] = {
            "elements": sum(gradient.numel() for gradient in gradients),
            "ms": round(statistics.median(turn["ours"] for turn in turns) * 1e3, 3),
            "ms of foreach": round(statistics.median(turn["foreach"] for turn in turns) * 1e3, 3),
            "ratio": measure.median_ratio((turn["ours"] for turn in turns), (turn["foreach"] for turn in turns)),
        }
    return rows


def main() -> None:
    parser = measure.options_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    load, parts = [measure.load_average()], dict[str, Any]()
    what = "the norm of 51 M gradients on a GPU"
    if options.device == "cpu":
        what = (
            "what must not grow with microbatches, replicas and ranks: planned memory, processor time of data, of "
            "rank 0's clock, and of a norm"
        )
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-growth-") as scratch:
            parts |= {"data": data(Path(scratch)), "memory": memory(Path(scratch))}
        parts |= {"clock": clock(options.runs)}
    parts |= {"norm": norm(options.runs, options.device)}
    result = {
        "what": what,
        **measure.circumstances(),
        "load_average": [*load, measure.load_average()],
        "turns": options.runs,
        **parts,
    }
    measure.write_result(result, options.out)


if __name__ == "__main__":
    main()
