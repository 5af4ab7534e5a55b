"""Where the data goes on, and whether every rank that reads it finds the same. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manifests.digest import digest_bytes
from manifests.errors import InputError
from manifests.schema import DataPosition
from runner.data.files import find_files
from runner.options import TrainOptions
from runner.recipe import SYNTHETIC, DataOptions

__all__ = ["FoundData", "check_alike", "find_data"]

_Files = Sequence[tuple[str, int]]  # by name and size


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundData:
    """The data as one rank finds it."""

    position: DataPosition  # where it goes on
    sources: tuple[str, ...]  # a digest of the files of each
    note: str | None = None  # what came of --restart-data


def find_data(options: TrainOptions, left: DataPosition | None, tokenizer: str | None) -> FoundData:
    """Find the files, and where they go on; `left` is where a checkpoint left its own, None for the first sequence.

    With `--restart-data`, other data than the checkpoint's begins at its first sequence.

    Raises:
        InputError: a source that names nothing; sequences are not numbered as they were; or the checkpoint's
            cursor is of other sources.
    """
    listed = _list(options.data)
    digest, note = _digest(options.data, listed, options.batch.seq_len, tokenizer), None
    sources = tuple(digest_bytes(json.dumps(files).encode()) for files in listed)
    if left is not None and options.resume.restart_data:
        left, note = _restart(left, digest)
    if left is not None and left.digest != digest:
        raise InputError(
            "--data",
            f"is cut into other sequences than those of which the checkpoint has used {left.num_sequences}: files, "
            "their sizes, --seq-len, --text-field, --pack, --shuffle, --data-weight, --seed or the tokenizer changed",
            "say what that run was told, or --restart-data to begin this data at its first sequence",
        )
    if left is not None and left.cursor is not None and len(left.cursor.sources) != len(options.data.groups):
        raise InputError(
            "training.data.cursor.sources",
            f"expected a position for each of {len(options.data.groups)}, found {len(left.cursor.sources)}",
        )
    return FoundData(position=left or DataPosition(num_sequences=0, digest=digest), sources=sources, note=note)


def check_alike(data: DataOptions, found: FoundData, on_rank_0: FoundData) -> None:
    """Make sure that this rank finds the data that rank 0 does: one trains on its tokens, another on its labels.

    Raises:
        InputError: naming the first source whose files differ.
    """
    if found.position == on_rank_0.position:
        return
    for source, own, other in zip(data.sources, found.sources, on_rank_0.sources, strict=False):
        if own != other:
            raise InputError(
                f"--data {source}",
                "has other files than rank 0 finds there, by their names and sizes",
                "every node must see the same ones: a copy on its own disk may be an older one",
            )
    raise InputError("--data", "is cut into other sequences than on rank 0: its flags or the tokenizer differ")


def _restart(left: DataPosition, digest: str) -> tuple[DataPosition | None, str]:
    """Give where the data goes on, and the sentence for it. A job that is started again must not begin once more."""
    if left.digest != digest:
        return None, (
            f"--restart-data begins this data at its first sequence: it is not that of which the checkpoint has used "
            f"{left.num_sequences}"
        )
    return left, (
        f"--restart-data changes nothing: the checkpoint has used {left.num_sequences} sequences of this very data; "
        "another --seed as well begins it anew"
    )


def _list(data: DataOptions) -> tuple[_Files, ...]:
    """Give the files of each source."""
    if data.sources == (SYNTHETIC,):
        return ()
    return tuple([(file.name, file.stat().st_size) for file in find_files((source,))] for source in data.sources)


def _digest(data: DataOptions, listed: Sequence[_Files], seq_len: int, tokenizer: str | None) -> str:
    """Give a digest of what decides which sequence has which number: the files, and how they are cut."""
    how: dict[str, Any] = {"text_field": data.text_field, "pack": data.pack, "seed": data.seed}
    if data.shuffle:
        how["shuffle"] = True
    if data.weights:
        how["weights"] = data.weights
    # Without weights, the files are one list: digests of checkpoints that are older than weights still hold.
    files = listed if data.weights else [file for each in listed for file in each]
    return digest_bytes(json.dumps([how, seq_len, tokenizer, files], sort_keys=True).encode())
