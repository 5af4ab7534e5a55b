"""merge: adapters added to a model's weights, written as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from manifests.errors import Parameter, UsageError, as_texts
from reshard.copy.engine import WriteOptions
from reshard.copy.parallelism import Parallelism
from reshard.copy.runs import Progress, counting
from reshard.formats.auxiliary import with_source_files
from reshard.formats.export import check_export_to
from reshard.formats.open import open_source
from reshard.formats.table import HUGGINGFACE, ExportOptions
from reshard.transforms.adapters import merge_adapters
from reshard.transforms.casts import check_stored_ties
from reshard.transforms.quantize import forget_source, is_scale
from stores.address import output_address
from stores.direct_io import Io


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeResult:
    """The result of a merge. Units: bytes."""

    num_files: int
    nbytes: int
    num_merged: int  # weights that an adapter changed


def merge(
    base: str | Path,
    adapters: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    weights: Sequence[float] = (),
    force: bool = False,
    io: Io = "direct",
    sync: bool = True,
    parallelism: Parallelism | None = None,
    progress: Progress | None = None,
) -> MergeResult:
    """Add LoRA adapters to a model's weights, and write the result as a Hugging Face folder.

    `base` is any source of `pack`, `adapters` are PEFT folders, each with one of the `weights`, by default 1. A merged
    value is computed in float64 and rounded once to the weight's dtype; other tensors keep their bytes. Tensors are
    merged in blocks. `pack` with `Conversion(adapters=...)` writes bundles instead.
    `out`, `force`, `io`, `sync` and `parallelism` are those of `pack`, by default with two threads more.

    Units: `nbytes` in bytes; progress is called with bytes done and bytes in total.
    Raises:
        SourceError: an adapter is of another model, or of a kind that is not supported.
        InputError: the base is incomplete, damaged or unsupported; see `pack`.
        OutputError: `out` exists (`output.exists`) or cannot be written.
        UsageError: `out` is inside what is read, or arguments conflict.

    Example:
        >>> done = reshard.merge("model", ["adapter"], "model-merged")
        >>> done.num_merged
        8
    """
    folders = as_texts(adapters)
    if not folders:
        raise UsageError(Parameter("adapters"), "expected one or more, found none", code="options.invalid-value")
    if weights and len(weights) != len(folders):
        problem = f"expected one for each of {len(folders)} adapters, found {len(weights)}"
        raise UsageError(Parameter("weights"), problem, "leave it out to add them as they are", code="options.conflict")
    checkpoint = open_source(str(base))
    address = output_address(out)
    check_export_to(address, checkpoint, force=force)
    pairs = list(zip(folders, weights or [1.0] * len(folders), strict=True))
    merged = merge_adapters(checkpoint, pairs)
    check_stored_ties(merged, can_drop=False)
    merged = forget_source(merged)
    merged = replace(merged, auxiliary=tuple(with_source_files(merged.auxiliary, is_same=False)))
    before = checkpoint.tensors
    changed = [fqn for fqn, tensor in merged.tensors.items() if tensor.file is not before[fqn].file]
    num_merged = sum(not is_scale(fqn, before) for fqn in changed)
    total = sum(tensor.nbytes for tensor in merged.tensors.values())
    parallelism = (parallelism or Parallelism()).computing()
    write = WriteOptions(io=io, sync=sync, progress=counting(progress, total), parallelism=parallelism)
    done = HUGGINGFACE.export(merged, address, ExportOptions(to="hf", force=force, write=write))
    return MergeResult(num_files=done.num_files, nbytes=done.nbytes, num_merged=num_merged)
