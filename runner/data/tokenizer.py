"""The checkpoint's tokenizer: documents to token ids within the model's vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from manifests.errors import DataError
from runner.config.schema import FramingOptions
from runner.data.bad import Skipped
from runner.data.files import Document
from runner.data.framing import Frame, document_framing, encode, load_tokenizer, special_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """A tokenizer, the model's vocabulary size, and the ids before and after each document."""

    tokenizer: Tokenizer
    size: int
    frame: Frame
    filler: int  # the padding token

    def encode(self, document: Document, skipped: Skipped | None = None) -> Iterator[tuple[int, list[int]]]:
        """Encode a document piece by piece, with its frame; an empty document has no ids.

        Ids come with the offset of their piece; the frame before a document belongs to its first piece, and the rest of
        a document has none. With `skipped`, invalid text is counted there and skipped.

        A token never spans two pieces, so ids at their boundaries, which are line ends, may differ from those of the
        text tokenized whole.

        Raises:
            BadDocumentError: it is not text.
            DataError: an id is beyond the model's vocabulary.
        """
        at: int | None = None
        for offset, piece in skipped.good(document.pieces) if skipped is not None else document.pieces:
            ids: list[int] = encode(self.tokenizer, piece, document.where)
            if not ids:
                continue
            if max(ids) >= self.size:
                raise DataError(
                    document.where,
                    f"token {max(ids)} is beyond the model's vocabulary of {self.size}",
                    "tokenizer.json and config.json disagree; use both from one revision",
                    code="tokenizer.beyond-vocabulary",
                )
            if at is None and not document.is_rest:
                ids = [*self.frame.before, *ids]
            at = document.begin if at is None else offset
            yield at, ids
        if at is not None and self.frame.after:
            yield at, [*self.frame.after]


def load_vocabulary(folder: Path, size: int, asked: FramingOptions | None = None) -> Vocabulary:
    """Read the tokenizer of a checkpoint folder, for a model with a vocabulary of `size` ids.

    Raises:
        DataError: it is missing or invalid, defines no EOS, or has special tokens beyond the vocabulary.
    """
    tokenizer = load_tokenizer(folder)
    frame = document_framing(folder, tokenizer, asked or FramingOptions()).frame
    eos = special_id(folder, tokenizer, "eos")
    filler = eos if eos is not None and eos < size else 0
    if beyond := [token for token in (*frame.before, *frame.after) if token >= size]:
        problem = f"expected special token ids below {size}, found {beyond[0]}"
        hint = "tokenizer.json and config.json disagree; use both from one revision"
        raise DataError(str(folder), problem, hint, code="tokenizer.beyond-vocabulary")
    return Vocabulary(tokenizer=tokenizer, size=size, frame=frame, filler=filler)
