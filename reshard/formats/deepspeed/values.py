"""What a step of DeepSpeed's says beside its tensors: it agrees with them, or is named as left out.

Nothing here depends on the release (`ds_version`), on how ranks reduced gradients (`sparse_tensor_module_names`) or on
`dynamic_loss_scale`: AdamW's state is of gradients without a scale. `universal_checkpoint_info` and `cat_dim` say how
slices were merged that are whole here. `global_samples` counts sequences whose length is in no file.

Source: DeepSpeed 0.19.8, runtime/engine.py, runtime/zero/stage_1_and_2.py and checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from reshard.formats.adamw import bad_optimizer, read_number

_COUNTS = ("global_steps", "skipped_steps", "global_samples", "dp_world_size", "mp_world_size")
_OF_ALL_RANKS = (*_COUNTS, "checkpoint_parallel_dimensions", "ds_config")
_READ = {
    *_OF_ALL_RANKS, "module", "param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments",
    "buffer_names", "iteration", "ds_version", "universal_checkpoint_info", "sparse_tensor_module_names",
}  # fmt: skip
_OF_OPTIMIZER = {
    "loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "base_optimizer_state", "zero_stage", "ds_version",
    "single_partition_of_fp32_groups", "group_paddings", "param_alignment_paddings", "param_slice_mappings",
    "partition_count", "param_groups",
}  # fmt: skip
_OTHER_MODELS = ("compression_training", "curriculum_learning", "progressive_layer_drop", "sparse_attention")


def check_values(
    state: Mapping[object, object], ranks: Mapping[str, Mapping[object, object]], num_steps: int, where: str
) -> tuple[str, ...]:
    """Return what is left out of an optimizer's state and of the ranks' files, by name, after `num_steps` of it.

    Raises:
        SourceError: ranks contradict each other, or the optimizer's state.
    """
    if unread := sorted(str(name) for name in state.keys() - _OF_OPTIMIZER):
        raise bad_optimizer(where, f"has {unread[0][:80]!r}, which is not read")
    for name in _OF_ALL_RANKS:
        values = [rank.get(name) for rank in ranks.values()]
        if any(value != values[0] for value in values):
            raise bad_optimizer(where, f"ranks have different {name!r}, from {str(values[0])[:80]} on")
    skipped = 0.0
    for rank in list(ranks.values())[:1]:
        counts = {name: read_number(rank[name], f"{where}: {name}") for name in _COUNTS if name in rank}
        skipped, steps = counts.get("skipped_steps", 0), counts.get("global_steps", num_steps)
        if steps - skipped != num_steps:
            problem = f"ranks count {steps} steps, {skipped} of them skipped, and the optimizer took {num_steps}"
            raise bad_optimizer(where, problem)
        num_models = sum(name.startswith("mp_rank_") for name in ranks)
        if num_models and counts.get("mp_world_size", num_models) != num_models:
            raise bad_optimizer(where, f"expected mp_rank files of {counts['mp_world_size']} ranks, found {num_models}")
    if ranks and state.get("overflow") and not skipped:
        raise bad_optimizer(where, "the last step overflowed, and none was skipped")
    return tuple(dict.fromkeys(_left_out(state, list(ranks.values()))))


def _left_out(state: Mapping[object, object], ranks: Sequence[Mapping[object, object]]) -> Iterator[str]:
    scale = getattr(state.get("loss_scaler"), "fields", {}).get("cur_scale", 1.0)
    if scale != 1.0:
        yield "loss_scaler"
    for rank in ranks:
        yield from sorted(
            str(name) for name, value in rank.items() if name not in _READ and value not in (None, {}, [])
        )
        if isinstance(config := rank.get("ds_config"), dict):
            yield from (f"ds_config: {name}" for name in _OTHER_MODELS if config.get(name))
