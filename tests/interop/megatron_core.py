"""Writes and reads checkpoints with megatron-core, on CPU; run by the Python that has it.

    megatron_core.py save MODEL.json FOLDER [--tp N] [--pp N] [--split]   a model of random weights
    megatron_core.py logits MODEL.json FOLDER OUT.json [--tp N] [--pp N]  load it, and what it computes
    megatron_core.py train MODEL.json FOLDER OUT.json ...                 train it with the distributed optimizer

MODEL.json is a config.json of transformers. Ranks are processes of this script, with gloo. `train` starts from `--load`
if it is given, takes a step for each batch of `--data` (a JSON list of pairs: tokens and labels), writes the losses,
and saves to FOLDER after `--save-at` steps, in the `--sharding` of the optimizer's state. Without data it takes one
step, of gradients that depend on weights alone, which works at any degrees.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode

# megatron-core 0.16 does not look whether Transformer Engine is there.
moe_utils.te_general_gemm = None
multi_latent_attention.HAVE_TE = False
TOKENS = [[1, 5, 2, 7, 3, 0, 6, 4]]
LR, BATCH = 4e-3, 4
MTP_WEIGHT = 1.0

_SET = DistributedOptimizer._set_main_param_and_optimizer_states


def set_state(self, parameter, tensors):
    """Set what was loaded; of torch's AdamW the count of steps too, which the loader expects and does not load."""
    _SET(self, parameter, {"step": self._get_main_param_and_optimizer_states(parameter)["step"], **tensors})


DistributedOptimizer._set_main_param_and_optimizer_states = set_state


