"""Where a run resumes in its data, documents skipped before, and whether all ranks find the same data. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manifests.digest import digest_bytes
from manifests.errors import CheckpointError, DataError
from manifests.jsontext import parse_json_object
from manifests.schema import DataPosition
from manifests.store import file_digest, read_small_file
from manifests.trained import SKIPPED_NAME, STATE_NAME
from runner.bundle.packed import Packed
from runner.config.flags import TrainOptions
from runner.config.schema import SYNTHETIC, DataOptions
from runner.data.files import find_files
from runner.data.tokenizer import Framing, document_framing, load_tokenizer

_Files = Sequence[tuple[str, int]]  # by name and size
# The number of skipped documents is in a small file of a checkpoint, absent for 0, and so is the state of a dataset of
# a package's own. They are auxiliary files, such as config.json: a checkpoint that is resharded keeps them, and readers
# that do not know them can read the rest.
_FIELD, _STATE = "num_skipped", "state"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundData:
    """The data as one rank finds it."""

    position: DataPosition  # where the run resumes
    sources: tuple[str, ...]  # a digest of the files of each
    notes: tuple[str, ...]  # the effect of --restart-data, and how documents are framed


def find_data(
    options: TrainOptions, stored: DataPosition | None, tokenizer: str | None, folder: Path | None = None
) -> FoundData:
    """Find the files and the position to resume at; `stored` is a checkpoint's, None without one.

    The tokenizer that frames documents is the one in `folder`, if there is one.
    With `--restart-data`, data that differs from the checkpoint's starts at its first sequence.
    """
    listed, framing = _list(options.data), _framing(options.data, folder)
    digest = _digest(options, listed, tokenizer, framing)
    notes = [] if framing is None or framing.note is None else [framing.note]
    if stored is not None and options.resume.restart_data:
        stored, note = _restart(stored, digest)
        notes.append(note)
    if stored is not None and stored.digest != digest:
        raise CheckpointError(
            "--data",
            f"does not match the data that the checkpoint consumed ({stored.num_sequences} sequences): the files, "
            "their sizes, the tokenizer, --seq-len, --data-class, --text-field, --completion-field, --tokenized, "
            "--packing, --document-mask, --shuffle, --data-weight, --seed, --add-bos-token, --add-eos-token, "
            "--loss, --label-smoothing, --z-loss or --token-weights differ",
            "repeat the data flags of that run, or start this data from its first sequence with --restart-data",
            code="resume.other-data",
        )
    if stored is not None and stored.cursor is not None and len(stored.cursor.sources) != len(options.data.groups):
        raise CheckpointError(
            "training.data.cursor.sources",
            f"expected a position for each of {len(options.data.groups)}, found {len(stored.cursor.sources)}",
            code="resume.other-data",
        )
    position = stored or DataPosition(num_sequences=0, digest=digest)
    return FoundData(position=position, sources=_each_digest(listed), notes=tuple(notes))


def check_alike(data: DataOptions, data_here: FoundData, on_rank_0: FoundData) -> None:
    """Check that this rank finds the same data as rank 0: one reads the tokens, another the labels."""
    if data_here.position == on_rank_0.position:
        return
    check_same_files("--data", data, data_here.sources, on_rank_0.sources)
    problem = "does not match the data of rank 0: the data flags or the tokenizer differ"
    raise DataError("--data", problem, code="data.differs-between-ranks")


def digests_of(data: DataOptions) -> tuple[str, ...]:
    """Return a digest of the names and sizes of the files of each source."""
    return _each_digest(_list(data))


def check_same_files(flag: str, data: DataOptions, digests: Sequence[str], on_rank_0: Sequence[str]) -> None:
    """Check that each source has the digest that it has on rank 0; `flag` names the data."""
    for source, digest, other in zip(data.sources, digests, on_rank_0, strict=False):
        if digest != other:
            raise DataError(
                f"{flag} {source}",
                "has files with other names or sizes than on rank 0",
                "every node must see the same files: a copy on the node's own disk may be outdated",
                code="data.differs-between-ranks",
            )


def encode_files(num_skipped: int, state: str | None) -> dict[str, bytes]:
    """Return the small files of a checkpoint about its data, by name; `state` is that of a dataset, as JSON."""
    texts = {}
    if num_skipped:
        texts[SKIPPED_NAME] = json.dumps({"version": 1, _FIELD: num_skipped})
    if state is not None:
        texts[STATE_NAME] = json.dumps({"version": 1, _STATE: state})
    return {name: f"{text}\n".encode() for name, text in texts.items()}


def read_skipped(packed: Packed) -> int:
    """Return the number of documents that a checkpoint's run had skipped."""
    count = _read_value(packed, SKIPPED_NAME, _FIELD)
    if count is None:
        return 0
    if type(count) is not int or count < 0:
        where = f"{packed.root / SKIPPED_NAME}: {_FIELD}"
        raise CheckpointError(where, f"expected a count, found {str(count)[:80]}", code="resume.bad-count")
    return count


