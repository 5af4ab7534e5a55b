"""Load one pipeline rank's weights into a module of your own: here transformers' model with only that stage's layers.

python examples/load_stage.py ./out/pp2 --rank 1
"""

import argparse

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import reshard
import runner


class Skip(nn.Module):
    """A placeholder for a module of another stage: returns its input."""

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return hidden


class Stage(nn.Module):
    """One stage of a Llama-like transformers model, on the meta device.

    Shapes: tokens (B, L) into the first stage, hidden states (B, L, D) between stages, logits (B, L, V) at the end.
    """

    def __init__(self, packed: reshard.PackedModel, folder: str, rank: int) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(folder)
        own = packed.stage(rank).info.modules  # one stage per rank
        names = [name for stage in packed.stages for name in stage.info.modules]
        self.is_first, self.is_last = names[0] in own, names[-1] in own
        with torch.device("meta"):
            self.whole = AutoModelForCausalLM.from_config(config)
        for name in names:
            if name not in own:
                self.whole.set_submodule(name, Skip())
        # The rotary embedding's buffer is in no file: compute it on a real device.
        self.whole.model.rotary_emb = type(self.whole.model.rotary_emb)(config)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        model = self.whole if self.is_last else self.whole.model
        outputs = model(**{"input_ids" if self.is_first else "inputs_embeds": inputs}, use_cache=False)
        return outputs.logits if self.is_last else outputs.last_hidden_state


def load(folder: str, rank: int) -> tuple[Stage, runner.LoadResult]:
    """Build the stage of a rank and load its weights."""
    stage = Stage(reshard.open(folder), folder, rank)
    result = runner.load_stages(folder, rank, stage.whole)
    if result.meta_buffers:
        raise SystemExit(f"compute these buffers before the first step: {', '.join(result.meta_buffers)}")
    return stage, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed", help="a folder that reshard pack wrote, one stage per rank")
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args()
    stage, result = load(args.packed, args.rank)
    num_params = sum(parameter.numel() for parameter in stage.parameters())
    print(f"stages {result.stages}: {result.num_tensors} tensors, {num_params:,} parameters, digests verified")


if __name__ == "__main__":
    main()
