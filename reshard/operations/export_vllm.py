"""export: from bundles to the files of each rank that vLLM loads with `--load-format sharded_state`.

Source: vLLM 0.33.0, model_executor/model_loader/sharded_state_loader.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from manifests.safetensors import LENGTH_NBYTES, encode_header, layout_tensors
from reshard.copy.engine import WriteOptions
from reshard.operations.export import ExportResult, with_config_for
from reshard.operations.publish_export import ExportPlan, check_export_to, publish_export
from reshard.plans.pack_plan import GivenHeader, OutputShard
from reshard.sources.huggingface import CONFIG_NAME
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.source_index import KeptText
from reshard.transforms.cast import ExportDtype, cast_checkpoint, casts_in
from reshard.transforms.vllm import VllmModel
from stores.base import read_config, read_whole
from stores.manifest_file import Address

__all__ = ["export_vllm"]

_HF_ALIGNMENT = 8  # of headers, as the safetensors library pads them


def export_vllm(
    checkpoint: Checkpoint,
    out: Address,
    *,
    force: bool,
    pp: int = 1,
    tp: int = 1,
    dtype: ExportDtype = "source",
    options: WriteOptions | None = None,
) -> ExportResult:
    """Write a file for each of vLLM's ranks: `pp` pipeline stages of `tp` ranks; and the auxiliary files.

    Raises:
        OutputError: `out` exists, cannot be written, or is where the model came from.
        ShardError: a bundle's bytes do not match their digests.
        ModelError: vLLM's layout of the model is not known.
        UsageError: the model cannot be split so.
        UserError: see `cast_checkpoint` and `check_export_to`.
    """
    check_export_to(out, checkpoint, force=force)
    checkpoint = with_config_for(cast_checkpoint(checkpoint, dtype), dtype)
    (config,) = (item for item in checkpoint.auxiliary if item.path == CONFIG_NAME)
    model = VllmModel(checkpoint.shape, read_config(config.file, config.digest), checkpoint.tensors, pp, tp)
    plan = ExportPlan(
        copied=[item for item in checkpoint.auxiliary if item is not config],
        shards=tuple(_shards(model, pp, tp)),
        last=CONFIG_NAME,
        last_bytes=lambda: read_whole(config.file, config.digest),
    )
    return ExportResult(
        num_files=publish_export(out, plan, options or WriteOptions(), force=force),
        nbytes=sum(shard.nbytes for shard in plan.shards),
        identical=False,
        casts=casts_in(checkpoint),
    )


def _shards(model: VllmModel, pp: int, tp: int) -> Iterator[OutputShard]:
    for stage in range(pp):
        for rank in range(tp):
            place = f"pp-{stage}-tp-{rank}" if pp > 1 else f"rank-{rank}"
            tensors = {tensor.name: tensor for tensor in model.rank(stage, rank)}
            entries = layout_tensors((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors.values())
            header = encode_header(entries, {}, alignment=_HF_ALIGNMENT)
            given = GivenHeader.of(KeptText(header[LENGTH_NBYTES:]), entries)
            origins = tuple(tensors[entry.name] for entry in entries)
            path = f"model-{place}-part-0.safetensors"
            yield OutputShard(path=path, origins=origins, header_nbytes=len(given.header), given=given)
