"""DeepSpeed's own trainer, on the CPU: tiny models that are trained, saved, loaded and converted by it.

usage: deepspeed_worker.py JOB

JOB is a JSON file: "config" (of a Hugging Face model), "pp" and "dp" (degrees; without "pp" the model is transformers'
own, else a PipelineModule), "ds_config", "segments" (pairs of a seed and a number of steps to train), and where wanted
"repeats_input" (whether GPT-2's tied head is the input's module once more, not a function of it), "weights"
(safetensors to start from), "undecayed" (ends of the names of parameters without weight decay), "load" (a folder, and
in "how": "module", "module-not-strict" or "universal"), "save" (a folder, and in "save_at" a number of steps), "dump"
(safetensors of the parameters by the names that DeepSpeed has for them) and "out" (the losses, as JSON).

The data are the runner's synthetic tokens, so that both sides read the same.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.mpt.modeling_mpt import MptBlock, build_mpt_alibi_tensor

from runner.config.schema import BatchOptions, DataOptions
from runner.data.sequences import read_batches

SEQ_LEN, BATCH = 16, 4


class LlamaLayer(LlamaDecoderLayer):
    """A decoder layer whose only input and output are hidden states, as a PipelineModule passes them on."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        self.rotary = [LlamaRotaryEmbedding(config)]  # in a list: not a part of the state dict

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1])[None]
        return super().forward(hidden, position_embeddings=self.rotary[0](hidden, positions))


class GPT2Embedding(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))


class GPT2EmbeddingAndHead(GPT2Embedding):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(given, self.wte.weight) if given.is_floating_point() else super().forward(given)


class MptLayer(MptBlock):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        self.sizes = (config.n_heads, config.max_seq_len)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        length = hidden.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        return super().forward(hidden, build_mpt_alibi_tensor(*self.sizes), later)[0]


class GPT2Layer(GPT2Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found = super().forward(hidden)
        return found[0] if isinstance(found, tuple) else found


def logits(embedding: GPT2Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(hidden, embedding.wte.weight)


def loss_of(found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(found.flatten(0, 1).float(), labels.flatten())


def layers_of(config: Any, *, repeats_input: bool) -> list[Any]:
    if config.model_type == "gpt2":
        made = GPT2EmbeddingAndHead if repeats_input else GPT2Embedding
        tied = partial(TiedLayerSpec, "embed", made, config, tied_weight_attr=["wte.weight"])
        return [
            tied(),
            *(LayerSpec(GPT2Layer, config, number) for number in range(config.n_layer)),
            LayerSpec(nn.LayerNorm, config.n_embd, eps=config.layer_norm_epsilon),
            tied(forward_fn=None if repeats_input else logits),
        ]
    if config.model_type == "mpt":
        return [
            TiedLayerSpec("word_embeddings", nn.Embedding, config.vocab_size, config.d_model),
            *(LayerSpec(MptLayer, config, number) for number in range(config.n_layers)),
            LayerSpec(nn.LayerNorm, config.d_model, eps=config.layer_norm_epsilon, bias=False),
            TiedLayerSpec("word_embeddings", nn.Linear, config.d_model, config.vocab_size, bias=False),
        ]
    return [
        LayerSpec(nn.Embedding, config.vocab_size, config.hidden_size),
        *(LayerSpec(LlamaLayer, config, number) for number in range(config.num_hidden_layers)),
        LayerSpec(LlamaRMSNorm, config.hidden_size, config.rms_norm_eps),
        LayerSpec(nn.Linear, config.hidden_size, config.vocab_size, bias=False),
    ]


def model_of(job: dict[str, Any]) -> nn.Module:
    config = AutoConfig.for_model(**job["config"])
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    if "pp" not in job:
        return AutoModelForCausalLM.from_config(config)
    topology = PipeModelDataParallelTopology(num_pp=job["pp"], num_mp=1, num_dp=job["dp"])
    if not job.get("with_model_axis", True):
        topology = deepspeed.runtime.pipe.topology.PipeDataParallelTopology(num_pp=job["pp"], num_dp=job["dp"])
    layers = layers_of(config, repeats_input=job.get("repeats_input", False))
    model = PipelineModule(layers, topology=topology, loss_fn=loss_of)
    model.universal_checkpoint_info = {
        "universal_checkpoint_version": 0.4,
        "pipeline_replicated_parameter_patterns": [r"tied_modules\..*"] if config.tie_word_embeddings else [],
    }
    return model


def batches(job: dict[str, Any], rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a data-parallel rank's microbatches of one sequence."""
    vocab_size = job["config"]["vocab_size"]
    options = BatchOptions(seq_len=SEQ_LEN, global_batch=BATCH, microbatch=1)
    share = BATCH // job["dp"]
    for seed, num_steps in job["segments"]:
        data = DataOptions(sources=("synthetic",), seed=seed)
        read = read_batches(data, options, folder=Path(), vocab_size=vocab_size)
        for batch in islice(read, num_steps):
            for row in range(rank * share, (rank + 1) * share):
                yield batch.tokens[row : row + 1], batch.labels[row : row + 1]


def train_step(engine: Any, data: Iterator[tuple[torch.Tensor, torch.Tensor]], job: dict[str, Any]) -> float:
    if "pp" in job:
        return float(engine.train_batch(data_iter=data))
    total = 0.0
    for _ in range(BATCH // job["dp"]):
        tokens, labels = next(data)
        loss = loss_of(engine(tokens, use_cache=False).logits, labels)
        engine.backward(loss)
        engine.step()
        total += loss.item()
    mean = torch.tensor(total / (BATCH // job["dp"]))
    dist.all_reduce(mean)
    return mean.item() / job["dp"]


def run(rank: int, job: dict[str, Any], port: int) -> None:
    world_size = job.get("pp", 1) * job["dp"]
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it compiles one with the machine's compiler
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = model_of(job)
    groups: Any = model.parameters()
    if "undecayed" in job:  # the end of names of parameters without weight decay
        named = list(model.named_parameters())
        groups = [
            {"params": [one for name, one in named if not name.endswith(tuple(job["undecayed"]))]},
            {"params": [one for name, one in named if name.endswith(tuple(job["undecayed"]))], "weight_decay": 0.0},
        ]
    optimizer = torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    fixed = {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}
    if "weights" in job:
        named = load_file(job["weights"])
        for name, parameter in model.named_parameters():
            parameter.data.copy_(named[name])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={**fixed, **job["ds_config"]})
    if "load" in job:
        how = {
            "load_module_only": job["how"].startswith("module"),
            "load_module_strict": job["how"] != "module-not-strict",
        }
        found, _ = engine.load_checkpoint(job["load"], **how, load_lr_scheduler_states=False)
        assert found is not None
    if job.get("save_at") == 0:
        engine.save_checkpoint(job["save"])
    losses = []
    data = batches(job, dist.get_rank() % job["dp"])  # the data axis is the innermost
    for _ in range(sum(count for _, count in job["segments"])):
        losses.append(train_step(engine, data, job))
        if len(losses) == job.get("save_at"):
            engine.save_checkpoint(job["save"])
    if "dump" in job:
        found = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
        save_file(found, f"{job['dump']}.{rank}")
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    with socket.socket() as found:
        found.bind(("localhost", 0))
        free = found.getsockname()[1]
    mp.spawn(run, (given, free), given.get("pp", 1) * given["dp"])
