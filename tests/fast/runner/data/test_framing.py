"""Texts are framed as transformers' AutoTokenizer frames them, in training as in generation, unless flags say else."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer

from manifests.errors import InputError
from runner.config.schema import BatchOptions, DataOptions, FramingOptions
from runner.data.sequences import read_batches
from runner.data.tokenizer import Frame, document_framing, load_tokenizer

BOS, EOS, SIZE = 0, 1, 5
VOCAB = {"<s>": BOS, "</s>": EOS, "<unk>": 2, "a": 3, "b": 4}
SPECIAL = [("<s>", BOS), ("</s>", EOS)]
POSTS = {
    "none": None,
    "byte": processors.ByteLevel(),
    "begun": processors.TemplateProcessing(single="<s> $A", special_tokens=SPECIAL),
    "twice": processors.TemplateProcessing(single="<s> <s> $A", special_tokens=SPECIAL),
    "both": processors.TemplateProcessing(single="<s> $A </s>", special_tokens=SPECIAL),
    "ended": processors.Sequence(
        [processors.ByteLevel(), processors.TemplateProcessing(single="$A </s>", special_tokens=SPECIAL)]
    ),
    "roberta": processors.RobertaProcessing(("</s>", EOS), ("<s>", BOS)),
}
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"add_bos_token": False, "add_eos_token": False},
    {"add_bos_token": True, "add_eos_token": True},
)
NONE = FramingOptions()


def write(folder: Path, post: str, **config: Any) -> Path:
    tokenizer = Tokenizer(models.BPE(VOCAB, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if POSTS[post] is not None:
        tokenizer.post_processor = POSTS[post]
    tokenizer.enable_truncation(2)
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "bos_token_id": BOS, "eos_token_id": EOS}))
    return folder


def documents(folder: Path, asked: FramingOptions = NONE) -> list[int]:
    """Return the first tokens of a document that comes again and again, as training reads it."""
    (folder / "a.jsonl").write_text('{"text": "ab"}\n')
    data = DataOptions(sources=(str(folder / "a.jsonl"),), framing=asked)
    batch = BatchOptions(global_batch=1, microbatch=1, seq_len=7)
    (found,) = islice(read_batches(data, batch, folder=folder, vocab_size=SIZE), 1)
    return [int(token) for token in found.tokens[0]]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("post", POSTS)
def test_text_is_framed_as_transformers_frames_it(post: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path, post, **config)
    expected = AutoTokenizer.from_pretrained(folder)("ab", truncation=False)["input_ids"]
    document = expected if expected[-1] == EOS else [*expected, EOS]
    assert documents(folder) == (7 * document)[:7]


@pytest.mark.parametrize("post", POSTS)
def test_flags_override_the_tokenizer(post: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, post))
    bare = FramingOptions(bos=False, eos=False)
    assert document_framing(tmp_path, tokenizer, bare).frame == Frame((), ())
    full = FramingOptions(bos=True, eos=True)
    expected = Frame((BOS, BOS) if post == "twice" else (BOS,), (EOS,))
    assert document_framing(tmp_path, tokenizer, full).frame == expected
    assert documents(tmp_path, FramingOptions(bos=False)) == (3 * [3, 4, EOS])[:7]


@pytest.mark.parametrize(("kind", "asked"), [("bos", FramingOptions(bos=True)), ("eos", NONE)])
def test_token_that_no_file_names_is_refused(kind: str, asked: FramingOptions, tmp_path: Path) -> None:
    folder = write(tmp_path, "none", **{f"{kind}_token": None})
    (folder / "config.json").write_text("{}")
    with pytest.raises(InputError) as error:
        document_framing(folder, load_tokenizer(folder), asked)
    assert (error.value.where, error.value.code) == (str(folder), "tokenizer.no-special-token")


@pytest.mark.parametrize(("post", "said"), [("none", True), ("begun", False)])
def test_config_that_says_otherwise_than_the_tokenizer_is_noted(post: str, said: bool, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, post, add_bos_token=said))
    note = document_framing(tmp_path, tokenizer, NONE).note
    assert note is not None
    assert ("--add-bos-token" if said else "--no-add-bos-token") in note
    assert document_framing(tmp_path, tokenizer, FramingOptions(bos=said)).note is None


@pytest.mark.parametrize("name", ["GPTNeoXTokenizer", "CodeLlamaTokenizer"])
@pytest.mark.parametrize("post", ["none", "begun"])
def test_bos_of_a_class_that_does_not_follow_its_file_is_noted(post: str, name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, post, tokenizer_class=f"{name}Fast"))
    begins = AutoTokenizer.from_pretrained(tmp_path)("ab", truncation=False)["input_ids"][0] == BOS
    note = document_framing(tmp_path, tokenizer, NONE).note
    assert (note is None) == (begins == (post == "begun"))
    assert note is None or f" {'--add' if begins else '--no-add'}-bos-token" in note
    assert document_framing(tmp_path, tokenizer, FramingOptions(bos=begins)).note is None


def test_tokenizer_that_panics_is_refused_without_a_word_of_its_library(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "begun") / "tokenizer.json"
    found = json.loads(file.read_text())
    file.write_text(json.dumps({**found, "post_processor": {**found["post_processor"], "special_tokens": {}}}))
    with pytest.raises(InputError) as error:
        document_framing(tmp_path, load_tokenizer(tmp_path), NONE)
    assert (error.value.where, error.value.code) == (str(file), "tokenizer.broken")
    assert capfd.readouterr().err == ""
