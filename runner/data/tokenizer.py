"""The checkpoint's tokenizer: documents to token ids within the model's vocabulary, between special tokens. No torch.

# Note [Framing]
transformers' `tokenizer(text)` adds the tokens of the post-processor in tokenizer.json, and no others: it ignores
`add_bos_token` and `add_eos_token` of tokenizer_config.json if there is a tokenizer.json, and always ignores
`bos_token_id` of config.json. Training and evaluation follow the same rule; flags override it. One thing is different:
a document ends with EOS even if the tokenizer adds none. Two classes of causal language models replace the
post-processor (`_BEGINS_WITH_BOS`): texts are framed as tokenizer.json says there, too, and a note says what differs.
Source: transformers 5.23, `tokenization_utils_tokenizers.py`, `tokenization_utils_base.py`.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from manifests.errors import DataError, system_errors
from manifests.paths import status_of
from manifests.store import read_config
from runner.bundle.packed import TOKENIZER, check_tokenizer
from runner.config.schema import FramingOptions
from runner.data.documents import PlacedDocument
from runner.data.files import Document
from runner.data.rows import Prompt, Skipped, TokenIds

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

Pieces: TypeAlias = Iterator[tuple[int, TokenIds]]  # each with the offset of its text
Tokenized: TypeAlias = Iterator[tuple[PlacedDocument, Pieces] | None]
_CONFIG = "tokenizer_config.json"
_BEGINS_WITH_BOS = {"GPTNeoXTokenizer": False, "CodeLlamaTokenizer": True}  # by class


@dataclass(frozen=True, slots=True)
class Frame:
    """The ids before a text and after it."""

    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """How documents are framed."""

    frame: Frame
    note: str | None  # if tokenizer_config.json differs


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """A tokenizer, the model's vocabulary size, and the ids before and after each document.

    A token that is not a label, such as those of prompts, is the negative number ~id.
    """

    tokenizer: Tokenizer
    size: int
    frame: Frame
    filler: int  # the padding token

    def tokenize(self, document: Document) -> Pieces:
        """Yield the ids of a document's pieces.

        A token never spans two pieces, so ids at their boundaries, which are line ends, may differ from those of the
        text tokenized whole.
        """
        for offset, piece in document.pieces:
            assert isinstance(piece, str), "rows of token ids have no tokenizer"
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
            yield offset, array("i", [~token for token in ids] if isinstance(piece, Prompt) else ids)

    def framed(self, document: Document, pieces: Pieces, skipped: Skipped | None = None) -> Pieces:
        """Yield the ids of a document's pieces within its frame; an empty document has no ids.

        The frame before a document belongs to its first piece, and the rest of a document has none. With `skipped`,
        invalid text is counted there and skipped.
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


class TokenRows:
    """Rows of token ids in place of text: nothing is left to tokenize, and no frame is put around them."""

    filler = 0

    def tokenize(self, document: Document) -> Pieces:
        for offset, piece in document.pieces:
            assert not isinstance(piece, str), "text needs a tokenizer"
            yield offset, piece

    def framed(self, document: Document, pieces: Pieces, skipped: Skipped | None = None) -> Pieces:
        return skipped.good(pieces) if skipped is not None else pieces


# Tokenizes the documents of a source, with None after each epoch; frames are not added.
Tokenize: TypeAlias = Callable[[Vocabulary | TokenRows, Iterator[PlacedDocument | None]], Tokenized]


def tokenize_alone(vocabulary: Vocabulary | TokenRows, documents: Iterator[PlacedDocument | None]) -> Tokenized:
    """Tokenize documents in this process, piece by piece as they are needed."""
    for placed in documents:
        yield None if placed is None else (placed, vocabulary.tokenize(placed.document))


def load_vocabulary(
    folder: Path, size: int, options: FramingOptions | None = None, *, has_prompts: bool = False
) -> Vocabulary:
    """Read the tokenizer of a checkpoint folder, for a model with a vocabulary of `size` ids.

    With `has_prompts`, what is put before a document is part of its prompt.
    """
    tokenizer = load_tokenizer(folder)
    frame = document_framing(folder, tokenizer, options or FramingOptions()).frame
    eos = special_id(folder, tokenizer, "eos")
    filler = eos if eos is not None and eos < size else 0
    if beyond := [token for token in (*frame.before, *frame.after) if token >= size]:
        problem = f"expected special token ids below {size}, found {beyond[0]}"
        hint = "tokenizer.json and config.json disagree; use both from one revision"
        raise DataError(str(folder), problem, hint, code="tokenizer.beyond-vocabulary")
    if has_prompts:
        frame = Frame(tuple(~token for token in frame.before), frame.after)
    return Vocabulary(tokenizer=tokenizer, size=size, frame=frame, filler=filler)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint folder, with truncation and padding off."""
    file = check_tokenizer(folder, "train on --data synthetic")
    from tokenizers import Tokenizer

    tokenizer: Tokenizer = _guarded(str(file), "is not a tokenizer", Tokenizer.from_file, str(file), is_muted=True)
    # The file's settings for inference would truncate or pad every document.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text, without special tokens. `Tokenizer.encode` would keep the GIL."""
    batch = _guarded("", "the tokenizer fails", tokenizer.encode_batch_fast, [text], add_special_tokens=False)
    ids: list[int] = batch[0].ids
    return ids