class OnCPU(TorchFunctionMode):
    """Give the distributed optimizer, which asks for tensors of CUDA and for their types, those of the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        found = func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else found


def options(model: dict, tp: int, pp: int) -> tuple[dict, dict]:
    """Return the arguments of the transformer's config and of the model, as Megatron names them."""
    heads = model["num_attention_heads"]
    config = {
        "num_layers": model["num_hidden_layers"],
        "hidden_size": model["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": model["num_key_value_heads"],
        "ffn_hidden_size": model["intermediate_size"],
        "kv_channels": model.get("head_dim") or model["hidden_size"] // heads,
        "layernorm_epsilon": model["rms_norm_eps"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "qk_layernorm": model["model_type"] in ("qwen3", "qwen3_moe"),
        "add_qkv_bias": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "init_method_std": 0.2,
    }
    if num_experts := model.get("num_experts", model.get("n_routed_experts")):
        config |= {
            "num_moe_experts": num_experts,
            "moe_ffn_hidden_size": model["moe_intermediate_size"],
            "moe_router_topk": model["num_experts_per_tok"],
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
    if model["model_type"] == "deepseek_v3":
        config |= latent(model)
    rope = model.get("rope_parameters") or model
    padded = -(-model["vocab_size"] // (8 * tp)) * 8 * tp
    return config, {
        "vocab_size": padded,
        "max_sequence_length": 64,
        "share_embeddings_and_output_weights": model["tie_word_embeddings"],
        "position_embedding_type": "rope",
        "rotary_base": int(rope["rope_theta"]),
    }


def latent(model: dict) -> dict:
    """Return the arguments of DeepSeek-V3 alone."""
    layers, num_dense = model["num_hidden_layers"], model["first_k_dense_replace"]
    rope = model.get("rope_scaling")
    found = {
        "q_lora_rank": model["q_lora_rank"],
        "kv_lora_rank": model["kv_lora_rank"],
        "qk_head_dim": model["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": model["qk_rope_head_dim"],
        "v_head_dim": model["v_head_dim"],
        "qk_layernorm": True,
        "rope_type": "yarn" if rope else "rope",
        "rotary_base": model["rope_theta"],
        "moe_layer_freq": [int(layer >= num_dense) for layer in range(layers)],
        "moe_shared_expert_intermediate_size": model["n_shared_experts"] * model["moe_intermediate_size"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": model["n_group"],
        "moe_router_group_topk": model["topk_group"],
        "moe_router_topk_scaling_factor": model["routed_scaling_factor"],
        "mtp_num_layers": model["num_nextn_predict_layers"] or None,
        "mtp_loss_scaling_factor": MTP_WEIGHT,
    }
    if rope:
        names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        found |= {name: rope[name] for name in names} | {"rotary_scaling_factor": rope["factor"]}
    return found


class LatentAttention(DotProductAttention):
    """Megatron-Core's own attention, which does not know the widths of heads that latent attention gives it."""

    def __init__(self, *args, k_channels=0, v_channels=0, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def build(model: dict, tp: int, pp: int) -> GPTModel:
    config, arguments = options(model, tp, pp)
    made = (MLATransformerConfig if "kv_lora_rank" in config else TransformerConfig)(**config)
    spec = get_gpt_decoder_block_spec(made, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs if "kv_lora_rank" in config else ():
        layer.submodules.self_attention.submodules.core_attention = LatentAttention
    mtp = get_gpt_mtp_block_spec(made, spec, use_transformer_engine=False) if config.get("mtp_num_layers") else None
    return GPTModel(
        made,
        spec,
        **arguments,
        mtp_block_spec=mtp,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def sharded(model: GPTModel, split: bool) -> dict:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group, "singleton_local_shards": split})


def arguments_of(model: dict, tp: int, pp: int) -> Namespace:
    """Return the part of Megatron-LM's arguments that describes a model, as its training loop saves them."""
    config, arguments = options(model, tp, pp)
    names = {
        "layernorm_epsilon": "norm_epsilon",
        "num_moe_experts": "num_experts",
    }
    left_out = ("activation_func", "gated_linear_unit", "pipeline_dtype", "bias_activation_fusion")
    found = {names.get(name, name): value for name, value in config.items() if name not in left_out}
    found |= {"multi_latent_attention": "kv_lora_rank" in config, "rotary_base": arguments["rotary_base"]}
    return Namespace(
        **found,
        swiglu=True,
        group_query_attention=config["num_query_groups"] != config["num_attention_heads"],
        untie_embeddings_and_output_weights=not model["tie_word_embeddings"],
        padded_vocab_size=arguments["vocab_size"],
        vocab_size=model["vocab_size"],
        make_vocab_size_divisible_by=8,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_interleaved=False,
        use_rope_scaling=False,
        max_position_embeddings=64,
        params_dtype=torch.float32,
        iteration=3,
        clip_grad=1.0,
        global_batch_size=BATCH,
        micro_batch_size=1,
        seq_length=16,
    )


def save(model: dict, folder: Path, tp: int, pp: int, split: bool, rank: int) -> None:
    torch.manual_seed(rank)
    built = build(model, tp, pp)
    for name, parameter in built.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    for name, buffer in built.named_buffers():
        if name.endswith("expert_bias"):
            torch.nn.init.uniform_(buffer, -0.5, 0.5)
    state = {"model": sharded(built, split), "args": arguments_of(model, tp, pp), "iteration": 3}
    state |= {"checkpoint_version": 3.0, "num_floating_point_operations_so_far": 0}
    dist_checkpointing.save(state, str(folder), content_metadata={"singleton_local_shards": split})


def logits(model: dict, folder: Path, tp: int, pp: int) -> object:
    torch.manual_seed(1234)
    if tp * pp == 1:  # MTP layers compute nothing without labels
        model = {**model, "num_nextn_predict_layers": 0}
    built = build(model, tp, pp).eval()
    content = dist_checkpointing.load_content_metadata(str(folder)) or {}
    wanted = {"model": sharded(built, content.get("singleton_local_shards", False))}
    found = dist_checkpointing.load(wanted, str(folder), strict=StrictHandling.RAISE_UNEXPECTED)
    built.load_state_dict(found["model"])
    if tp * pp > 1:
        return None
    tokens = torch.tensor(TOKENS)
    positions = torch.arange(tokens.shape[1])[None]
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).tril() < 0.5
    with torch.no_grad():
        return built(tokens, positions, mask)[..., : model["vocab_size"]].tolist()


def train(model: dict, asked: Namespace) -> list[float]:
    """Take steps, and return the loss of each."""
    torch.manual_seed(1)
    built = build(model, asked.tp, asked.pp)
    copied = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(built.config, copied, built)
    given = {
        "lr": LR,
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": asked.eps,
        "clip_grad": 1.0,
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(use_distributed_optimizer=True, **given), [wrapped])
    decay = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 0, "wd_incr_style": "constant"}
    rate = {"init_lr": 0, "max_lr": LR, "min_lr": 0, "lr_warmup_steps": 0, "lr_decay_steps": 400}
    schedule = OptimizerParamScheduler(
        optimizer, **rate, **decay, lr_decay_style="constant", use_checkpoint_opt_param_scheduler=True
    )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    content |= {"distrib_optim_sharding_type": asked.sharding, "distrib_optim_fully_reshardable_mem_efficient": False}

    def state(content: dict, *, is_loading: bool) -> dict:
        metadata = content | {"dp_cp_group": group}
        weights = built.sharded_state_dict(metadata=metadata)
        return {
            "model": weights,
            "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata),
        }

    if asked.load is not None:
        for each in optimizer.chained_optimizers:  # torch's AdamW has no state before its first step
            each._init_optimizer_states_with_dummy_values()
        saved = dist_checkpointing.load_content_metadata(str(asked.load))
        wanted = state(saved, is_loading=True)
        found = dist_checkpointing.load(wanted, str(asked.load), strict=StrictHandling.RAISE_UNEXPECTED)
        built.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        schedule.load_state_dict(found["opt_param_scheduler"])
        for each in optimizer.chained_optimizers:  # which gave them all one count, that each would step
            for one in each.optimizer.state.values():
                one["step"] = one["step"].clone()
    losses: list[float] = []
    for batch in [None] if asked.data is None else json.loads(asked.data.read_text()):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        if batch is None:
            for parameter in built.parameters():
                parameter.main_grad.copy_(parameter.data / 2 + 0.1)
        else:
            tokens, labels = map(torch.tensor, batch)
            length = tokens.shape[1]
            mask = torch.ones(1, 1, length, length).tril() < 0.5
            loss = wrapped(tokens, torch.arange(length)[None], mask, labels=labels).mean()
            loss.backward()
            wrapped.finish_grad_sync()
            losses.append(loss.item())
        assert optimizer.step()[0]
        schedule.step(increment=BATCH)
        if batch is None or len(losses) == asked.save_at:
            count = schedule.num_steps // BATCH
            common = {"opt_param_scheduler": schedule.state_dict(), "iteration": count, "checkpoint_version": 3.0}
            arguments = arguments_of(model, asked.tp, asked.pp)
            arguments.consumed_train_samples = schedule.num_steps
            whole = state(content, is_loading=False) | common | {"args": arguments}
            dist_checkpointing.save(whole, str(asked.folder), content_metadata=content)
    return losses


def run(rank: int, size: int, meeting: str, asked: Namespace) -> None:
    torch.set_num_threads(1)
    torch.cuda.synchronize = lambda: None  # these two are called on every machine
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(asked.tp, asked.pp)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.fork = lambda *_: nullcontext()  # which has RNG states of GPUs
    model = json.loads(asked.model.read_text())
    found = None
    with OnCPU():
        if asked.do == "train":
            found = train(model, asked)
        elif asked.do == "save":
            save(model, asked.folder, asked.tp, asked.pp, asked.split, rank)
        else:
            found = logits(model, asked.folder, asked.tp, asked.pp)
    if rank == 0 and asked.out is not None:
        asked.out.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("do", choices=["save", "logits", "train"])
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save-at", type=int)
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--sharding", default="fully_reshardable")
    asked = parser.parse_args()
    asked.folder.mkdir(exist_ok=True)
    size = asked.tp * asked.pp * asked.dp
    with tempfile.TemporaryDirectory() as folder:
        if size == 1:
            run(0, 1, f"{folder}/meeting", asked)
            return
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=run, args=(rank, size, f"{folder}/meeting", asked)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"ranks exited with {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    main()
