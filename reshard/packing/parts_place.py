"""Where the parts of a pack are, and what they have written: for folders and for buckets. See Note [Parts].

Those of a folder are in `.NAME.parts` beside it, until a commit moves their files into the output; those of a bucket
are below the prefix, where their shards stay: the manifest names them.

# Note [A commit that was killed]
A commit moves files into the partial folder of the output, which then gets the output's name. What is moved is found in
either place by the next commit. A folder that is replaced briefly has the name of the partial one, so the new folder is
recorded before, by its inode, which renaming does not change: a commit that finds it in place only clears away.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manifests.codec import decode_manifest, encode_manifest
from manifests.digest import digest_bytes
from manifests.errors import InputError, OutputError, Parameter, SourceError, UsageError, system_errors
from manifests.index import INDEX_NAME, encode_index, has_index
from manifests.invariants import MANIFEST_NAME, check_manifest
from manifests.jsontext import parse_json_object
from manifests.paths import problem_with_path
from manifests.schema import Manifest, Shard
from manifests.store import open_shard, read_small_file, write_file, write_manifest
from reshard.copy.destination import FolderTarget, keep_only
from reshard.tensors.lazy import MemoryFile
from stores.base import Blocks, check_whole
from stores.folders.owned import RECORD_NAME, files_in, files_of_manifest, remove_leftover
from stores.folders.publish import check_not_a_step, check_target, exchange, partial_of, publishing, reserving
from stores.local import LocalFile
from stores.objects.client import ObjectEntry, open_writable, remove_objects
from stores.objects.output import SMALL_NBYTES
from stores.objects.store import ObjectFile, list_objects, open_objects
from stores.open import open_manifest

OF_PART = re.compile(r"(?P<folder>parts-[0-9a-f]{12})/part-(?P<number>[0-9]{5})-of-(?P<of>[0-9]{5})/.+", re.ASCII)

FileFacts = tuple[int, str]  # size in bytes; ETag of an object, "" of a file


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """What all parts have written: the manifest with final digests, and the part's folder by the path of each file."""

    folder: str
    manifest: Manifest
    folder_of: Mapping[str, str]
    indexed: Mapping[str, Sequence[str]]  # the tensors of each shard that the index lists
    data_nbytes: int  # of these

    def index(self, path_of: Mapping[str, str] | None = None) -> MemoryFile:
        """Return the index; `path_of` has the final paths of shards that are not those of the plan."""
        weights = {(path_of or {}).get(path, path): names for path, names in self.indexed.items()}
        return MemoryFile(INDEX_NAME, encode_index(weights, self.data_nbytes))


logger = logging.getLogger(__name__)


class BucketParts:
    """The parts of an output in a bucket, below its prefix. FolderParts has the same methods."""

    def __init__(self, out: str, *, force: bool) -> None:
        if force:
            problem, hint = "is not supported for parts in a bucket", "remove the old output first"
            raise UsageError(Parameter("force"), problem, hint, code="options.conflict")
        self._client = open_writable(out).settled()
        self.where = self._client.url

    def check_free(self, folder: str, small: Collection[str]) -> bool:
        """Return whether an output can be written; False if the parts in `folder` have been committed already."""
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
        """Return the files of all parts, by paths that start with the folder of their plan."""
        listed = list_objects(self._client)
        return {name: (entry.nbytes, entry.etag or "") for name, entry in listed.items() if OF_PART.fullmatch(name)}

    def load(self, name: str) -> bytes:
        return self._client.load(name)

    def remove(self, where: str) -> None:
        remove_objects(self._client, [name for name in list_objects(self._client) if name.startswith(f"{where}/")])

    def committed(self, folders: Collection[str]) -> Manifest | None:
        """Return the manifest if it is published, once what only its commit needed is removed."""
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
            present = ObjectFile(url=where, entry=listed[name], client=self._client)
            if check_whole(present) != check_whole(blocks.file, blocks.expected):
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


_COMMIT_NAME = "commit.json"  # identifies the folder that is about to get the output's name
_OURS = re.compile(r"parts-[0-9a-f]{12}/\.?part-[0-9]{5}-of-[0-9]{5}(\.lock|(\.partial)?/.+)|moved\.json")
_UNFINISHED = re.compile(r"parts-[0-9a-f]{12}/\.part-[0-9]{5}-of-[0-9]{5}(\.lock|\.partial/.+)")
_MOVED_NAME = "moved.json"  # what a commit may have moved: the parts' files, with their sizes


