"""A folder that is taken for a version by its number alone, as slime records no states, compared with the chain."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from manifests.errors import SourceError
from manifests.versions import BLAKE3
from reshard.formats.delta.chain import Chain, Version, read_patches
from reshard.formats.delta.codec import new_checksum
from reshard.formats.delta.read import open_full, with_all_digests
from reshard.formatting import some
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.lazy import read_blocks
from stores.bundles import TensorAt
from stores.workers import for_each, usable_cores


def check_copy(copy: Checkpoint, chain: Chain, number: int, later: Sequence[Version] = ()) -> None:
    """Compare what is taken for a version, if that records no state, as far as the chain has its tensors.

    These are checksums of deltas, and a full version's bytes; what `later` deltas change is compared with theirs.
    """
    line = [chain.version(number)]
    if line[0].state is not None:
        return
    with suppress(SourceError):  # versions before are missing
        line = chain.line(number)
    fqn_of, last = copy.shape.fqn_of, dict[str, Version]()
    for version in (*line, *later):
        last |= {fqn_of(name): version for name in version.weight_map}
    expected = dict[str, tuple[str, str | None]]()
    for version in line:
        names = {fqn for fqn, changed_last in last.items() if changed_last is version}
        if names and version.is_full:
            full = open_full(chain, version)
            tensors = {name: tensor for name, tensor in full.tensors.items() if name in names}
            hashed = with_all_digests(replace(full, tensors=tensors)).tensors
            expected |= {name: (BLAKE3, tensor.digest) for name, tensor in hashed.items()}
        elif names:
            patches = {fqn_of(name): patch for name, patch in read_patches(chain.folder, version).items()}
            expected |= {name: (version.checksum_format, patches[name].checksum) for name in names}
    other = list[str]()

    def compare(name: str, _: threading.Event) -> None:
        checksum_format, checksum = expected[name]
        if name not in copy.tensors or _checksum(copy.tensors[name], checksum_format) != checksum:
            other.append(name)

    for_each(expected, compare, usable_cores())
    if other:
        problem = f"is not version {number} of {chain}: other bytes in {some(sorted(other))}"
        hint = "name a copy of that version, or apply to an empty folder or a copy of the base"
        raise SourceError(copy.location, problem, hint, code="source.other-base")


def _checksum(tensor: TensorAt, checksum_format: str) -> str:
    if checksum_format == BLAKE3 and tensor.digest is not None:
        return tensor.digest
    hasher = new_checksum(checksum_format)
    for block in read_blocks(replace(tensor, blake3=None)):
        hasher.update(block)
    return hasher.hexdigest()
