"""Load an exported folder with transformers and compare its loss with the pipeline's evaluation loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

SEQ_LEN = 128
TOLERANCE = 1e-5


@torch.no_grad()
def main(folder: Path, text: Path, metrics: Path) -> None:
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = []
    for line in text.read_text(encoding="utf-8").splitlines():
        ids += [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]
    total, count = 0.0, 0
    for begin in range(0, len(ids) - 1, SEQ_LEN):
        window = torch.tensor(ids[begin : begin + SEQ_LEN + 1])
        logits = model(window[None, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
        count += len(window) - 1
    loss = total / count
    lines = map(json.loads, metrics.read_text().splitlines())
    last = [line for line in lines if "eval_loss" in line][-1]
    print(f"transformers: loss {loss:.6f} over {count:,} tokens")
    print(f"pipeline:     loss {last['eval_loss']:.6f} over {last['eval_num_tokens']:,} tokens")
    if count != last["eval_num_tokens"] or abs(loss - last["eval_loss"]) > TOLERANCE * loss:
        sys.exit("the losses differ")
    print("the same loss")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
