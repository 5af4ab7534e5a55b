"""Train a packed model from a script of your own: torch's pipeline schedule, transformers' layers, AdamW.

torchrun --nproc-per-node 2 examples/train.py ./out/pp2 --steps 5 --out ./trained

It needs a Llama-like model and one stage per rank, and trains on random tokens. What it writes is a checkpoint as those
of `runner launch`, which resumes from it; `runner launch` also adds data, parallelism and everything else that a
training run needs.
"""

import argparse

import torch
from load_stage import Stage, load
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

import reshard
import runner

MICROBATCHES, BATCH, SEQ_LEN = 4, 8, 32


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of logits (B, L, V) over labels (B, L)."""
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def batch_of(step: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and labels of a step, both (B, L), the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(vocab_size, (BATCH, SEQ_LEN + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(folder: str, num_steps: int, out: str | None) -> tuple[Stage, torch.optim.AdamW]:
    """Train this rank's stage, and write all stages to `out`; return the stage and its optimizer."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    packed = reshard.open(folder)
    if len(packed.stages) != num_ranks:
        raise SystemExit(f"expected {num_ranks} stages, found {len(packed.stages)}")
    module, _ = load(folder, rank)
    module.train()
    stage = PipelineStage(module, rank, num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    weights = dict(module.whole.named_parameters(remove_duplicate=False))
    ends = dist.new_group(sorted({0, num_ranks - 1}))  # an embedding that is tied to the LM head is on both
    tied = [weights[member.fqn] for tie in packed.manifest.ties for member in (tie.owner, *tie.replicas)
            if member.fqn in weights] if num_ranks > 1 else []  # fmt: skip

    for step in range(1, num_steps + 1):
        tokens, labels = batch_of(step, packed.config["vocab_size"])
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *([tokens] if stage.is_first else []), **({"target": labels, "losses": losses} if stage.is_last else {})
        )
        for weight in tied:
            dist.all_reduce(weight.grad, group=ends)  # two copies of one parameter
        optimizer.step()
        if stage.is_last:
            print(f"step {step}  loss {torch.stack(losses).mean().item():.6f}", flush=True)
    if out is not None:
        num_tokens = num_steps * BATCH * SEQ_LEN
        runner.save_stages(folder, rank, module.whole, out, step=num_steps, num_tokens=num_tokens, optimizer=optimizer)
    return module, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", help="write a checkpoint here")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.packed, args.steps, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
