"""Let torchtitan's own trainer start from a packed folder: each rank reads its own stages, and nothing else.

from examples.titan_start import start_from    # with PYTHONPATH=CHECKOUT torchrun …
config = llama3_8b()                  # a Trainer.Config of yours
start_from("./Llama-3.1-8B-pp4", config)
config.build().train()
"""

from typing import Any

from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.trainer import Trainer

import reshard
import runner


def start_from(folder: str, config: Trainer.Config) -> None:
    """Load the weights of `folder` once the trainer has built its model, and cut the model as the folder is cut.

    Only the weights are read. To resume with optimizer state, export it: reshard export --to dcp --for torchtitan.
    """
    spec, packed = config.model_spec, reshard.open(folder)
    stages = [[_own_name(name) for name in stage.info.modules] for stage in packed.stages]
    if config.parallelism.pipeline_parallel_degree > 1:
        config.parallelism.module_fqns_per_model_part = stages
    elif len(stages) > 1:
        raise SystemExit(f"{folder} has {len(stages)} stages: pack it with --layout pp=1")
    before = spec.post_optimizer_build_fn

    def load(optimizers: Any, model_parts: list[nn.Module], parallel_dims: ParallelDims) -> None:
        if before is not None:
            before(optimizers, model_parts, parallel_dims)
        rank = parallel_dims.get_mesh("pp").get_local_rank() if parallel_dims.pp_enabled else 0
        adapter = spec.state_dict_adapter(spec.model, None)
        runner.load_stages(folder, rank, model_parts, adapter=adapter)

    spec.post_optimizer_build_fn = load  # torchtitan calls it after it has initialized the weights


def _own_name(module: str) -> str:
    return module.removeprefix("model.").replace("embed_tokens", "tok_embeddings")
