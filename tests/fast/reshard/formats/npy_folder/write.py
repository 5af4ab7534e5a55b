"""The export of that format: float32, so that NumPy reads it."""

from __future__ import annotations

import io

from numpy.lib import format as npy

from manifests.models.config import CONFIG_NAME
from reshard.formats.export import ExportPlan, cast_for_export, publish_export
from reshard.formats.table import ExportOptions, ExportResult
from reshard.plans.pack_plan import OutputShard, without_header
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.lazy import MemoryFile
from stores.base import read_whole
from stores.bundles import TensorAt
from stores.open import Address


def export(checkpoint: Checkpoint, out: Address, options: ExportOptions) -> ExportResult:
    checkpoint, casts = cast_for_export(checkpoint, "fp32")
    (config,) = (item for item in checkpoint.auxiliary if item.path == CONFIG_NAME)
    plan = ExportPlan(
        copied=[item for item in checkpoint.auxiliary if item is not config],
        shards=tuple(map(_shard, checkpoint.tensors.values())),
        last=CONFIG_NAME,
        last_bytes=lambda: read_whole(config.file, config.digest),
    )
    return publish_export(out, plan, options, casts)


def _shard(tensor: TensorAt) -> OutputShard:
    header = io.BytesIO()
    npy.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": tensor.shape})
    data = header.getvalue()
    first = TensorAt(f"header of {tensor.name}", "U8", (len(data),), MemoryFile("a header", data), 0, len(data))
    return without_header(f"{tensor.name}.npy", (first, tensor))