class FolderParts:
    """The parts of an output in a folder, beside it: see BucketParts."""

    def __init__(self, out: Path, *, force: bool) -> None:
        self.where, self._out, self._force = str(out), out, force
        self._partial = partial_of(out)
        self._base = self._partial.with_suffix(".parts")

    def check_free(self, folder: str, small: Collection[str]) -> bool:
        check_target(self._out, self._force, files_of_manifest, exchange)
        return True

    def address(self, name: str) -> Path:
        return self._base / name

    def files(self) -> Mapping[str, FileFacts]:
        with system_errors(self._base, code="output.unreadable"):
            files = dict(self._files_below_base())
        for name, nbytes in self._moved().items():
            path = self._partial / "/".join(name.split("/")[2:])
            if name not in files and path.is_file() and path.stat().st_size == nbytes:
                files[name] = (nbytes, "")
        return files

    def load(self, name: str) -> bytes:
        return read_small_file(self._base / name)

    def remove(self, where: str) -> None:
        shutil.rmtree(self._base / where)

    def committed(self, folders: Collection[str]) -> Manifest | None:
        record = self._base / _COMMIT_NAME
        with suppress(OSError):  # a commit was killed right before it removed the empty folder
            self._base.rmdir()
        if record.is_file() and _read_record(record) == _identify(self._out):
            self._remove_replaced()
            self._clear_away()
        elif folders or not (self._out / MANIFEST_NAME).is_file() or any(map(_UNFINISHED.fullmatch, self._names())):
            return None  # or it is the checkpoint that parts at work replace
        elif self._force:
            text = "note: %s is complete, and no part of another checkpoint has begun: nothing was replaced"
            logger.warning(text, self._out)
        return open_manifest(self._out).manifest

    def _remove_replaced(self) -> None:
        """Remove what a commit has replaced, but no files of others: see Note [Files of others in an output]."""
        try:
            remove_leftover(self._partial, files_of_manifest)
        except FileNotFoundError:
            pass
        except (InputError, OSError) as error:
            logger.warning("%s was replaced, and stays: %s", self._partial, error)

    def publish(self, merged: Merged) -> Manifest:
        hint = f"run reshard commit {shlex.quote(str(self._out))} again"
        with system_errors(self._out, "cannot be written", hint, code="output.unwritable", names_file=True):
            self._publish(merged)
        return merged.manifest

    def _publish(self, merged: Merged) -> None:
        names = set(files_in(merged.manifest))
        if self._force:
            check_not_a_step(self._out)
        with (
            reserving(self._out) as check_reserved,
            publishing(
                self._out,
                force=self._force,
                find_owned=files_of_manifest,
                wanted=names,
                is_resumable=lambda _: True,
                outlives_errors=True,
            ) as folder,
        ):
            keep_only(folder, {*names, RECORD_NAME})
            self._move(merged, folder)
            self._check(merged, folder)
            if has_index(merged.manifest):
                FolderTarget(folder).copy(INDEX_NAME, merged.index())
            write_manifest(folder, merged.manifest)
            write_file(self._base / _COMMIT_NAME, json.dumps(_identify(folder)).encode())
            check_reserved()
        self._clear_away()

    def _move(self, merged: Merged, folder: Path) -> None:
        sources = {path: self._base / place / path for path, place in merged.folder_of.items()}
        moved = {
            f"{merged.folder_of[path]}/{path}": source.stat().st_size
            for path, source in sources.items()
            if source.is_file()
        }
        write_file(self._base / _MOVED_NAME, json.dumps({**self._moved(), **moved}).encode())
        for path, source in sources.items():
            if source.is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                os.rename(source, folder / path)

    def _check(self, merged: Merged, folder: Path) -> None:
        """Compare headers and auxiliary files with what the parts have written."""
        try:
            for shard in merged.manifest.shards:
                open_shard(folder, shard)
            for file in merged.manifest.files:
                check_whole(LocalFile(folder / file.path), file.digest)
        except InputError as error:
            hint = f"remove {self._base} and {self._partial}, and run the parts again"
            raise OutputError(error.where, error.problem, hint, code="output.damaged-parts") from error

    def _moved(self) -> dict[str, int]:
        path = self._base / _MOVED_NAME
        if not path.is_file():
            return {}
        moved = _read_record(path)
        for name, nbytes in moved.items():
            if OF_PART.fullmatch(name) is None or problem_with_path(name) or type(nbytes) is not int:
                raise _no_record(path)
        return moved

    def _files_below_base(self) -> Iterator[tuple[str, FileFacts]]:
        for name in self._names():
            if OF_PART.fullmatch(name):
                yield name, ((self._base / name).lstat().st_size, "")

    def _names(self) -> Iterator[str]:
        for parent, _, names in os.walk(self._base):
            yield from (Path(parent, name).relative_to(self._base).as_posix() for name in names)

    def _clear_away(self) -> None:
        """Remove the parts, and no files of others; the record of the commit last: one that is run again needs it."""
        for parent, _, names in os.walk(self._base, topdown=False):
            for path in (Path(parent, name) for name in names):
                if _OURS.fullmatch(path.relative_to(self._base).as_posix()):
                    path.unlink(missing_ok=True)
            with suppress(OSError):  # files of others, or the record
                os.rmdir(parent)
        (self._base / _COMMIT_NAME).unlink(missing_ok=True)
        with suppress(OSError):
            self._base.rmdir()


PartsPlace = BucketParts | FolderParts


def _identify(folder: Path) -> dict[str, Any]:
    """Identify a folder with a manifest regardless of its path."""
    if not (folder / MANIFEST_NAME).is_file():
        return {}
    return {"inode": folder.stat().st_ino, "manifest": digest_bytes(read_small_file(folder / MANIFEST_NAME))}


def _read_record(path: Path) -> dict[str, Any]:
    """Read what a commit has written before it moved or removed files."""
    try:
        return parse_json_object(read_small_file(path), str(path))
    except SourceError as error:
        raise _no_record(path) from error


def _no_record(path: Path) -> OutputError:
    hint = "remove it, and run the parts again"
    return OutputError(str(path), "is not a record of a commit", hint, code="output.damaged-parts")
