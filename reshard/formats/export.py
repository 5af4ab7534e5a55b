"""export: from bundles back to a Hugging Face folder, or to a checkpoint of another trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

from manifests.errors import Parameter, UsageError, check_choice
from reshard.copy.direct_io import Io
from reshard.copy.engine import WriteOptions
from reshard.copy.parallelism import Parallelism
from reshard.copy.runs import Progress, counting
from reshard.formats.manifest.read import open_packed
from reshard.formats.publish_export import check_export_to
from reshard.formats.table import TIED_KEY, ExportOptions, ExportResult, export_targets, names_of_targets
from reshard.transforms.cast import ExportDtype, cast_checkpoint
from stores.address import is_url
from stores.open import open_manifest


def export(
    manifest: str | Path,
    out: str | Path,
    *,
    to: str = "hf",
    names: str = "hf",
    tied_key: str = TIED_KEY,
    weights_only: bool = False,
    dtype: ExportDtype = "source",
    force: bool = False,
    io: Io = "direct",
    sync: bool = True,
    parallelism: Parallelism | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Write a manifest's model as a Hugging Face folder, or as a checkpoint that another trainer loads.

    In a Hugging Face folder, untrained tensors are restored byte for byte, in the files that they came from. A DCP
    folder has `names` of Hugging Face's model or torchtitan's, and the optimizer state and training state if there is
    one, unless `weights_only`. `dtype` is as in the source (in a DCP folder: as trained), or one for all parameters.
    `to="deepspeed"` writes the layers of a PipelineModule, weights alone; `to="universal"` DeepSpeed's Universal
    Checkpoint, in float32, with optimizer state, and with `names` of Hugging Face's model or of a PipelineModule,
    the `TiedLayerSpec` of whose tied embedding has the key `tied_key`.
    `to="megatron"` writes what Megatron-LM loads, with optimizer state for its distributed optimizer.
    `out`, `force`, `io`, `sync` and `parallelism` are those of `pack`.

    Units: `nbytes` in bytes; progress is called with bytes done and bytes in total.
    Raises:
        ManifestError, ShardError: the manifest or a bundle is damaged.
        OutputError: `out` exists (`output.exists`), cannot be written, or is where the model came from.
        UsageError: `out` is inside what is read, or weights cannot be cast.

    Example:
        >>> done = reshard.export("model-pp2", "model-again")
        >>> done.identical, (Path("model-again/config.json").read_bytes() == Path("model/config.json").read_bytes())
        (True, True)
    """
    targets = export_targets()
    check_choice(Parameter("to"), to, targets)
    check_choice(Parameter("names"), names, names_of_targets())
    check_choice(Parameter("dtype"), dtype, get_args(ExportDtype))
    check_choice(Parameter("io"), io, get_args(Io))
    kind, target = targets[to]
    if names != "hf" and names not in target.names:
        problem = f"{names} is not for {Parameter('to', to)}"
        raise UsageError(Parameter("names"), problem, "leave it out", code="options.conflict")
    if tied_key != TIED_KEY and names != "pipeline":
        raise UsageError(
            Parameter("tied_key"), f"is for {Parameter('names', 'pipeline')}", "leave it out", code="options.conflict"
        )
    if weights_only and not target.has_state:
        raise UsageError(
            Parameter("weights_only"),
            f"{Parameter('to', to)} has weights alone",
            "leave it out",
            code="options.conflict",
        )
    if target.is_float32 and dtype not in ("source", "fp32"):
        problem = f"{Parameter('to', to)} has float32 weights, not {dtype}"
        raise UsageError(Parameter("dtype"), problem, "leave it out", code="options.conflict")
    checkpoint = open_packed(open_manifest(manifest))
    address = str(out) if is_url(out) else Path(out)
    check_export_to(address, checkpoint, force=force)
    if weights_only or not target.has_state:
        trained = None if checkpoint.trained is None else replace(checkpoint.trained, optimizer=None)
        checkpoint = replace(checkpoint, moments={}, trained=trained)
    planned = cast_checkpoint(checkpoint, dtype) if to == "hf" else checkpoint
    total = sum(tensor.nbytes for kinds in (planned.tensors, *planned.moments.values()) for tensor in kinds.values())
    write = WriteOptions(io=io, sync=sync, progress=counting(progress, total), parallelism=parallelism or Parallelism())
    options = ExportOptions(to=to, names=names, tied_key=tied_key, dtype=dtype, force=force, write=write)
    return kind.export(checkpoint, address, options)
