"""Dump the first step of torchtitan's own trainer, under any of its parallelism, for `runner prove --against`.

trainer = config.build()    # a Trainer.Config of yours, which starts from the weights of a folder
dump_first_step(trainer, "./dump")    # and then trainer.train()
"""

from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torchtitan.trainer import Trainer

from examples.dump_fsdp2 import whole, write_dump


@torch.no_grad()
def gradients_in(part: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return gradients by a checkpoint's names, which are not those of fused projections: for a moment, as weights."""
    weights = {weight: weight.clone() for weight in part.parameters()}
    for weight in weights:
        weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    names = part.state_dict().keys() - dict(part.named_buffers()).keys()
    gradients = {name.replace("_orig_mod.", ""): whole(part.state_dict()[name]).clone() for name in sorted(names)}
    for weight, value in weights.items():
        weight.copy_(value)
    return gradients


def dump_first_step(trainer: Trainer, folder: str) -> None:
    """Write a dump when the trainer logs its first step, in which gradients are not clipped."""
    batches: list[dict[str, torch.Tensor]] = []
    run, log, training = trainer.forward_backward_step, trainer.metrics_processor.log, trainer.config.training
    max_norm, training.max_norm = training.max_norm, float("inf")

    def record(*, input_dict: Any, labels: Any, **more: Any) -> torch.Tensor:
        pairs = [(input_dict, labels)] if isinstance(input_dict, dict) else zip(input_dict, labels, strict=True)
        for inputs, targets in pairs:  # microbatches, with pipeline parallelism
            rows = {"input_ids": inputs["input"], "labels": targets}
            if "positions" in inputs:  # documents begin at 0, and attend within themselves
                rows |= {"position_ids": inputs["positions"], "document_ids": (inputs["positions"] == 0).cumsum(1)}
            batches.append({name: tensor.cpu() for name, tensor in rows.items()})
        return run(input_dict=input_dict, labels=labels, **more)

    def dump(step: int, loss: float, max_loss: float, grad_norm: float, **more: Any) -> None:
        dims, rank, spec = trainer.parallel_dims, dist.get_rank(), trainer.config.model_spec
        gradients = {name: tensor for part in trainer.model_parts for name, tensor in gradients_in(part).items()}
        gradients = spec.state_dict_adapter(trainer.model_config, None).to_hf(gradients)
        numbers = {"loss": loss, "grad_norm": grad_norm, "dtype": training.mixed_precision_param}
        has_loss = not dims.pp_enabled or trainer.pp_has_last_stage
        place = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (sorted(gradients), place, batches, numbers if has_loss else None))
        if sorted(gradients) not in [names for names, *_ in ranks[:rank]]:  # the first of each pipeline rank
            parts = sorted({place: part for _, place, part, _ in ranks}.items())
            rows = {name: torch.cat([batch[name] for _, part in parts for batch in part]) for name in batches[0]}
            write_dump(Path(folder), rank, gradients, rows, next(numbers for *_, numbers in ranks if numbers))
        trainer.forward_backward_step, trainer.metrics_processor.log, training.max_norm = run, log, max_norm
        log(step, loss, max_loss, grad_norm, **more)

    trainer.forward_backward_step, trainer.metrics_processor.log = record, dump