def document_framing(folder: Path, tokenizer: Tokenizer, options: FramingOptions) -> Framing:
    """Return the special tokens around a document; see Note [Framing]."""
    of_tokenizer = _tokenizer_frame(folder, tokenizer)
    after = () if options.eos is False else _ended(of_tokenizer.after, _needed(folder, tokenizer, "eos"))
    frame = Frame(_begun(folder, tokenizer, of_tokenizer.before, options), after)
    return Framing(frame=frame, note=_note(folder, of_tokenizer, options))


def special_id(folder: Path, tokenizer: Tokenizer, kind: str) -> int | None:
    """Return the id of BOS or EOS: the first in config.json, generation_config.json and tokenizer_config.json."""
    for name, field in (
        ("config.json", f"{kind}_token_id"),
        ("generation_config.json", f"{kind}_token_id"),
        (_CONFIG, f"{kind}_token"),
    ):
        token = _read(folder / name).get(field)
        if isinstance(token, list) and token:
            token = token[0]  # Llama 3.1 lists several
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            token = tokenizer.token_to_id(token)
        if token is None:
            continue
        if type(token) is not int or not 0 <= token < 1 << 31:
            problem = f"expected a token id, found {str(token)[:80]!r}"
            raise DataError(f"{folder / name}: {field}", problem, code="tokenizer.special-token")
        return token
    return None


def _guarded(where: str, problem: str, act: Any, *args: Any, is_muted: bool = False, **kwargs: Any) -> Any:
    """Call the tokenizers library, whose errors are plain exceptions, or panics of Rust.

    A panic prints its location to stderr; `is_muted` suppresses that, for all threads.
    """
    try:
        with _muted(is_muted):
            return act(*args, **kwargs)
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # from Rust; no module exports it
            raise DataError(where, f"{problem}: {error}", code="tokenizer.broken") from error
        raise


@contextmanager
def _muted(is_muted: bool) -> Iterator[None]:
    if not is_muted:
        yield
        return
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def _begun(folder: Path, tokenizer: Tokenizer, before: tuple[int, ...], options: FramingOptions) -> tuple[int, ...]:
    if options.bos is None:
        return before
    if not options.bos:
        return ()
    bos = _needed(folder, tokenizer, "bos")
    return before if bos in before else (bos, *before)


def _ended(after: tuple[int, ...], eos: int) -> tuple[int, ...]:
    return after if eos in after else (*after, eos)


def _needed(folder: Path, tokenizer: Tokenizer, kind: str) -> int:
    token = special_id(folder, tokenizer, kind)
    if token is None:
        hint = f"set {kind}_token_id in config.json, or use --no-add-{kind}-token"
        raise DataError(str(folder), f"no file defines the {kind.upper()} token", hint,
                         code="tokenizer.no-special-token")  # fmt: skip
    return token


def _tokenizer_frame(folder: Path, tokenizer: Tokenizer) -> Frame:
    framed = _guarded(
        str(folder / TOKENIZER), "its post_processor fails", tokenizer.post_process, _one_token(), is_muted=True
    )
    mask, ids = framed.special_tokens_mask, framed.ids
    if 0 not in mask:
        raise DataError(f"{folder / TOKENIZER}: post_processor", "drops the text itself", code="tokenizer.broken")
    text = mask.index(0)
    return Frame(tuple(ids[:text]), tuple(ids[text + 1 :]))


@cache
def _one_token() -> Encoding:
    """Return the encoding of a text of one token: the special tokens around it do not depend on its id."""
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode("a")


def _note(folder: Path, of_tokenizer: Frame, options: FramingOptions) -> str | None:
    config = _read(folder / _CONFIG)
    name = str(config.get("tokenizer_class"))
    begins = _BEGINS_WITH_BOS.get(name.removesuffix("Fast"))
    if options.bos is None and begins not in (None, bool(of_tokenizer.before)):
        flag, adds = ("--add-bos-token", "a") if begins else ("--no-add-bos-token", "no")
        return f"transformers' {name} adds {adds} BOS token, but {TOKENIZER} does the opposite; {flag} overrides it"
    for kind, is_asked, added in (("bos", options.bos, of_tokenizer.before), ("eos", options.eos, of_tokenizer.after)):
        declared = config.get(f"add_{kind}_token")
        if is_asked is None and isinstance(declared, bool) and declared != bool(added):
            flag = f"--add-{kind}-token" if declared else f"--no-add-{kind}-token"
            if kind == "eos" and declared:
                continue  # documents end with EOS anyway
            return (
                f"{_CONFIG} has add_{kind}_token: {str(declared).lower()}, but {TOKENIZER}, which transformers "
                f"follows, does the opposite; {flag} overrides it"
            )
    return None


def _read(file: Path) -> Mapping[str, object]:
    with system_errors(file, code="store.unreadable"):
        return {} if status_of(file) is None else read_config(file)
