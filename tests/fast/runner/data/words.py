"""A tokenizer of whole words, and documents made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

WORDS = [f"w{number}" for number in range(8)]
BOS, EOS, FIRST = 0, 1, 2  # ids; word i is FIRST + i
VOCAB_SIZE = FIRST + len(WORDS)


def write_tokenizer(folder: Path, **config: Any) -> Path:
    vocab = {"<bos>": BOS, "<eos>": EOS, **{word: FIRST + number for number, word in enumerate(WORDS)}}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<eos>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.enable_truncation(3)  # as a file made for inference might ask
    tokenizer.enable_padding(length=5)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"bos_token_id": BOS, "eos_token_id": EOS, **config}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def text_of(document: Iterable[int]) -> str:
    return " ".join(WORDS[word] for word in document)


def write_documents(file: Path, documents: Sequence[Sequence[int]], group: int = 3) -> str:
    """Write documents as the file's name says, `group` of them in a row group; a `.txt` file holds all as one."""
    match file.suffix:
        case ".txt":
            file.write_text("\n".join(map(text_of, documents)))
        case ".jsonl":
            file.write_text("\n".join(json.dumps({"text": text_of(document)}) for document in documents))
        case ".parquet":
            table = pyarrow.table({"text": pyarrow.array(map(text_of, documents), pyarrow.string())})
            parquet.write_table(table, file, row_group_size=group)
    return str(file)
