"""Dump one training step of a plain FSDP2 loop, for `runner prove --against`.

torchrun --nproc-per-node 2 examples/dump_fsdp2.py ./Llama-3.2-1B ./dump
runner prove ./Llama-3.2-1B --against ./dump

In a loop of your own, call `write_dump` on every rank after the backward, before gradients are clipped.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

ROWS, SEQ_LEN = 2, 64  # of each rank
Tensors = dict[str, torch.Tensor]


def whole(gradient: torch.Tensor) -> torch.Tensor:
    """Return all of a gradient, of which ranks have parts; every rank calls this."""
    return getattr(gradient, "full_tensor", lambda: gradient)().detach().cpu().contiguous()


def write_dump(out: Path, part: int, gradients: Tensors, rows: Tensors, step: dict[str, object]) -> None:
    """Write a part of the gradients, by Hugging Face names, the rows of all ranks, and the numbers of the step."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(gradients, out / f"gradients-{part}.safetensors")
    save_file({name: tensor.cpu().contiguous() for name, tensor in rows.items()}, out / "tokens.safetensors")
    (out / "step.json").write_text(json.dumps({**step, "reduction": "mean"}))


def main(model_folder: str, out: str) -> None:
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    tokens = torch.randint(model.config.vocab_size, (world * ROWS, SEQ_LEN + 1), generator=torch.manual_seed(0))
    rows = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    mine = {name: tensor[rank * ROWS : (rank + 1) * ROWS].to(device) for name, tensor in rows.items()}
    logits = model(input_ids=mine["input_ids"], use_cache=False).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine["labels"].flatten(), reduction="sum")
    loss = loss / rows["labels"].numel()  # of all ranks; FSDP averages the gradients of ranks, hence `* world`
    (loss * world).backward()
    gradients = {name: whole(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}
    dist.all_reduce(loss)
    norm = whole(torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])).item()
    if rank == 0:
        write_dump(Path(out), rank, gradients, rows, {"loss": loss.item(), "grad_norm": norm, "dtype": "float32"})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