def read_state(packed: Packed) -> str:
    """Return the state, as JSON, in which a checkpoint's run left a dataset."""
    state = _read_value(packed, STATE_NAME, _STATE)
    if state is None:
        where = str(packed.root / STATE_NAME)
        hint = "resume from another checkpoint, or start over with --restart-data and another --seed"
        raise CheckpointError(where, "expected the state of the dataset, found none", hint, code="resume.other-data")
    return str(state)


def _read_value(packed: Packed, name: str, field: str) -> object:
    if (digest := file_digest(packed.manifest, name)) is None:
        return None
    path = packed.root / name
    return parse_json_object(read_small_file(path, digest), str(path)).get(field, "nothing")


def _each_digest(listed: Sequence[_Files]) -> tuple[str, ...]:
    return tuple(digest_bytes(json.dumps(files).encode()) for files in listed)


def _restart(stored: DataPosition, digest: str) -> tuple[DataPosition | None, str]:
    """Return the position to resume at, and a note: a job that is restarted does not start its own data again."""
    if stored.digest != digest:
        return None, (
            f"--restart-data: starting this data from its first sequence; the checkpoint consumed "
            f"{stored.num_sequences} sequences of other data"
        )
    return stored, (
        f"--restart-data has no effect: the checkpoint consumed {stored.num_sequences} sequences of this same data; "
        "start it from scratch with another --seed"
    )


def _list(data: DataOptions) -> tuple[_Files, ...]:
    """Return the files of each source."""
    return tuple([(file.name, file.stat().st_size) for file in find_files((source,))] for source in data.files)


def _framing(data: DataOptions, folder: Path | None) -> Framing | None:
    """Return the tokens put around each document; None: the data has no documents."""
    if folder is None or data.has_rows or data.sources == (SYNTHETIC,):
        return None
    return document_framing(folder, load_tokenizer(folder), data.framing)


def _digest(options: TrainOptions, listed: Sequence[_Files], tokenizer: str | None, framing: Framing | None) -> str:
    """Return a digest of what determines the order of sequences, and of the loss over them."""
    data = options.data
    how: dict[str, Any] = {"text_field": data.text_field, "pack": data.pack, "seed": data.seed}
    more = {  # in the digest only where it is used
        "completion_field": data.completion_field,
        "tokenized": data.is_tokenized,
        "dataset": None if data.dataset is None else [data.dataset, *data.sources],
        "document_mask": data.document_mask,
        "shuffle": data.shuffle,
        "weights": data.weights,
        "frame": None if framing is None else [framing.frame.before, framing.frame.after],
        "loss": {name: value for name, value in asdict(options.loss).items() if value and name != "mtp_weight"},
    }
    how |= {name: value for name, value in more.items() if value not in (None, False, (), {})}
    # Without weights, the files of all sources are one list.
    files = listed if data.weights else [file for source in listed for file in source]
    return digest_bytes(json.dumps([how, options.batch.seq_len, tokenizer, files], sort_keys=True).encode())
