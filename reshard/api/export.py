"""export: from bundles back to a Hugging Face folder, or to one of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from manifests.errors import UsageError
from reshard.api.arguments import names_parameters
from reshard.copy.direct_io import Io
from reshard.copy.engine import WriteOptions
from reshard.copy.parallelism import Parallelism
from reshard.operations.export import ExportResult, export_huggingface
from reshard.operations.export_dcp import export_dcp
from reshard.operations.progress import Progress, counting
from reshard.sources.bundles import open_manifest
from reshard.transforms.cast import ExportDtype, cast_checkpoint
from stores.address import is_url

__all__ = ["export"]


@names_parameters
def export(
    manifest: str | Path,
    out: str | Path,
    *,
    to: Literal["hf", "dcp"] = "hf",
    names: Literal["hf", "torchtitan"] = "hf",
    weights_only: bool = False,
    dtype: ExportDtype = "source",
    force: bool = False,
    io: Io = "direct",
    sync: bool = True,
    parallelism: Parallelism | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Write a manifest's model as a Hugging Face folder, or a folder of torch.distributed.checkpoint (`to="dcp"`).

    In a Hugging Face folder, untrained tensors are restored byte for byte, in the files that they came from. A DCP
    folder has `names` of Hugging Face's model or torchtitan's, and the optimizer state and training state if there is
    one, unless `weights_only`. `dtype` is as in the source (in a DCP folder: as trained), or one for all parameters.
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
    if to == "hf" and (names != "hf" or weights_only):
        flag = "weights_only" if weights_only else "names"
        raise UsageError(flag, "requires to dcp", "leave it out", code="options.conflict")
    checkpoint = open_manifest(manifest)
    address = str(out) if is_url(out) else Path(out)
    if to == "dcp":
        kinds = (checkpoint.tensors, *(() if weights_only else checkpoint.moments.values()))
        total = sum(tensor.nbytes for tensors in kinds for tensor in tensors.values())
        options = WriteOptions(
            io=io, sync=sync, progress=counting(progress, total), parallelism=parallelism or Parallelism()
        )
        return export_dcp(
            checkpoint, address, force=force, for_torchtitan=names == "torchtitan", weights_only=weights_only,
            dtype=dtype, options=options,
        )  # fmt: skip
    nbytes = sum(tensor.nbytes for tensor in cast_checkpoint(checkpoint, dtype).tensors.values())
    return export_huggingface(
        checkpoint,
        address,
        force=force,
        dtype=dtype,
        options=WriteOptions(
            io=io, sync=sync, progress=counting(progress, nbytes), parallelism=parallelism or Parallelism()
        ),
    )
