"""Launch torchtitan's own trainer and the runner on one Llama: seconds to the end of the first step, and of a step.

    python bench/trainers.py [--runs 5] [--out bench/results/trainers.json] [--folder DIR]

Two pipeline ranks of one thread each, 1F1B, the same stages, weights, tokens and learning rates; each trainer starts as
its users start it, torchtitan with torchrun from the Hugging Face file, the runner with `runner launch` from the packed
folder. They take turns. Nothing counts unless both have the same losses in every step of every turn. A step's time is
the median between the ends of those after the third. bench/titans.py makes torchtitan run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure

STEPS, LR = 9, 1e-3
# What torchtitan's warmup_steps=2, total_steps=10, decay_ratio=0.6 and decay_type="cosine" are in the runner.
SCHEDULE = ("--lr", LR, "--warmup-steps", 2, "--stable-steps", 2, "--decay", "cosine", "--decay-steps", 10)
SAME = 1e-4  # relative difference of losses
LEFT_OUT = (
    "NeMo AutoModel 0.7.0, which on Linux requires NVIDIA's CUDA libraries (by quack-kernels, nvidia-cutlass-dsl)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """A run: seconds from its launch to the end of each step, the losses, and the processor time of all of it."""

    ends_s: tuple[float, ...]
    losses: tuple[float, ...]
    cpu_s: float

    @property
    def step_s(self) -> float:
        ends_s = self.ends_s[measure.WARM_STEPS - 1 :]
        return statistics.median(after - before for before, after in pairwise(ends_s))

    @classmethod
    def of(cls, began_s: float, before: resource.struct_rusage, lines: Sequence[Mapping[str, float]]) -> Ran:
        return cls(
            ends_s=tuple(line["time"] - began_s for line in lines),
            losses=tuple(line["loss"] for line in lines),
            cpu_s=measure.cpu_s_since(before),
        )


def main() -> None:
    parser = measure.options_of(__doc__, runs=5)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(Path(options.rank))
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-trainers-") as scratch:
        root = Path(scratch)
        write_inputs(root)
        average = [measure.load_average()]
        turns = measure.take_turns({"torchtitan": partial(titan, root), "runner": partial(runner, root)}, options.runs)
        average.append(measure.load_average())
    for turn in turns:
        assert all(map(partial(math.isclose, rel_tol=SAME), *(ran.losses for ran in turn.values()))), turn
    figures = {
        name: {
            "launch_to_first_step_s": [turn[name].ends_s[0] for turn in turns],
            "step_s": [turn[name].step_s for turn in turns],
            "cpu_s": [turn[name].cpu_s for turn in turns],
        }
        for name in turns[0]
    }
    result = {
        "what": "torchtitan's own trainer and the runner on one Llama, two pipeline ranks, the same losses: seconds "
        f"from the launch to the end of the first step, and of a step; processor time of a run of {STEPS} steps",
        **measure.circumstances(),
        "left_out": LEFT_OUT,
        "turns": options.runs,
        "load_average": average,
        "model": measure.LLAMA,
        "trainers": {
            name: {
                f"{what}{suffix}": value
                for what, taken in found.items()
                for suffix, value in (
                    ("", round(statistics.median(taken), 3)),
                    (", ratio to torchtitan", measure.median_ratio(taken, figures["torchtitan"][what])),
                )
            }
            for name, found in figures.items()
        },
        "each": {name: {what: [round(each, 3) for each in taken] for what, taken in found.items()}
                 for name, found in figures.items()},
    }  # fmt: skip
    measure.write_result(result, options.out)


def write_inputs(root: Path) -> None:
    """Write the model, as Hugging Face has it and packed, and the tokens that the runner will train on."""
    import torch

    from runner.config.schema import BatchOptions, DataOptions
    from runner.data.sequences import read_batches

    measure.write_llama(root / "model")
    measure.run_quietly(
        [*measure.RESHARD, "pack", str(root / "model"), "--layout", "pp=2", "--out", str(root / "packed")]
    )
    batch = BatchOptions(seq_len=measure.SEQ_LEN, global_batch=1, microbatch=1)
    data = DataOptions(sources=("synthetic",))
    sequences = read_batches(data, batch, folder=root, vocab_size=measure.LLAMA["vocab_size"])
    pairs = [next(sequences) for _ in range(STEPS * measure.GLOBAL_BATCH)]
    torch.save([(each.tokens, each.labels) for each in pairs], root / "tokens.pt")


def runner(root: Path) -> Ran:
    began_s, before = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(dir=root) as log:
        measure.train(root / "packed", Path(log), STEPS, *SCHEDULE)
        lines = [json.loads(line) for line in (Path(log) / "metrics.jsonl").read_text().splitlines()]
    return Ran.of(began_s, before, [line for line in lines if "loss" in line])


def titan(root: Path) -> Ran:
    began_s, before = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        manifest = json.loads((root / "packed" / "manifest.json").read_text())
        job = {"root": str(root), "folder": folder, "stages": [stage["modules"] for stage in manifest["stages"]]}
        Path(folder, "job.json").write_text(json.dumps(job))
        measure.run_ranks(2, __file__, "--rank", str(Path(folder, "job.json")))
        lines = json.loads(Path(folder, "steps.json").read_text())
    return Ran.of(began_s, before, lines)


def rank(job_file: Path) -> None:
    """Run one rank of torchtitan's trainer."""
    import titans
    import torch

    job = json.loads(job_file.read_text())
    torch.set_num_threads(1)
    titans.run_on_cpu()
    trainer = trainer_config(job).build()
    logging.disable(logging.INFO)
    titans.take_microbatches(trainer.pp_schedule)
    lines: list[dict[str, float]] = []

    def note(step: int, loss: float, *_: Any, **__: Any) -> None:
        lines.append({"loss": loss, "time": time.time()})

    trainer.metrics_processor.log = note
    trainer.train()
    trainer.close()
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:  # the last stage has the loss
        Path(job["folder"], "steps.json").write_text(json.dumps(lines))
    torch.distributed.destroy_process_group()


def trainer_config(job: Mapping[str, Any]) -> Any:
    """Return the job of torchtitan's trainer: what `SCHEDULE` and `measure.train` say to the runner."""
    import titans
    import torch
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.configs import DebugConfig
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    class Tokens(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            path: str

        def __init__(self, config: Any, **_: Any) -> None:
            self.pairs = torch.load(config.path)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            yield from (({"input": tokens}, labels) for tokens, labels in self.pairs)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model = titans.llama(measure.LLAMA, fused=True)
    stages = [
        [name.removeprefix("model.").replace("embed_tokens", "tok_embeddings") for name in modules]
        for modules in job["stages"]
    ]
    return Trainer.Config(
        model_spec=spec,
        dump_folder=job["folder"],
        tokenizer=titans.NoTokenizer.Config(),
        dataloader=Tokens.Config(path=f"{job['root']}/tokens.pt"),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=LR),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=10, decay_type="cosine", decay_ratio=0.6),
        training=TrainingConfig(
            local_batch_size=measure.GLOBAL_BATCH, seq_len=measure.SEQ_LEN, steps=STEPS,
            mixed_precision_param="float32", disable_cuda_graphs=True,
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=2, pipeline_parallel_schedule="1F1B", spmd_backend="partial_dtensor",
            module_fqns_per_model_part=stages,
        ),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=1000, initial_load_path=f"{job['root']}/model", initial_load_in_hf=True
        ),
        activation_checkpoint=None,
        debug=DebugConfig(seed=1, enable_structured_logging=False),
    )  # fmt: skip


if __name__ == "__main__":
    main()
