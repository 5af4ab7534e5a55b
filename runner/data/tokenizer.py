"""The checkpoint's tokenizer: documents to token ids within the model's vocabulary."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tokenizers import Tokenizer

from manifests.errors import DataError
from runner.config.schema import FramingOptions
from runner.data.bad import Skipped
from runner.data.documents import PlacedDocument
from runner.data.files import Document
from runner.data.framing import Frame, document_framing, encode, load_tokenizer, special_id

TokenIds: TypeAlias = "array[int]"
Pieces: TypeAlias = Iterator[tuple[int, TokenIds]]  # each with the offset of its text
Tokenized: TypeAlias = Iterator[tuple[PlacedDocument, Pieces] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """A tokenizer, the model's vocabulary size, and the ids before and after each document."""

    tokenizer: Tokenizer
    size: int
    frame: Frame
    filler: int  # the padding token

    def tokenize(self, document: Document) -> Pieces:
        """Yield the ids of a document's pieces.

        A token never spans two pieces, so ids at their boundaries, which are line ends, may differ from those of the
        text tokenized whole.

        Raises:
            BadDocumentError: it is not text.
            DataError: an id is beyond the model's vocabulary.
        """
        for offset, piece in document.pieces:
            try:
                ids = encode(self.tokenizer, piece)
            except DataError as error:
                raise error.within(document.where) from error
            if ids and max(ids) >= self.size:
                raise DataError(
                    document.where,
                    f"token {max(ids)} is beyond the model's vocabulary of {self.size}",
                    "tokenizer.json and config.json disagree; use both from one revision",
                    code="tokenizer.beyond-vocabulary",
                )
            yield offset, array("i", ids)

    def framed(self, document: Document, pieces: Pieces, skipped: Skipped | None = None) -> Pieces:
        """Yield the ids of a document's pieces within its frame; an empty document has no ids.

        The frame before a document belongs to its first piece, and the rest of a document has none. With `skipped`,
        invalid text is counted there and skipped.

        Raises:
            DataError: as `tokenize`.
        """
        last: int | None = None
        for offset, ids in skipped.good(pieces) if skipped is not None else pieces:
            if not ids:
                continue
            is_begin = last is None and not document.is_rest
            last = document.begin if last is None else offset
            yield last, array("i", self.frame.before) + ids if is_begin else ids
        if last is not None and self.frame.after:
            yield last, array("i", self.frame.after)


# Tokenizes the documents of a source, with None after each epoch; frames are not added.
Tokenize: TypeAlias = Callable[[Vocabulary, Iterator[PlacedDocument | None]], Tokenized]


def tokenize_alone(vocabulary: Vocabulary, documents: Iterator[PlacedDocument | None]) -> Tokenized:
    """Tokenize documents in this process, piece by piece as they are needed."""
    for placed in documents:
        yield None if placed is None else (placed, vocabulary.tokenize(placed.document))


def load_vocabulary(folder: Path, size: int, options: FramingOptions | None = None) -> Vocabulary:
    """Read the tokenizer of a checkpoint folder, for a model with a vocabulary of `size` ids.

    Raises:
        DataError: it is missing or invalid, defines no EOS, or has special tokens beyond the vocabulary.
    """
    tokenizer = load_tokenizer(folder)
    frame = document_framing(folder, tokenizer, options or FramingOptions()).frame
    eos = special_id(folder, tokenizer, "eos")
    filler = eos if eos is not None and eos < size else 0
    if beyond := [token for token in (*frame.before, *frame.after) if token >= size]:
        problem = f"expected special token ids below {size}, found {beyond[0]}"
        hint = "tokenizer.json and config.json disagree; use both from one revision"
        raise DataError(str(folder), problem, hint, code="tokenizer.beyond-vocabulary")
    return Vocabulary(tokenizer=tokenizer, size=size, frame=frame, filler=filler)
