"""inspect: what a checkpoint contains, from headers alone."""

from __future__ import annotations

from pathlib import Path

from reshard.api.packed import PackedModel, open
from reshard.formats.open import find_format
from reshard.formats.table import Listing


def inspect(checkpoint: str | Path) -> PackedModel | Listing:
    """Read what a checkpoint contains: a manifest as `open` does, and of other trainers' formats the tensors.

    `checkpoint` is a manifest, a folder with `pytorch_model*.bin` files, or one that torch.distributed.checkpoint,
    DeepSpeed or Megatron-Core has saved. No tensor is read.

    Raises:
        ManifestError: the manifest is damaged, or there is nothing of all these.
        SourceError: the files are damaged, or their pickles not of tensors.
        InputError: they cannot be read.

    Example:
        >>> done = reshard.export("model-pp2", "model-dcp", to="dcp")
        >>> listing = reshard.inspect("model-dcp")
        >>> listing.format, len(listing.tensors), listing.tensors[0].dtype
        ('dcp', 39, 'BF16')
        >>> reshard.inspect("model-pp2").layout.spec
        'pp=2'
    """
    if Path(checkpoint).suffix != ".json":
        format_, folder = find_format(str(checkpoint))
        if listing := format_.list_tensors(folder):
            return listing
    return open(checkpoint)
