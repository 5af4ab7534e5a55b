"""Whether the Hugging Face index beside a manifest says what the manifest's shards do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from manifests.errors import InputError
from manifests.index import INDEX_NAME, has_index, is_indexed, replicas_elsewhere
from manifests.jsontext import parse_json_object
from manifests.schema import Manifest, Stage
from reshard.operations.compare import Difference
from reshard.sources.weight_map import read_shard_index
from reshard.tensors.checkpoint import TensorAt
from stores.base import Folder, read_whole

__all__ = ["index_differences"]

_MOST_SHOWN = 3


def index_differences(
    manifest: Manifest, folder: Folder, stages: Collection[Stage], weights: Iterable[TensorAt]
) -> Iterator[Difference]:
    """Yield what the index says otherwise than the shards of these stages, which have these `weights`.

    Readers of Hugging Face folders load what it lists, and never see the manifest.
    """
    if not has_index(manifest):
        return
    file = folder.file(INDEX_NAME)
    try:
        raw = read_whole(file)
        listed = read_shard_index(raw, str(file), {}).weight_map
        metadata = parse_json_object(raw, str(file)).get("metadata")
    except InputError as error:
        yield Difference(error.where, error.problem)
        return
    shards = (shard for stage in stages for shard in stage.shards)
    indexed = [shard.path for shard in shards if is_indexed(shard.holds, shard.path)]
    paths = {str(folder.file(path)): path for path in indexed}
    tensors, replicas = list(weights), replicas_elsewhere(manifest.ties)
    stored = {tensor.name: paths.get(str(tensor.file)) for tensor in tensors if tensor.name not in replicas}
    is_all = len(stages) == len(manifest.stages)
    yield from _compare(str(file), stored, listed, indexed, is_all=is_all)
    total = sum(tensor.nbytes for tensor in tensors if str(tensor.file) in paths)
    found = metadata.get("total_size") if isinstance(metadata, dict) else None
    if is_all and (found != total or isinstance(found, bool)):
        yield Difference(f"{file}: metadata.total_size", f"expected {total} (its tensors), found {str(found)[:80]}")


def _compare(
    where: str, stored: Mapping[str, str | None], listed: Mapping[str, str], paths: Collection[str], *, is_all: bool
) -> Iterator[Difference]:
    missing = [name for name in stored if name not in listed]
    moved = [name for name, path in stored.items() if name in listed and listed[name] != path]
    unknown = [name for name, path in listed.items() if name not in stored and (is_all or path in paths)]
    for names, problem in (
        (missing, "the manifest's shards have {}, which the index does not list"),
        (moved, "the index lists {} in another shard than the manifest's"),
        (unknown, "the index lists {}, which the manifest's shards do not have"),
    ):
        if names:
            shown = ", ".join(map(repr, names[:_MOST_SHOWN])) + (", ..." if len(names) > _MOST_SHOWN else "")
            count = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
            yield Difference(f"{where}: weight_map", problem.format(f"{count} ({shown})"))
