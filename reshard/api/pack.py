"""pack: one bundle per stage, and a manifest."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from manifests.index import MAX_SHARD_NBYTES
from reshard.copy.direct_io import Io
from reshard.copy.engine import WriteOptions
from reshard.copy.parallelism import Parallelism
from reshard.copy.progress import Progress
from reshard.packing.options import PackOptions
from reshard.packing.prepare import PreparedPack, prepare_pack
from reshard.packing.resolve import LayoutRequest
from reshard.packing.result import PackResult
from reshard.plans.partition import Part, parse_part
from reshard.transforms.conversion import Conversion
from stores.address import HubAddress, hub_output, is_url


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
    part: str | Part | None = None,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    force: bool = False,
    io: Io = "direct",
    sync: bool = True,
    parallelism: Parallelism | None = None,
    verify_source: bool = False,
    on_plan: Callable[[PreparedPack], object] = lambda plan: None,
    progress: Progress | None = None,
) -> PackResult:
    """Write one bundle per pipeline stage, an index and, last, the manifest that commits them.

    The output is a Hugging Face folder too, which transformers and others load: its shards are in the root, each with
    tensors of at most `max_shard_nbytes`. It has no index, and its shards are in folders, if bundles are virtual or
    tensors are in slices.

    `source`, `layout`, `pp`, `drop` and `model` are those of `plan`; the manifest records
    what `model` says. With a manifest as `source` this reshards it, optimizer state included. `out` is a folder, an
    object-store URL, or `hf://org/name[@branch]`: then a folder below HF_HOME is packed, pushed and removed (`push`).
    `conversion` casts, dequantizes or merges slices. With `virtual`, bundles refer to the source's bytes instead of
    copying them; `stages` (`0-3,7`) packs only these, and the others become virtual. `part` (`2/8`) packs that part of
    the shards, here or on another machine, and `commit` merges all of them. `force` replaces an existing output in one
    step. `io` selects direct or buffered writes, `sync` flushes them to disk; `parallelism` sets threads, concurrent
    requests and their memory. `verify_source` compares whole files with the hub's SHA-256.

    `on_plan` is called with what will be written, before anything is; it may raise to stop there.

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
    options = PackOptions(
        out=str(out) if is_url(out) else Path(out),
        layout=LayoutRequest(spec=layout, num_ranks=pp),
        conversion=conversion or Conversion(),
        drop=drop,
        model=None if model is None else Path(model),
        virtual=virtual,
        stages=stages,
        part=parse_part(part) if isinstance(part, str) else part,
        max_shard_nbytes=max_shard_nbytes,
        force=force,
        write=WriteOptions(io=io, sync=sync, parallelism=parallelism or Parallelism()),
        verify_source=verify_source,
    )
    prepared = prepare_pack(str(source), options)
    on_plan(prepared)
    if (address := hub_output(options.out)) is not None:
        return _pack_and_push(prepared, address, progress)
    return prepared.run(progress)


def _pack_and_push(prepared: PreparedPack, address: HubAddress, progress: Progress | None) -> PackResult:
    """Pack to a folder below HF_HOME, push that, and remove it."""
    from reshard.packing.push import check_free, push_folder, staged  # the hub's client

    force = prepared.options.force
    check_free(address, force=force)
    with staged(address) as folder:
        done = prepared.into(folder).run(progress)
        push_folder(folder, address, force=force)
    return replace(done, out=prepared.options.out)
