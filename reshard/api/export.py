"""export: from bundles back to a Hugging Face folder, or to a checkpoint of another trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from manifests.arguments import check_choice
from manifests.errors import Parameter, UsageError
from reshard.copy.direct_io import Io
from reshard.copy.engine import WriteOptions
from reshard.copy.parallelism import Parallelism
from reshard.copy.progress import Progress, counting
from reshard.formats.dcp.write import export_dcp
from reshard.formats.deepspeed.write import TIED_KEY, DeepSpeedForm, export_deepspeed
from reshard.formats.huggingface.write import ExportResult, export_huggingface
from reshard.formats.manifest.read import open_packed
from reshard.formats.megatron.write import export_megatron
from reshard.transforms.cast import ExportDtype, cast_checkpoint
from stores.address import is_url
from stores.manifest_file import open_manifest

ExportForm = Literal["hf", "dcp", "deepspeed", "universal", "megatron"]
ExportNames = Literal["hf", "torchtitan", "pipeline"]

_HAVE_STATE = ("dcp", "universal", "megatron")  # optimizer state, if there is any
# What `names` may be besides those of Hugging Face's model.
_NAMES_OF: Mapping[ExportForm, tuple[str, ...]] = {"dcp": ("torchtitan",), "universal": ("pipeline",)}


def export(
    manifest: str | Path,
    out: str | Path,
    *,
    to: ExportForm = "hf",
    names: ExportNames = "hf",
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
    check_choice(Parameter("to"), to, get_args(ExportForm))
    check_choice(Parameter("names"), names, get_args(ExportNames))
    check_choice(Parameter("dtype"), dtype, get_args(ExportDtype))
    check_choice(Parameter("io"), io, get_args(Io))
    if names != "hf" and names not in _NAMES_OF.get(to, ()):
        problem = f"{names} is not for {Parameter('to', to)}"
        raise UsageError(Parameter("names"), problem, "leave it out", code="options.conflict")
    if tied_key != TIED_KEY and names != "pipeline":
        problem = f"is for {Parameter('names', 'pipeline')}"
        raise UsageError(Parameter("tied_key"), problem, "leave it out", code="options.conflict")
    if weights_only and to not in _HAVE_STATE:
        problem = f"{Parameter('to', to)} has weights alone"
        raise UsageError(Parameter("weights_only"), problem, "leave it out", code="options.conflict")
    if to == "universal" and dtype not in ("source", "fp32"):
        problem = f"{Parameter('to', to)} has float32 weights, not {dtype}"
        raise UsageError(Parameter("dtype"), problem, "leave it out", code="options.conflict")
    checkpoint = open_packed(open_manifest(manifest))
    address = str(out) if is_url(out) else Path(out)
    if to != "hf":
        has_weights_alone = weights_only or to not in _HAVE_STATE
        kinds = (checkpoint.tensors, *(() if has_weights_alone else checkpoint.moments.values()))
        total = sum(tensor.nbytes for tensors in kinds for tensor in tensors.values())
        options = WriteOptions(
            io=io, sync=sync, progress=counting(progress, total), parallelism=parallelism or Parallelism()
        )
        if to == "dcp":
            return export_dcp(
                checkpoint, address, force=force, for_torchtitan=names == "torchtitan", weights_only=weights_only,
                dtype=dtype, options=options,
            )  # fmt: skip
        if to == "megatron":
            return export_megatron(
                checkpoint, address, force=force, weights_only=weights_only, dtype=dtype, options=options
            )
        form: DeepSpeedForm = "layers" if to == "deepspeed" else "universal-pipeline" if names == "pipeline" else to
        return export_deepspeed(
            checkpoint, address, force=force, form=form, tied_key=tied_key, weights_only=weights_only, dtype=dtype,
            options=options,
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
