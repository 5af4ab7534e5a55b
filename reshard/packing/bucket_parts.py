"""The parts of a pack to a bucket: below the prefix, where their shards stay; the manifest names them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

from manifests.codec import decode_manifest, encode_manifest
from manifests.errors import InputError, OutputError, Parameter, UsageError
from manifests.index import INDEX_NAME
from manifests.invariants import MANIFEST_NAME, check_manifest
from manifests.schema import Manifest, Shard
from reshard.packing.parts_place import OF_PART, FileFacts, Merged
from stores.base import Blocks
from stores.folders.owned import files_in
from stores.objects.client import ObjectEntry, open_writable, remove_objects
from stores.objects.output import SMALL_NBYTES
from stores.objects.store import ObjectFile, list_objects, open_objects

logger = logging.getLogger(__name__)


class BucketParts:
    """The parts of one prefix."""

    def __init__(self, out: str, *, force: bool) -> None:
        if force:
            problem, hint = "is not supported for parts in a bucket", "remove the old output first"
            raise UsageError(Parameter("force"), problem, hint, code="options.conflict")
        self._client = open_writable(out).settled()
        self.where = self._client.url

    def check_free(self, folder: str, small: Collection[str]) -> bool:
        listed = list_objects(self._client)
        if (manifest := self._manifest_in(listed)) is not None and folder in _folders_of(manifest):
            return False
        is_begun = any(name.startswith(f"{folder}/") for name in listed)
        committing = {*small, INDEX_NAME} if is_begun else set()  # a commit that was killed has written some of these
        if any(OF_PART.fullmatch(name) is None and name not in committing for name in listed):
            raise self._exists()
        return True

    def address(self, name: str) -> str:
        return f"{self.where}/{name}"

    def files(self) -> Mapping[str, FileFacts]:
        listed = list_objects(self._client)
        return {name: (entry.nbytes, entry.etag or "") for name, entry in listed.items() if OF_PART.fullmatch(name)}

    def load(self, name: str) -> bytes:
        return self._client.load(name)

    def remove(self, where: str) -> None:
        remove_objects(self._client, [name for name in list_objects(self._client) if name.startswith(f"{where}/")])

    def committed(self, folders: Collection[str]) -> Manifest | None:
        manifest = self._manifest_in(list_objects(self._client))
        if manifest is None:
            return None
        if set(folders) - _folders_of(manifest):
            raise self._exists()
        self._clear_away(manifest)
        return manifest

    def publish(self, merged: Merged) -> Manifest:
        """Write the auxiliary files, the index and, last, the manifest; a commit that was killed is run again."""
        path_of = {path: f"{place}/{path}" for path, place in merged.folder_of.items()}

        def placed(shard: Shard) -> Shard:
            return replace(shard, path=path_of[shard.path])

        stages = (replace(stage, shards=tuple(map(placed, stage.shards))) for stage in merged.manifest.stages)
        manifest = replace(merged.manifest, stages=tuple(stages))
        check_manifest(manifest)
        parts = open_objects(self.where)
        files = {item.path: Blocks(parts.file(path_of[item.path]), item.digest) for item in manifest.files}
        if merged.indexed:
            files[INDEX_NAME] = Blocks(merged.index(path_of))
        listed = list_objects(self._client)
        if any(OF_PART.fullmatch(name) is None and name not in files for name in listed):
            raise self._exists()
        for name, blocks in files.items():
            self._put(name, blocks, listed)
        # Commit point: readers ignore a prefix without manifest.json.
        if not self._client.create(MANIFEST_NAME, encode_manifest(manifest)):
            problem, hint = "another process has finished here", "run reshard commit again"
            raise OutputError(self.where, problem, hint, code="output.contended")
        self._clear_away(manifest)
        return manifest

    def _exists(self) -> OutputError:
        hint = f"remove it, or pack to another {Parameter('out')}"
        return OutputError(self.where, "already exists", hint, code="output.exists")

    def _put(self, name: str, blocks: Blocks, listed: Mapping[str, ObjectEntry]) -> None:
        """Write a file of any length; one that a killed commit has written is the same, any other is refused."""
        where = f"{self.where}/{name}"
        if name in listed:
            for _ in blocks:  # hashed
                pass
            present = Blocks(ObjectFile(url=where, entry=listed[name], client=self._client))
            for _ in present:
                pass
            if present.digest != blocks.digest:
                hint = f"move it elsewhere, or choose another {Parameter('out')}"
                raise OutputError(where, "was not written by this command", hint, code="output.foreign-file")
        elif blocks.nbytes <= SMALL_NBYTES:
            self._client.put(name, b"".join(map(bytes, blocks)))
        else:
            self._client.writer(name, blocks.nbytes).write_all(blocks)

    def _clear_away(self, manifest: Manifest) -> None:
        """Remove what only the parts of a manifest needed."""
        named, folders = set(files_in(manifest)), _folders_of(manifest)
        removed = [
            name for name in list_objects(self._client) if name not in named and name.partition("/")[0] in folders
        ]
        try:
            remove_objects(self._client, removed)
        except InputError as error:  # not allowed to, perhaps
            logger.warning("%s is complete, but more than that stays there: %s", self.where, error.problem)

    def _manifest_in(self, listed: Collection[str]) -> Manifest | None:
        if MANIFEST_NAME not in listed:
            return None
        return decode_manifest(self._client.load(MANIFEST_NAME), f"{self.where}/{MANIFEST_NAME}")


def _folders_of(manifest: Manifest) -> set[str]:
    return {match["folder"] for shard in manifest.shards if (match := OF_PART.fullmatch(shard.path))}
