"""Build the demo's model, tokenizer and text below a folder; nothing is downloaded."""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.utils import logging

VOCAB_SIZE = 4096
PIECE_CHARS, NUM_PIECES, NUM_EVAL = 1500, 1500, 60
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"


def main(root: Path) -> None:
    texts = _standard_library()
    tokenizer = _train_tokenizer(texts)
    folder = root / "model"
    set_seed(0)
    logging.disable_progress_bar()
    config = LlamaConfig(
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        tie_word_embeddings=True,
        bos_token_id=tokenizer.convert_tokens_to_ids(BEGIN),
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="6MB")
    tokenizer.save_pretrained(folder)
    _write_lines(root / "text" / "train.jsonl", texts[NUM_EVAL:])
    _write_lines(root / "text" / "eval.jsonl", texts[:NUM_EVAL])
    print(f"{folder}: {sum(weight.numel() for weight in model.parameters()):,} parameters")


def _standard_library() -> list[str]:
    """Return pieces of the sources of Python's standard library, shuffled with a fixed seed."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    pieces: list[str] = []
    for file in sorted(folder.glob("*.py")):
        piece = ""
        for block in file.read_text(encoding="utf-8", errors="ignore").split("\n\n"):
            piece += block + "\n\n"
            if len(piece) > PIECE_CHARS:
                pieces.append(piece)
                piece = ""
    random.Random(0).shuffle(pieces)
    return pieces[:NUM_PIECES]


def _train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END)


def _write_lines(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
