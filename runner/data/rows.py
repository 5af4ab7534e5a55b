"""What a record of data has: text, a prompt and its completion, a row of token ids, or nothing valid. No torch.

Invalid documents are errors, or skipped and counted.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from manifests.errors import DataError
from manifests.jsontext import kind_of
from runner.config.declared import MOST
from runner.config.schema import DataOptions

T = TypeVar("T")
logger = logging.getLogger("runner")
TokenIds: TypeAlias = "array[int]"
MOST_NBYTES = 64 << 20  # of a document in JSON or a row: in memory it takes up to 4 times as much, twice for a moment
IGNORED = -100  # the label of positions that are ignored in the loss
_IDS, _LABELS, _MASK, _POSITIONS, _DOCUMENTS, _ATTENTION = ROW_FIELDS = (
    "input_ids", "labels", "loss_mask", "position_ids", "document_ids", "attention_mask",
)  # fmt: skip
# Fields of other programs, and those of ours that say the same: a row with the first alone would train on more.
_FIELDS_OF_OTHERS = {
    **dict.fromkeys(("completion_mask", "assistant_mask", "assistant_masks"), (_LABELS, _MASK)),
    "seq_lengths": (_POSITIONS, _DOCUMENTS),
}
_LARGEST = 3.4e38  # float32, which fields are
_HEAD = 3  # numbers before the JSON text of an encoded row


class BadDocumentError(DataError):
    """A document that is not text. Its file can be read, and later documents may be valid."""


def too_long(where: str, nbytes: int) -> BadDocumentError:
    problem = f"has {nbytes} bytes, expected at most {MOST_NBYTES} in one document of this format"
    hint = "split the document, or write it as a .txt file of its own, which may have any length"
    return BadDocumentError(where, problem, hint, code="data.too-long")


@dataclass(kw_only=True, slots=True)
class Skipped:
    """The number of documents that a reader has skipped, and a callback for each."""

    count: int = 0
    on_skip: Callable[[BadDocumentError], None] | None = None

    def good(self, pieces: Iterator[T]) -> Iterator[T]:
        """Yield a document's pieces up to the first that is not text; the rest is skipped, and counted once."""
        try:
            yield from pieces
        except BadDocumentError as error:
            self.count += 1
            if self.on_skip is not None:
                self.on_skip(error)


def log_skipped(error: BadDocumentError) -> None:
    """Log a document that is skipped, and why."""
    logger.warning("note: skipped %s: %s", error.where, error.problem)


class Prompt(str):
    """A piece of a prompt: its tokens are not labels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowForm:
    """What a row of token ids may have, and the fields that the loss reads besides."""

    seq_len: int = MOST
    vocab_size: int = MOST
    is_masked: bool = False  # whether its documents are kept apart
    per_token: tuple[str, ...] = ()
    per_row: tuple[str, ...] = ()
    has_all_fields: bool = True  # that the loss reads: the launcher does not load the code of --loss

    @property
    def names(self) -> tuple[str, ...]:
        return (*ROW_FIELDS, *_FIELDS_OF_OTHERS, *self.per_token, *self.per_row)


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a record that are read: those of text, or with `row` those of a row of token ids."""

    text: str = "text"
    completion: str | None = None
    row: RowForm | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,) if self.completion is None else (self.text, self.completion)


