"""Which tokens stand before and after a text: the tokenizer's own, as transformers adds them. No torch.

# Note [Framing]
`tokenizer(text)` of transformers adds what the post-processor of tokenizer.json says, and nothing else: where there is
a tokenizer.json, `add_bos_token` and `add_eos_token` of tokenizer_config.json are not looked at, and `bos_token_id` of
config.json never is. Training, evaluation and generation follow the same rule; flags override it. What is particular to
training and evaluation: a document, unlike a prompt, ends, so eos follows it even where the tokenizer adds none.
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
from manifests.jsontext import parse_json_object
from manifests.store import read_small_file
from runner.bundle.packed import TOKENIZER, check_tokenizer
from runner.config.schema import FramingOptions

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

__all__ = ["Frame", "Framing", "document_framing", "encode", "load_tokenizer", "prompt_frame", "special_id"]

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
    """How documents are framed, and how a runner that knew config.json alone framed them.

    `former` is None where that one knew no eos, and so read no text.
    """

    frame: Frame
    former: Frame | None
    note: str | None = None  # where tokenizer_config.json says otherwise

    @property
    def is_as_before(self) -> bool:
        return self.frame == self.former


def load_tokenizer(folder: Path, otherwise: str = "give --tokens") -> Tokenizer:
    """Read the tokenizer of a checkpoint folder, which then gives a text's ids, all of them and no others.

    Raises:
        InputError: no tokenizer, or a broken one; the hint says what can be done `otherwise`.
    """
    file = check_tokenizer(folder, otherwise)
    from tokenizers import Tokenizer

    tokenizer: Tokenizer = _guarded(str(file), "is no tokenizer", Tokenizer.from_file, str(file), is_muted=True)
    # What the file asks for at inference would cut or fill every document.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str, where: str) -> list[int]:
    """Return the ids of a text, with nothing around them.

    Raises:
        InputError: the tokenizer fails at the text that is at `where`.
    """
    encoded = _guarded(where, "the tokenizer fails", tokenizer.encode, text, add_special_tokens=False)
    ids: list[int] = encoded.ids
    return ids


def _guarded(where: str, problem: str, act: Any, *args: Any, is_muted: bool = False, **kwargs: Any) -> Any:
    """Call the tokenizers library, which raises nothing narrower than Exception, and panics besides.

    A panic prints where in the library it was, unless standard error is muted, which it is for all threads.

    Raises:
        InputError: it failed.
    """
    try:
        with _muted(is_muted):
            return act(*args, **kwargs)
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # of Rust, which no module names
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


def prompt_frame(folder: Path, tokenizer: Tokenizer, asked: FramingOptions) -> Frame:
    """Return what stands around a prompt; see Note [Framing].

    Raises:
        InputError: a token is asked for that no file names.
    """
    own = _tokenizer_frame(folder, tokenizer)
    after = own.after if asked.eos is None else ()
    if asked.eos:
        after = _ended(own.after, _needed(folder, tokenizer, "eos"))
    return Frame(_begun(folder, tokenizer, own.before, asked), after)


def document_framing(folder: Path, tokenizer: Tokenizer, asked: FramingOptions) -> Framing:
    """Return what stands around a document; see Note [Framing].

    Raises:
        InputError: a token is asked for that no file names.
    """
    own = _tokenizer_frame(folder, tokenizer)
    bos, eos = (special_id(folder, tokenizer, kind) for kind in ("bos", "eos"))
    after = () if asked.eos is False else _ended(own.after, _needed(folder, tokenizer, "eos"))
    former = None if eos is None else Frame((bos,) if bos is not None and bos != eos else (), (eos,))
    frame = Frame(_begun(folder, tokenizer, own.before, asked), after)
    return Framing(frame=frame, former=former, note=_note(folder, own, asked))


def special_id(folder: Path, tokenizer: Tokenizer, kind: str) -> int | None:
    """Return the id of bos or eos: the first in config.json, generation_config.json and tokenizer_config.json.

    Raises:
        InputError: what stands there is no id, and no token that has one.
    """
    for name, field in (
        ("config.json", f"{kind}_token_id"),
        ("generation_config.json", f"{kind}_token_id"),
        (_CONFIG, f"{kind}_token"),
    ):
        found = _read(folder / name).get(field)
        if isinstance(found, list) and found:
            found = found[0]  # Llama 3.1 lists every token that may end a text or a turn
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
        what = "begins" if kind == "bos" else "ends"
        hint = f"set {kind}_token_id in config.json, or --no-add-{kind}-token leaves it out"
        raise DataError(str(folder), f"no file names the token that {what} a text ({kind})", hint,
                         code="tokenizer.no-special-token")  # fmt: skip
    return found


def _tokenizer_frame(folder: Path, tokenizer: Tokenizer) -> Frame:
    framed = _guarded(
        str(folder / TOKENIZER), "its post_processor fails", tokenizer.post_process, _one_token(), is_muted=True
    )
    mask, ids = framed.special_tokens_mask, framed.ids
    if 0 not in mask:
        raise DataError(f"{folder / TOKENIZER}: post_processor", "leaves the text itself out", code="tokenizer.broken")
    text = mask.index(0)
    return Frame(tuple(ids[:text]), tuple(ids[text + 1 :]))


@cache
def _one_token() -> Encoding:
    """Return the encoding of a text of one token, whatever its id: what is added around it is the same for all."""
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode("a")


def _note(folder: Path, own: Frame, asked: FramingOptions) -> str | None:
    config = _read(folder / _CONFIG)
    for kind, is_asked, added in (("bos", asked.bos, own.before), ("eos", asked.eos, own.after)):
        said = config.get(f"add_{kind}_token")
        if is_asked is None and isinstance(said, bool) and said != bool(added):
            flag = f"--add-{kind}-token" if said else f"--no-add-{kind}-token"
            if kind == "eos" and said:
                continue  # it ends every document as it is
            return (
                f"{_CONFIG} says add_{kind}_token: {str(said).lower()}, and {TOKENIZER} says otherwise, which is what "
                f"transformers goes by; {flag} overrides it"
            )
    return None


def _read(file: Path) -> Mapping[str, object]:
    return parse_json_object(read_small_file(file), str(file)) if file.exists() else {}
