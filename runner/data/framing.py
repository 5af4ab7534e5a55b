"""Framing: the special tokens before and after a text, as transformers' tokenizers add them. No torch.

# Note [Framing]
transformers' `tokenizer(text)` adds the tokens of the post-processor in tokenizer.json, and no others: it ignores
`add_bos_token` and `add_eos_token` of tokenizer_config.json if there is a tokenizer.json, and always ignores
`bos_token_id` of config.json. Training and evaluation follow the same rule; flags override it. One thing is different:
a document ends with EOS even if the tokenizer adds none.
Source: transformers 5.23, `tokenization_utils_tokenizers.py`, `tokenization_utils_base.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manifests.errors import DataError
from manifests.store import read_config
from runner.bundle.packed import TOKENIZER, check_tokenizer
from runner.config.schema import FramingOptions

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class Frame:
    """The ids before a text and after it."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def around(self, ids: list[int]) -> tuple[int, ...]:
        return (*self.before, *ids, *self.after)


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """How documents are framed."""

    frame: Frame
    note: str | None = None  # if tokenizer_config.json differs


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint folder, with truncation and padding off.

    Raises:
        DataError: it is missing or invalid.
    """
    file = check_tokenizer(folder, "train on --data synthetic")
    from tokenizers import Tokenizer

    tokenizer: Tokenizer = _guarded(str(file), "is not a tokenizer", Tokenizer.from_file, str(file), is_muted=True)
    # The file's settings for inference would truncate or pad every document.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text, without special tokens. Other threads run meanwhile: `Tokenizer.encode` keeps the GIL.

    Raises:
        DataError: the tokenizer fails on the text.
    """
    batch = _guarded("", "the tokenizer fails", tokenizer.encode_batch_fast, [text], add_special_tokens=False)
    ids: list[int] = batch[0].ids
    return ids


def _guarded(where: str, problem: str, act: Any, *args: Any, is_muted: bool = False, **kwargs: Any) -> Any:
    """Call the tokenizers library, which raises plain Exception, or panics.

    A panic prints its location to stderr; `is_muted` suppresses that, for all threads.

    Raises:
        DataError: it failed.
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
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def document_framing(folder: Path, tokenizer: Tokenizer, asked: FramingOptions) -> Framing:
    """Return the special tokens around a document; see Note [Framing].

    Raises:
        DataError: a token is required, and no file defines it.
    """
    own = _tokenizer_frame(folder, tokenizer)
    after = () if asked.eos is False else _ended(own.after, _needed(folder, tokenizer, "eos"))
    frame = Frame(_begun(folder, tokenizer, own.before, asked), after)
    return Framing(frame=frame, note=_note(folder, own, asked))


def special_id(folder: Path, tokenizer: Tokenizer, kind: str) -> int | None:
    """Return the id of BOS or EOS: the first in config.json, generation_config.json and tokenizer_config.json.

    Raises:
        DataError: the value is neither an id nor a token of the tokenizer.
    """
    for name, field in (
        ("config.json", f"{kind}_token_id"),
        ("generation_config.json", f"{kind}_token_id"),
        (_CONFIG, f"{kind}_token"),
    ):
        found = _read(folder / name).get(field)
        if isinstance(found, list) and found:
            found = found[0]  # Llama 3.1 lists several
        if isinstance(found, Mapping):
            found = found.get("content")
        if isinstance(found, str):
            found = tokenizer.token_to_id(found)
        if found is None:
            continue
        if type(found) is not int or not 0 <= found < 1 << 31:
            problem = f"expected a token id, found {str(found)[:80]!r}"
            raise DataError(f"{folder / name}: {field}", problem, code="tokenizer.special-token")
        return found
    return None


def _begun(folder: Path, tokenizer: Tokenizer, before: tuple[int, ...], asked: FramingOptions) -> tuple[int, ...]:
    if asked.bos is None:
        return before
    if not asked.bos:
        return ()
    bos = _needed(folder, tokenizer, "bos")
    return before if bos in before else (bos, *before)


def _ended(after: tuple[int, ...], eos: int) -> tuple[int, ...]:
    return after if eos in after else (*after, eos)


def _needed(folder: Path, tokenizer: Tokenizer, kind: str) -> int:
    found = special_id(folder, tokenizer, kind)
    if found is None:
        hint = f"set {kind}_token_id in config.json, or use --no-add-{kind}-token"
        raise DataError(str(folder), f"no file defines the {kind.upper()} token", hint,
                         code="tokenizer.no-special-token")  # fmt: skip
    return found


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


def _note(folder: Path, own: Frame, asked: FramingOptions) -> str | None:
    config = _read(folder / _CONFIG)
    for kind, is_asked, added in (("bos", asked.bos, own.before), ("eos", asked.eos, own.after)):
        said = config.get(f"add_{kind}_token")
        if is_asked is None and isinstance(said, bool) and said != bool(added):
            flag = f"--add-{kind}-token" if said else f"--no-add-{kind}-token"
            if kind == "eos" and said:
                continue  # documents end with EOS anyway
            return (
                f"{_CONFIG} has add_{kind}_token: {str(said).lower()}, but {TOKENIZER}, which transformers follows, "
                f"does the opposite; {flag} overrides it"
            )
    return None


def _read(file: Path) -> Mapping[str, object]:
    return read_config(file) if file.exists() else {}