def fields_of(data: DataOptions, row: RowForm | None = None) -> Fields:
    """Return the fields that data options read; `row` is the form of rows, where the data has any."""
    return Fields(
        data.text_field,
        data.completion_field,
        replace(row or RowForm(), is_masked=data.document_mask) if data.is_tokenized else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of token ids: as many labels, positions and values of fields per token.

    Labels and fields are shifted: those at a place are of the next token.
    """

    ids: Sequence[int]
    labels: Sequence[int]
    positions: Sequence[int] | None
    fields: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        """How many labels count in the loss."""
        return len(self.labels) - sum(label == IGNORED for label in self.labels)

    def encode(self) -> TokenIds:
        """Return it as numbers, which travel as ids do; the first are what is asked of rows that are not decoded."""
        text = json.dumps([self.ids, self.labels, self.positions, self.fields]).encode()
        numbers = array("i", [self.num_tokens, 1 if self.positions is None else self.positions.count(0), len(self.ids)])
        numbers.frombytes(text + b" " * (-len(text) % numbers.itemsize))
        return numbers


def decode_row(numbers: TokenIds) -> Row:
    ids, labels, positions, fields = json.loads(numbers[_HEAD:].tobytes())
    return Row(ids=ids, labels=labels, positions=positions, fields=fields)


def parse_row(record: Mapping[str, Any], form: RowForm, where: Callable[[], str]) -> Row:
    """Read a row of token ids."""
    try:
        return _parse(record, form)
    except ValueError as error:
        hint = "docs/training.md describes rows of token ids"
        raise BadDocumentError(where(), str(error), hint, code="data.bad-row") from error


def _parse(record: Mapping[str, Any], form: RowForm) -> Row:
    present = {name for name, value in record.items() if value is not None}.difference(form.per_token, form.per_row)
    for name in _FIELDS_OF_OTHERS.keys() & present if form.has_all_fields else ():
        if present.isdisjoint(ours := _FIELDS_OF_OTHERS[name]):
            raise ValueError(f"has a field {name!r}, which is not read; write {' or '.join(ours)}, or leave it out")
    ids = _whole_numbers(record, _IDS, None)
    if not 0 < len(ids) <= form.seq_len:
        raise ValueError(f"expected 1 to {form.seq_len} input_ids (--seq-len), found {len(ids)}")
    labels, mask = (_whole_numbers(record, name, len(ids), ids) for name in (_LABELS, _MASK))
    if record.get(_MASK) is not None:
        if record.get(_LABELS) is not None or not {0, 1}.issuperset(mask):
            raise ValueError("expected labels, or a loss_mask of 0 and 1, and not both")
        labels = [token if counts else IGNORED for token, counts in zip(ids, mask, strict=True)]
    _check_attention(record, labels)
    for name, numbers in ((_IDS, ids), (_LABELS, [label for label in labels if label != IGNORED])):
        if numbers and not 0 <= min(numbers) <= max(numbers) < form.vocab_size:
            raise ValueError(f"expected {name} from 0 to below {form.vocab_size}, the model's vocabulary, "
                             f"found {min(numbers)} to {max(numbers)}")  # fmt: skip
    positions = _positions(record, len(ids))
    if form.is_masked:
        labels = [label if place else IGNORED for label, place in zip(labels, positions, strict=True)]
    elif positions != list(range(len(ids))):
        raise ValueError("has several documents, or other positions; add --document-mask")
    fields: dict[str, Any] = {name: [*_floats(record, name, len(ids))[1:], 0.0] for name in form.per_token}
    fields |= {name: _floats({name: [record.get(name)]}, name, 1)[0] for name in form.per_row}
    return Row(
        ids=ids, labels=[*labels[1:], IGNORED], positions=positions if form.is_masked else None, fields=fields
    )  # fmt: skip


def _check_attention(record: Mapping[str, Any], labels: Sequence[int]) -> None:
    """Check that an attention_mask would change nothing: what it leaves out is padding at the end, and not learned."""
    if record.get(_ATTENTION) is None:
        return
    attends = _whole_numbers(record, _ATTENTION, len(labels))
    num_attended = sum(map(bool, attends))
    if attends != [1] * num_attended + [0] * (len(labels) - num_attended):
        raise ValueError("expected an attention_mask of 1, and 0 for padding at the end; documents have document_ids")
    if any(label != IGNORED for label in labels[num_attended:]):
        raise ValueError("expected labels of -100, or a loss_mask of 0, for padding, where attention_mask is 0")


def _positions(record: Mapping[str, Any], length: int) -> list[int]:
    """Return the places of tokens in their documents, which begin where a place is 0."""
    documents = _whole_numbers(record, _DOCUMENTS, length, [0] * length)
    places: list[int] = []
    for number, document in enumerate(documents):
        places.append(places[-1] + 1 if number and document == documents[number - 1] else 0)
    positions = _whole_numbers(record, _POSITIONS, length, places)
    begins = [[place == 0 for place in those] for those in (places, positions)]
    is_counted = all(place in (0, before + 1) for before, place in zip([-1, *positions[:-1]], positions, strict=True))
    if not is_counted or (record.get(_DOCUMENTS) is not None and begins[0] != begins[1]):
        raise ValueError("expected position_ids that are 0 where a document begins, and count on by 1 from there")
    return positions


def _whole_numbers(
    record: Mapping[str, Any], name: str, length: int | None, default: list[int] | None = None
) -> list[int]:
    values = record.get(name)
    if values is None and default is not None:
        return default
    kinds = (int, bool) if name in (_MASK, _ATTENTION) else (int,)
    if not isinstance(values, list) or any(type(value) not in kinds for value in values):
        raise ValueError(f"expected a list of whole numbers in field {name!r}, found {_first_other(values, kinds)}")
    if length is not None and len(values) != length:
        raise ValueError(f"expected {length} {name}, as many as input_ids, found {len(values)}")
    return values


def _floats(record: Mapping[str, Any], name: str, length: int) -> list[float]:
    values, kinds = record.get(name), (int, float, bool)
    if not isinstance(values, list) or any(type(value) not in kinds for value in values):
        kind = _first_other(values, kinds)
        raise ValueError(f"expected numbers in field {name!r}, which the loss reads, found {kind}")
    if len(values) != length:
        raise ValueError(f"expected {length} {name}, as many as input_ids, found {len(values)}")
    if not all(abs(value) <= _LARGEST for value in values):
        raise ValueError(f"expected finite numbers in field {name!r}, which the loss reads")
    return [float(value) for value in values]


def _first_other(values: object, kinds: tuple[type, ...]) -> str:
    """Name the first element that is of none of these kinds, or what is in place of the list."""
    return _kind_of(next(value for value in values if type(value) not in kinds) if isinstance(values, list) else values)


def _kind_of(value: object) -> str:
    """Name a value of JSON, or the type of what a dataset of a package's own has in its place."""
    if type(value) is float:
        return "a floating-point number"
    is_of_json = type(value) in (dict, list, str, int, bool) or value is None
    return kind_of(value) if is_of_json else f"a {type(value).__name__}"
