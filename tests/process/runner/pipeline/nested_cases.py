"""A family whose stages hand on a tree: tensors that skip stages, constants, None, words and numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from manifests.placement import Placement
from runner.config.schema import BatchOptions
from runner.tensors.local_shard import Piece
from tests.fast.runner.tiny import padded_batch

WIDTH, VOCAB = 16, 40
CUTS = (
    BatchOptions(global_batch=8, microbatch=2, seq_len=12),
    BatchOptions(global_batch=8, microbatch=2, seq_len=7),
)
SCHEDULES = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
batch_of = {cut: padded_batch(1, size=cut.global_batch, seq_len=cut.seq_len, vocab_size=VOCAB) for cut in CUTS}


def placement_of(schedule: str) -> Placement:
    is_v = schedule in ("ZBVZeroBubble", "DualPipeV")
    return Placement(num_stages=2 if schedule == "1F1B" else 4, num_ranks=2, style="v" if is_v else "loop")


class Body(nn.Module):
    """Some of the toy's modules.

    The embedding gives a tree, layers change it, and the head, stages later, wants what the embedding gave.
    """

    def __init__(self, modules: tuple[str, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                name: nn.Embedding(VOCAB, WIDTH)
                if name == "embed"
                else nn.Linear(WIDTH, VOCAB if name == "head" else WIDTH)
                for name in modules
            }
        )

    def forward(self, given: Any) -> Any:
        for name, part in self.parts.items():
            given = getattr(self, f"_{name.rstrip('0123456789')}")(part, given)
        return given

    def _embed(self, part: nn.Module, tokens: torch.Tensor) -> dict[str, Any]:
        hidden = part(tokens)
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None].expand(-1, WIDTH) / 10
        return {
            "hidden": hidden,
            "skip": hidden,  # one tensor under two names
            "rotary": (angles.cos(), [angles.sin()]),
            "ids": tokens,
            "mask": None,
            "depth": 0,
            "how": {"name": "toy", "scale": 0.5, "is_causal": True},
        }

    def _layer(self, part: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
        cos, (sin,) = given["rotary"]
        hidden = given["hidden"] + given["how"]["scale"] * torch.tanh(part(given["hidden"] * cos + sin))
        mask = given["ids"] > 20 if given["mask"] is None else given["mask"]
        hidden = hidden.masked_fill(mask[..., None], 0.25)
        return {**given, "hidden": hidden, "mask": mask, "depth": given["depth"] + 1}

    def _head(self, part: nn.Module, given: dict[str, Any]) -> torch.Tensor:
        logits: torch.Tensor = part(given["hidden"] / given["depth"] + given["skip"])
        return logits


class Toy:
    """See `runner.models.Family`."""

    architecture, hidden_size, vocab_size = "Toy", WIDTH, VOCAB
    modules = ("embed", *(f"layer{number}" for number in range(6)), "head")
    hands_on_trees, row_inputs = True, ()

    def build(self, modules: tuple[str, ...]) -> nn.Module:
        with torch.device("meta"):
            return Body(modules)

    def init_buffers(self, module: nn.Module, device: torch.device) -> None:
        pass

    def padded_length(self, length: int, most: int) -> int:
        return most

    def to_hf(self, name: str) -> str:
        return name

    def pieces(self, name: str, memory: torch.Tensor, offset: tuple[int, ...]) -> tuple[Piece, ...]:
        return (Piece(fqn=name, shape=tuple(memory.shape), offset=offset, memory=memory),)


def fill_by_name(module: nn.Module) -> None:
    """Give each parameter values that depend on nothing but its name."""
    for name, parameter in module.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
