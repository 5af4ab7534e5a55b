"""Train a packed model from a script of your own: torch's pipeline schedule, transformers' layers, AdamW.

torchrun --nproc-per-node 2 examples/train.py ./out/pp2 --steps 5

It needs a Llama-like model without tied weights and one stage per rank, and trains on random tokens. `runner launch`
adds data, checkpoints, tied weights and everything else that a training run needs.
"""

import argparse

import torch
from load_stage import load
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

import reshard

MICROBATCHES, BATCH, SEQ_LEN = 4, 8, 32


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of logits (B, L, V) over labels (B, L)."""
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def batch_of(step: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and labels of a step, both (B, L), the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(vocab_size, (BATCH, SEQ_LEN + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    packed = reshard.open(args.packed)
    if packed.manifest.ties or len(packed.stages) != num_ranks:
        raise SystemExit(f"expected {num_ranks} stages and no tied weights")
    module, _ = load(args.packed, rank)
    module.train()
    stage = PipelineStage(module, rank, num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    for step in range(1, args.steps + 1):
        tokens, labels = batch_of(step, packed.config["vocab_size"])
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *([tokens] if stage.is_first else []), **({"target": labels, "losses": losses} if stage.is_last else {})
        )
        optimizer.step()
        if stage.is_last:
            print(f"step {step}  loss {torch.stack(losses).mean().item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
