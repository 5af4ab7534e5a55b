"""Fuzz target: a tokenizer's files, in one JSON object. Ids fit the model, or the files are refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from manifests.errors import UserError
from runner.data.files import Document
from runner.data.tokenizer import load_vocabulary
from tests.fuzz.folder import check_refusal, scratch

_SIZE = 40
_FILES = ("tokenizer.json", "config.json", "generation_config.json", "tokenizer_config.json")


def check(text: bytes) -> None:
    """Raise AssertionError unless the files are refused by name, or the ids of a document fit the model."""
    folder = scratch("tokenizer")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    if not isinstance(found, dict):
        (folder / _FILES[0]).write_bytes(text)  # one that is not even JSON
        found = {}
    for name in _FILES:
        if name in found:
            (folder / name).write_bytes(json.dumps(found[name]).encode("utf-8", "surrogatepass"))
    pieces = (0, "ab ba é\n"), (5, " ab")
    document = Document(file=Path("a.jsonl"), begin=0, end=9, nbytes=9, read=lambda: iter(pieces))
    try:
        vocabulary = load_vocabulary(folder, _SIZE)
        runs = list(vocabulary.framed(document, vocabulary.tokenize(document)))
    except UserError as error:
        check_refusal(error, folder, "a.jsonl")
        return
    assert all(0 <= token < _SIZE for _, ids in runs for token in ids)


@cache
def seeds() -> tuple[bytes, ...]:
    """Return a byte-level BPE, a BPE with byte fallback, words, and a unigram, with the configs of each."""
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3, "b": 4, "Ġ": 5, "ab": 6, "▁": 7, "<0xC3>": 8, "<0xA9>": 9}
    bytelevel = Tokenizer(models.BPE(vocab, [("a", "b")], unk_token="<unk>"))
    bytelevel.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytelevel.decoder, bytelevel.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    bytelevel.add_special_tokens(["<s>", "</s>"])
    fallback = Tokenizer(models.BPE(vocab, [("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fallback.pre_tokenizer = pre_tokenizers.Metaspace()
    fallback.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.enable_truncation(3)
    words.enable_padding(length=5)
    unigram = Tokenizer(models.Unigram([(name, -1.0) for name in vocab], unk_id=2))
    ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1}
    flags: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    made = [
        (bytelevel, {"config.json": ids}),
        (fallback, {"config.json": {}, "generation_config.json": {**ids, "eos_token_id": [1, 2]}}),
        (words, {"tokenizer_config.json": flags}),
        (unigram, {"config.json": ids, "tokenizer_config.json": {**flags, "add_eos_token": True}}),
    ]
    return tuple(json.dumps({"tokenizer.json": json.loads(each.to_str()), **files}).encode() for each, files in made)
