"""The packaged tokenizer: documents to token ids that the model has embeddings for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from manifests.errors import InputError
from manifests.jsontext import parse_json_object
from manifests.store import read_small_file
from runner.data.files import Document
from runner.loading.packed import check_tokenizer

__all__ = ["Vocabulary", "load_tokenizer", "load_vocabulary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """A tokenizer, the model's number of token ids, and the ids that begin and end a document."""

    tokenizer: Tokenizer
    size: int
    bos: int | None
    eos: int

    def encode(self, document: Document) -> Iterator[tuple[int, list[int]]]:
        """Give a document's ids piece by piece, between bos and eos; nothing for an empty one.

        With them comes the offset of their piece; what is before the first of them counts as that piece.
        The rest of a document has no bos.

        A token never spans two pieces, so ids at a seam, a line end, may differ from those of the
        text tokenised whole.

        Raises:
            InputError: an id that the model has no embedding for.
        """
        at: int | None = None
        for offset, piece in document.pieces:
            ids: list[int] = self.tokenizer.encode(piece, add_special_tokens=False).ids
            if not ids:
                continue
            if max(ids) >= self.size:
                raise InputError(
                    document.where,
                    f"token {max(ids)} is beyond the model's vocabulary of {self.size}",
                    "tokenizer.json and config.json disagree; take both from one revision",
                )
            if at is None and self.bos is not None and not document.is_rest:
                ids = [self.bos, *ids]
            at = document.begin if at is None else offset
            yield at, ids
        if at is not None:
            yield at, [self.eos]


def load_vocabulary(folder: Path, size: int) -> Vocabulary:
    """Read the tokenizer of a checkpoint folder, for a model of `size` token ids.

    The ids of bos and eos are the first found in config.json, generation_config.json and
    tokenizer_config.json. Where both are one token, it only ends documents.

    Raises:
        InputError: no tokenizer, a broken one, no eos, or an id beyond the model's.
    """
    tokenizer = load_tokenizer(folder, "train on --data synthetic")
    bos, eos = (_special_id(folder, tokenizer, kind, size) for kind in ("bos", "eos"))
    if eos is None:
        raise InputError(
            str(folder),
            "no file names the token that ends a text (eos)",
            "set eos_token_id in config.json",
        )
    return Vocabulary(tokenizer=tokenizer, size=size, bos=None if bos == eos else bos, eos=eos)


def load_tokenizer(folder: Path, otherwise: str = "give --tokens") -> Tokenizer:
    """Read the tokenizer of a checkpoint folder, which then gives a text's ids, all of them and no others.

    Raises:
        InputError: no tokenizer, or a broken one; the hint says what can be done `otherwise`.
    """
    file = check_tokenizer(folder, otherwise)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(str(file), f"is no tokenizer: {error}") from error
    # What the file asks for at inference would cut or fill every document.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_id(folder: Path, tokenizer: Tokenizer, kind: str, size: int) -> int | None:
    for name, field in (
        ("config.json", f"{kind}_token_id"),
        ("generation_config.json", f"{kind}_token_id"),
        ("tokenizer_config.json", f"{kind}_token"),
    ):
        found = _read(folder / name).get(field)
        where = f"{folder / name}: {field}"
        if isinstance(found, list) and found:
            found = found[0]  # Llama 3.1 lists every token that may end a text or a turn
        if isinstance(found, Mapping):
            found = found.get("content")
        if isinstance(found, str):
            found = tokenizer.token_to_id(found)
        if found is None:
            continue
        if type(found) is not int or not 0 <= found < size:
            raise InputError(where, f"expected a token id below {size}, found {found!r}")
        return found
    return None


def _read(file: Path) -> Mapping[str, object]:
    return parse_json_object(read_small_file(file), str(file)) if file.exists() else {}
