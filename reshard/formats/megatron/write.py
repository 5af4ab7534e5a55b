"""export: from bundles to a checkpoint of Megatron-Core's `torch_dist` format, as Megatron-LM's --load reads.

Source: megatron-core 0.16.1, dist_checkpointing; Megatron-LM core_v0.16, megatron/training/checkpointing.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from manifests.schema import MOMENTS, OptimizerState, TrainingState
from reshard.archives.names import MARK_NAME, METADATA_NAME
from reshard.archives.saved import Instance, Name, saved_value, torch_dtype
from reshard.formats.assemble import OPTIMIZER
from reshard.formats.auxiliary import with_source_files
from reshard.formats.export import (
    ExportPlan,
    adamw_options,
    cast_for_export,
    check_moments,
    owned_tensors,
    publish_export,
    rate_of,
    refuse_state,
)
from reshard.formats.megatron.arguments import arguments_of
from reshard.formats.megatron.names import COMMON_NAME, MARK, RELEASE, TRACKER_NAME
from reshard.formats.megatron.tensors import MegatronModel
from reshard.formats.megatron.training import DECAYS_QK_NORMS, MASTERS, QK_NORM, RESHARDABLE
from reshard.formats.saved_state import SavedState
from reshard.formats.table import ExportOptions, ExportResult
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.lazy import MemoryFile
from reshard.transforms.casts import cast_tensor
from stores.open import Address

_EMBEDDING = "model.embed_tokens.weight"


def export(checkpoint: Checkpoint, out: Address, options: ExportOptions) -> ExportResult:
    """Write what Megatron-LM loads at any parallel degrees: the model's arguments and weights, as a release.

    With optimizer state they are an iteration, and the state that of its distributed optimizer. The vocabulary is not
    padded: its loader does that. Weights are as the manifest has them unless `dtype` says otherwise.
    """
    masters = owned_tensors(checkpoint, checkpoint.tensors)
    checkpoint, casts = cast_for_export(checkpoint, options.dtype)
    moments = {kind: owned_tensors(checkpoint, tensors) for kind, tensors in checkpoint.moments.items()}
    checkpoint = replace(checkpoint, tensors=owned_tensors(checkpoint, checkpoint.tensors), moments=moments)
    config = checkpoint.read_config()
    model = MegatronModel(config, masters, checkpoint.location)
    arguments = arguments_of(config, checkpoint.location) | _training_arguments(checkpoint, config)
    arguments["mtp_num_layers"] = len(model.mtp_layers) or None  # the config may have more than its files
    trained, state, flags = checkpoint.trained, dict[str, object](), ""
    content: dict[str, object] = {"singleton_local_shards": False, "non_homogeneous_layers": not model.is_stacked}
    if trained is not None and trained.optimizer is not None:
        state, rate = optimizer_of(checkpoint, trained, trained.optimizer), rate_of(checkpoint, trained)
        flags = f"--lr {rate.peak!r} --min-lr {rate.minimum!r}"  # see Note [Groups of Megatron]
        arguments |= {
            "iteration": trained.step, "consumed_train_samples": samples_of(trained), "no_save_rng": True,
            DECAYS_QK_NORMS: _decays_qk_norms(checkpoint, trained.optimizer),
        }  # fmt: skip
        content |= {
            "distrib_optim_sharding_type": RESHARDABLE, "distrib_optim_fully_reshardable_mem_efficient": False,
            "chained_optim_avoid_prefix": True,
        }  # fmt: skip
    step = trained.step if trained is not None and state else 0
    tag = f"iter_{step:07d}" if state else RELEASE
    saved = SavedState(f"{tag}/")
    for tensor in checkpoint.tensors.values():
        if placed := model.place(tensor):
            saved.add(placed, lambda key: (key,))
    for kind, tensors in ((MASTERS, masters), *checkpoint.moments.items()) if state else ():
        for fqn in checkpoint.moments[MOMENTS[0]]:
            if placed := model.place(cast_tensor(tensors[fqn], "F32")):
                saved.add(placed, partial(_state_key, kind=kind))
    for key in model.objects():
        saved.add_value((key,), [None])
    made = {
        COMMON_NAME: saved_value(_common(arguments, step, content) | state),
        METADATA_NAME: saved.metadata(),
        MARK_NAME: json.dumps(MARK).encode(),
    }
    plan = ExportPlan(
        copied=[
            replace(item, path=f"{tag}/{item.path}") for item in with_source_files(checkpoint.auxiliary, is_same=False)
        ],
        shards=saved.files.shards,
        made=[MemoryFile(f"{tag}/{name}", data) for name, data in made.items()],
        last=TRACKER_NAME,  # without it Megatron-LM sees no checkpoint
        last_bytes=(str(step) if state else RELEASE).encode,
    )
    return replace(publish_export(out, plan, options, casts), flags=flags)


def _training_arguments(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, object]:
    """Return what else Megatron-LM looks for in the arguments of a checkpoint that it loads."""
    vocab, embedding = config["vocab_size"], checkpoint.tensors[_EMBEDDING]
    return {
        "vocab_size": vocab, "padded_vocab_size": vocab, "make_vocab_size_divisible_by": 1,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "world_size": 1, "iteration": 0,
        "max_position_embeddings": config.get("max_position_embeddings"), "add_position_embedding": True,
        "params_dtype": torch_dtype(embedding.dtype), "ckpt_format": "torch_dist", "use_dist_ckpt": True,
        "tokenizer_type": "HuggingFaceTokenizer", "consumed_train_samples": 0, "consumed_valid_samples": 0,
    }  # fmt: skip


def _state_key(key: str, *, kind: str) -> tuple[str]:
    return (f"{OPTIMIZER}.state.{kind}.{key}",)


def _common(arguments: Mapping[str, object], step: int, content: Mapping[str, object]) -> dict[str, object]:
    return {
        "args": Instance(Name("argparse", "Namespace"), arguments),
        "checkpoint_version": 3.0,
        "iteration": step,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": content,
    }


logger = logging.getLogger(__name__)

# Note [Groups of Megatron]: a loader finds each of its trainer's groups by the factors of its weight decay and learning
# rate, and by whether its parameters are of experts; since megatron-core 0.19, also by the peak and the minimum of its
# learning rate, which older releases take from the group, whatever their flags say. Its own rule says which parameters
# are in which; it fails if a group is not there, and does not look at others.
_FACTORS = (1.0, 0.0)
_STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "sqrt": "minus_sqrt"}


def optimizer_of(checkpoint: Checkpoint, trained: TrainingState, optimizer: OptimizerState) -> dict[str, object]:
    """Return the entries of `common.pt`, for one optimizer of all parameters. See Note [Groups of Megatron].

    With expert parallelism, Megatron has an optimizer of the experts' parameters alone, and its loader expects two.
    """
    check_moments(checkpoint, optimizer)
    options = adamw_options(checkpoint, trained, replace(optimizer, groups=_decayed(checkpoint, optimizer)))
    rate, decay = rate_of(checkpoint, trained), options["weight_decay"]
    common = {
        **options, "step": trained.step, "bias_correction": True, "lr_mult": 1.0, "is_decoupled_lr": False,
        "is_expert_parallel": False, "default_config": True, "max_lr": rate.peak, "min_lr": rate.minimum,
    }  # fmt: skip
    groups = [{**common, "weight_decay": decay if factor else 0.0, "wd_mult": factor} for factor in _FACTORS]
    state = {OPTIMIZER: {"param_groups": groups}, "param_state_sharding_type": RESHARDABLE}
    batch = trained.batch.global_batch if trained.batch else 1
    style = _STYLES[rate.decay]
    if style != "constant" and (rate.stable_steps or style == "minus_sqrt"):
        decay_steps = rate.decay_steps - rate.warmup_steps - rate.stable_steps
        flags = f"--lr-wsd-decay-style {style} --lr-wsd-decay-iters {decay_steps}"
        logger.warning("%s: Megatron-LM reads the decay of a WSD schedule from flags: %s", checkpoint.location, flags)
        style = "WSD"
    schedule: dict[str, Any] = {
        "max_lr": rate.peak, "min_lr": rate.minimum, "lr_decay_style": style,
        "lr_warmup_steps": rate.warmup_steps * batch, "num_steps": samples_of(trained),
        "lr_decay_steps": max(rate.decay_steps, rate.warmup_steps + 1) * batch,
        "start_wd": decay, "end_wd": decay, "wd_incr_steps": 0, "wd_incr_style": "constant",
    }  # fmt: skip
    return {OPTIMIZER: state, "opt_param_scheduler": schedule}


def samples_of(trained: TrainingState) -> int:
    """Return the sequences that were trained on, which Megatron counts where the runner counts steps."""
    return trained.step * (trained.batch.global_batch if trained.batch else 1)


def _decayed(checkpoint: Checkpoint, optimizer: OptimizerState) -> tuple[Any, ...]:
    """Return the groups without the one of 1-D parameters that have no weight decay."""
    lines = _lines(checkpoint)
    if _decays_qk_norms(checkpoint, optimizer):
        lines = _without_qk_norms(lines)
        what = (
            "%s: norms of queries and keys have weight decay; Megatron-LM decays them with --apply-wd-to-qk-layernorm"
        )
        logger.warning(what, checkpoint.location)
    rest = tuple(group for group in optimizer.groups if group.fqns != lines)
    for group in optimizer.groups:
        if group.fqns == lines and (len(rest) != 1 or group != replace(rest[0], weight_decay=0.0, fqns=lines)):
            problem = "expected 1-D parameters without weight decay, and otherwise one set of options"
            raise refuse_state(checkpoint, problem)
    if lines and len(rest) == len(optimizer.groups) and rest[0].weight_decay:
        logger.warning(
            "%s: 1-D parameters had a weight decay of %g; in Megatron they have none by default",
            checkpoint.location,
            rest[0].weight_decay,
        )
    return rest


def _decays_qk_norms(checkpoint: Checkpoint, optimizer: OptimizerState) -> bool:
    """Return whether a group is that of all 1-D parameters but the norms of queries and keys."""
    others = _without_qk_norms(_lines(checkpoint))
    return others != _lines(checkpoint) and any(group.fqns == others for group in optimizer.groups)


def _lines(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the 1-D parameters."""
    return tuple(sorted(fqn for fqn, at in checkpoint.moments[MOMENTS[0]].items() if len(at.shape) == 1))


def _without_qk_norms(fqns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(fqn for fqn in fqns if not QK_NORM.search(fqn))
