"""pack: one bundle per stage, and a manifest."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from manifests.index import MAX_SHARD_NBYTES
from reshard.copy.direct_io import Io
from reshard.copy.parallelism import Parallelism
from reshard.copy.progress import Progress
from reshard.packing.prepare import PackRequest, prepare_pack
from reshard.packing.resolve import LayoutRequest
from reshard.packing.result import PackResult
from reshard.transforms.conversion import Conversion
from stores.address import is_url


def pack(
    source: str | Path,
    out: str | Path,
    layout: str | None = None,
    *,
    pp: int | None = None,
    drop: Collection[str] = (),
    model: str | Path | None = None,
    conversion: Conversion | None = None,
    virtual: bool = False,
    stages: str | None = None,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    force: bool = False,
    io: Io = "direct",
    sync: bool = True,
    parallelism: Parallelism | None = None,
    verify_source: bool = False,
    progress: Progress | None = None,
) -> PackResult:
    """Write one bundle per pipeline stage, an index and, last, the manifest that commits them.

    The output is a Hugging Face folder too, which transformers and others load: its shards are in the root, each with
    tensors of at most `max_shard_nbytes`. It has no index, and its shards are in folders, if bundles are virtual or
    tensors are in slices.

    `source`, `layout`, `pp`, `drop` and `model` are those of `plan`; the manifest records
    what `model` says. With a manifest as `source` this reshards it, optimizer state included. `out` is a folder or an
    object-store URL.
    `conversion` casts, dequantizes or merges slices. With `virtual`, bundles refer to the source's bytes instead of
    copying them; `stages` (`0-3,7`) packs only these, and the others become virtual. `force` replaces an existing
    output in one step. `io` selects direct or buffered writes, `sync` flushes them to disk; `parallelism` sets threads,
    concurrent requests and their memory. `verify_source` compares whole files with the hub's SHA-256.

    A folder without manifest.json is not a checkpoint. To resume an interrupted pack, call it again.

    Units: `nbytes` in bytes; progress is called with bytes done and bytes in total.
    Raises:
        SourceError, ModelError, ShardError, ManifestError: the source is incomplete, damaged or unsupported, or was
            changed while it was read.
        StoreError: the source does not exist, or cannot be reached.
        LayoutError: the layout is invalid, or does not cover the model.
        OutputError: `out` exists (`output.exists`) or cannot be written.
        UsageError: arguments conflict.

    Example:
        >>> done = reshard.pack("model", "model-pp2", "pp=2")
        >>> done.num_stages, done.num_tensors, done.path
        (2, 39, 'model-pp2/manifest.json')
        >>> reshard.pack("model-pp2", "model-pp4", "pp=4").num_stages
        4
    """
    request = PackRequest(
        source=str(source),
        out=str(out) if is_url(out) else Path(out),
        asked=LayoutRequest(spec=layout, num_ranks=pp),
        conversion=conversion or Conversion(),
        drop=drop,
        model=None if model is None else Path(model),
        virtual=virtual,
        stages=stages,
        max_shard_nbytes=max_shard_nbytes,
        force=force,
        io=io,
        sync=sync,
        parallelism=parallelism or Parallelism(),
        verify_source=verify_source,
    )
    return prepare_pack(request).run(progress)
