"""A rank of torchtitan's own trainer, on the CPU: a tiny Llama that continues from whatever its folder has.

usage: titan_worker.py JOB

JOB is a JSON file: "folder" (checkpoints are in folder/checkpoint), "steps", "pp" and "dp" (degrees), "fused" (whether
query, key and value projections are one parameter), "muon" (whether DistMuon trains the matrices of layers), "data"
(pairs of a seed and how many of its sequences are read; the last is endless), "excluded" (from loading), "start" (a
packed folder), "dump" (a folder for what its first step computes) and "out", where the losses go. The data are the
runner's synthetic tokens, so that both sides read the same.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
    default_adamw,
)
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed.flex_shard import BucketConfig, ComputeLayout, Owned
from torchtitan.distributed.flex_shard.dist_muon import DistMuon
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from bench.titans import NoTokenizer, run_on_cpu, take_microbatches
from examples.dump_torchtitan import dump_first_step
from examples.titan_start import start_from
from runner.config.schema import BatchOptions, DataOptions
from runner.data.sequences import read_batches
from tests.fast.titans import VOCAB, llama

SEQ_LEN, BATCH, RATE = 16, 4, 8e-3


class Data(BaseDataLoader):
    """The runner's synthetic sequences, a rank's part of each batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        segments: list[list[int]] = field(default_factory=list)

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.config, self.rank, self.num_ranks, self.local = config, dp_rank, dp_world_size, local_batch_size
        self.num_batches = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        batch = BatchOptions(seq_len=SEQ_LEN, global_batch=self.local * self.num_ranks, microbatch=1)
        first = self.num_batches * batch.global_batch
        for seed, count in self.config.segments:
            data = DataOptions(sources=("synthetic",), seed=seed)
            batches = read_batches(data, batch, folder=Path(), vocab_size=VOCAB, start=first)
            for each in islice(batches, max(0, count - first) // batch.global_batch if count else None):
                rows = slice(self.rank * self.local, (self.rank + 1) * self.local)
                self.num_batches += 1
                yield {"input": each.tokens[rows]}, each.labels[rows]
            first = max(0, first - count)

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{self.rank}": self.num_batches, "world_size": self.num_ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_batches = state_dict[f"dp_rank_{self.rank}"]


def muon(model: Any) -> OptimizersContainer.Config:
    """Return the optimizers of torchtitan's recipe for Kimi K2, with matrices of a Llama, each on one rank."""
    pattern = r"^layers\..*\.w[qkvo123]\.weight$"
    with torch.device("meta"):
        names = [name for name, _ in model.build().named_parameters() if re.search(pattern, name)]
    config = default_adamw(lr=RATE)
    options = {"lr": 3 * RATE, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw", "fused": False}
    groups = [ParamGroupConfig(pattern=pattern, optimizer_name="DistMuon", optimizer_kwargs=options)]
    layers = sorted({name.split(".")[1] for name in names})
    return OptimizersContainer.Config(
        param_groups=[*groups, *config.param_groups],
        optimizer_factory_kwargs_by_name={
            "DistMuon": {
                "bucket_configs": [BucketConfig(patterns=(f"layers.{layer}.*",)) for layer in layers],
                "compute_sharding_by_fqn": dict.fromkeys(names, ComputeLayout({"dp_shard": Owned(), "fsdp": Owned()})),
            }
        },
    )


def let_muon_run_on_cpu() -> None:
    """DistMuon asks for CUDA's memory and streams, and for nothing else of CUDA: there is one stream here."""
    DistMuon._validate_parameter_storage = lambda _: torch.device("cpu")  # type: ignore[method-assign]
    init = torch.cpu.Stream.__init__
    torch.cpu.Stream.__init__ = lambda self, device=None, priority=-1: init(self, priority)  # type: ignore


def config_of(job: dict[str, Any]) -> Trainer.Config:
    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model = llama(fused=job["fused"])
    return Trainer.Config(
        model_spec=spec,
        dump_folder=job["folder"],
        tokenizer=NoTokenizer.Config(),
        dataloader=Data.Config(segments=job["data"]),
        loss=CrossEntropyLoss.Config(),
        optimizer=muon(spec.model) if job.get("muon") else default_adamw(lr=RATE),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=10, decay_type="cosine", decay_ratio=0.6),
        training=TrainingConfig(
            local_batch_size=BATCH // job["dp"], seq_len=SEQ_LEN, steps=job["steps"], mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=job["pp"], pipeline_parallel_schedule="1F1B", spmd_backend="partial_dtensor"
        ),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=3, last_save_model_only=False, exclude_from_loading=job.get("excluded", [])
        ),
        activation_checkpoint=None,
        debug=DebugConfig(seed=1, enable_structured_logging=False),
    )  # fmt: skip


def main(path: Path) -> None:
    job = json.loads(path.read_text())
    run_on_cpu()
    torch.set_num_threads(1)
    let_muon_run_on_cpu()
    config = config_of(job)
    if "start" in job:
        start_from(job["start"], config)
    trainer = config.build()
    for module in (module for part in trainer.model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    if job["pp"] > 1:
        take_microbatches(trainer.pp_schedule)
    losses: dict[int, float] = {}
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.update({step: loss})
    if "dump" in job:
        dump_first_step(trainer, job["dump"])
    trainer.train()
    trainer.close()
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:  # the last stage has the loss
        Path(job["out"]).write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
