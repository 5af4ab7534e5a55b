"""export: from bundles back to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from reshard.api.arguments import names_parameters
from reshard.copy.direct_io import Io
from reshard.copy.engine import WriteOptions
from reshard.copy.parallelism import Parallelism
from reshard.operations.export import ExportResult, export_huggingface
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
    to: Literal["hf"] = "hf",
    dtype: ExportDtype = "source",
    force: bool = False,
    io: Io = "direct",
    sync: bool = True,
    parallelism: Parallelism | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Write a manifest's model as a Hugging Face folder.

    Untrained tensors are restored byte for byte, in the files that they came from. `dtype` is as in the source, or one
    for all parameters. `out`, `force`, `io`, `sync` and `parallelism` are those of `pack`.

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
    assert to == "hf", "the only format"
    checkpoint = open_manifest(manifest)
    nbytes = sum(tensor.nbytes for tensor in cast_checkpoint(checkpoint, dtype).tensors.values())
    return export_huggingface(
        checkpoint,
        str(out) if is_url(out) else Path(out),
        force=force,
        dtype=dtype,
        options=WriteOptions(
            io=io, sync=sync, progress=counting(progress, nbytes), parallelism=parallelism or Parallelism()
        ),
    )
