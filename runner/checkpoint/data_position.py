"""Where the data goes on, and whether every rank that reads it finds the same. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.digest import digest_bytes
from manifests.errors import CheckpointError, DataError, InputError
from manifests.schema import DataPosition
from runner.config.flags import TrainOptions
from runner.config.schema import SYNTHETIC, DataOptions
from runner.data.files import find_files
from runner.data.framing import Framing, document_framing, load_tokenizer

__all__ = ["FoundData", "check_alike", "find_data"]

_Files = Sequence[tuple[str, int]]  # by name and size


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundData:
    """The data as one rank finds it."""

    position: DataPosition  # where it goes on
    sources: tuple[str, ...]  # a digest of the files of each
    notes: tuple[str, ...] = ()  # what came of --restart-data, and how documents are framed


def find_data(
    options: TrainOptions, left: DataPosition | None, tokenizer: str | None, folder: Path | None = None
) -> FoundData:
    """Find the files, and where they go on; `left` is where a checkpoint left its own, None for the first sequence.

    The tokenizer that frames documents is the one in `folder`, if they have one.

    With `--restart-data`, other data than the checkpoint's begins at its first sequence.

    Raises:
        InputError: a source that names nothing; no tokenizer, or a broken one; sequences are not numbered as they
            were; or the checkpoint's cursor is of other sources.
    """
    listed, framing = _list(options.data), _framing(options.data, folder)
    digest = _digest(options, listed, tokenizer, framing)
    notes = [] if framing is None or framing.note is None else [framing.note]
    sources = tuple(digest_bytes(json.dumps(files).encode()) for files in listed)
    if left is not None and options.resume.restart_data:
        left, note = _restart(left, digest)
        notes.append(note)
    if left is not None and left.digest != digest:
        if framing is not None and left.digest == _digest(options, listed, tokenizer, None):
            raise _framed_otherwise(framing)
        raise CheckpointError(
            "--data",
            f"is cut into other sequences than those of which the checkpoint has used {left.num_sequences}: files, "
            "their sizes, --seq-len, --text-field, --pack, --shuffle, --data-weight, --seed, --add-bos-token, "
            "--add-eos-token or the tokenizer changed",
            "say what that run was told, or --restart-data to begin this data at its first sequence",
            code="resume.other-data",
        )
    if left is not None and left.cursor is not None and len(left.cursor.sources) != len(options.data.groups):
        raise CheckpointError(
            "training.data.cursor.sources",
            f"expected a position for each of {len(options.data.groups)}, found {len(left.cursor.sources)}",
            code="resume.other-data",
        )
    position = left or DataPosition(num_sequences=0, digest=digest)
    return FoundData(position=position, sources=sources, notes=tuple(notes))


def check_alike(data: DataOptions, found: FoundData, on_rank_0: FoundData) -> None:
    """Make sure that this rank finds the data that rank 0 does: one trains on its tokens, another on its labels.

    Raises:
        InputError: naming the first source whose files differ.
    """
    if found.position == on_rank_0.position:
        return
    for source, own, other in zip(data.sources, found.sources, on_rank_0.sources, strict=False):
        if own != other:
            raise DataError(
                f"--data {source}",
                "has other files than rank 0 finds there, by their names and sizes",
                "every node must see the same ones: a copy on its own disk may be an older one",
                code="data.differs-between-ranks",
            )
    problem = "is cut into other sequences than on rank 0: its flags or the tokenizer differ"
    raise DataError("--data", problem, code="data.differs-between-ranks")


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


def _framing(data: DataOptions, folder: Path | None) -> Framing | None:
    """Return what stands around each document; None: there are none."""
    if folder is None or data.sources == (SYNTHETIC,):
        return None
    return document_framing(folder, load_tokenizer(folder, "train on --data synthetic"), data.framing)


def _framed_otherwise(framing: Framing) -> InputError:
    """Refuse what an older runner framed by config.json; see `runner.data.framing`."""
    former, before = framing.former, framing.frame.before
    flag = "--add-bos-token" if former is not None and former.before and not before else "--no-add-bos-token"
    return CheckpointError(
        "--data",
        "the checkpoint's run framed documents by bos_token_id of config.json, and now the tokenizer's own rule does: "
        "they would be cut into other sequences",
        f"{flag} goes on as that run began; or --restart-data to begin this data at its first sequence",
        code="resume.other-framing",
    )


def _digest(options: TrainOptions, listed: Sequence[_Files], tokenizer: str | None, framing: Framing | None) -> str:
    """Return a digest of what decides which sequence has which number: the files, and how they are cut."""
    data = options.data
    how: dict[str, Any] = {"text_field": data.text_field, "pack": data.pack, "seed": data.seed}
    if data.shuffle:
        how["shuffle"] = True
    if data.weights:
        how["weights"] = data.weights
    if framing is not None and not framing.is_as_before:  # otherwise digests of older checkpoints still hold
        how["frame"] = [framing.frame.before, framing.frame.after]
    # Without weights, the files are one list: digests of checkpoints that are older than weights still hold.
    files = listed if data.weights else [file for each in listed for file in each]
    return digest_bytes(json.dumps([how, options.batch.seq_len, tokenizer, files], sort_keys=True).encode())
