"""Whether the Hugging Face index beside a manifest says what the manifest's shards do.

Readers of Hugging Face folders load what it lists, and never see the manifest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from manifests.errors import InputError
from manifests.index import INDEX_NAME, has_index, is_indexed, replicas_elsewhere
from manifests.schema import Manifest, Stage
from reshard.operations.compare import Difference
from reshard.sources.weight_map import ShardIndex, read_shard_index
from stores.base import Folder, read_whole
from stores.bundles import TensorAt

_MOST_SHOWN = 3


def read_own_index(manifest: Manifest, folder: Folder, names: Mapping[str, str]) -> ShardIndex | Difference | None:
    """Return the index beside a manifest, its names as `read_shard_index`, or what is wrong with it; None: none."""
    if not has_index(manifest):
        return None
    file = folder.file(INDEX_NAME)
    try:
        return read_shard_index(read_whole(file), str(file), names)
    except InputError as error:
        return Difference(error.where, error.problem)


def index_differences(
    index: ShardIndex, manifest: Manifest, folder: Folder, stages: Collection[Stage], weights: Iterable[TensorAt]
) -> Iterator[Difference]:
    """Yield what the index says otherwise than the shards of these stages, which have these `weights`.

    What is found as expected is removed from the index.
    """
    where, listed = str(folder.file(INDEX_NAME)), index.weight_map
    shards = (shard for stage in stages for shard in stage.shards)
    indexed = [shard.path for shard in shards if is_indexed(shard.holds, shard.path)]
    paths, replicas = {folder.file(path): path for path in indexed}, replicas_elsewhere(manifest.ties)
    missing, moved, total = [], [], 0
    for tensor in weights:
        path = paths.get(tensor.file)
        total += 0 if path is None else tensor.nbytes
        if tensor.name not in replicas:
            found = listed.pop(tensor.name, None)
            if found is None:
                missing.append(tensor.name)
            elif found != path:
                moved.append(tensor.name)
    is_all = len(stages) == len(manifest.stages)
    unknown = [name for name, path in listed.items() if is_all or path in indexed]
    for names, problem in (
        (missing, "the manifest's shards have {}, which the index does not list"),
        (moved, "the index lists {} in another shard than the manifest's"),
        (unknown, "the index lists {}, which the manifest's shards do not have"),
    ):
        if names:
            shown = ", ".join(map(repr, names[:_MOST_SHOWN])) + (", ..." if len(names) > _MOST_SHOWN else "")
            count = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
            yield Difference(f"{where}: weight_map", problem.format(f"{count} ({shown})"))
    if is_all and (index.total_size != total or isinstance(index.total_size, bool)):
        problem = f"expected {total} (its tensors), found {str(index.total_size)[:80]}"
        yield Difference(f"{where}: metadata.total_size", problem)
