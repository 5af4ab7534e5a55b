"""Render conversations by the chat template of a checkpoint into rows of token ids, of which answers count in the loss.

    python examples/chat_rows.py ./Llama-3.2-1B-Instruct conversations.jsonl rows.jsonl
    runner launch ./packed -- --data rows.jsonl --tokenized

Each line is {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}. It is done once
and offline, so that what is trained on can be read. Rendered up to each answer and after it, the text differs by that
answer, whose tokens count.
"""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def rows(folder: Path, conversations: Path, out: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def render(messages: list[dict[str, Any]], is_before_answer: bool) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_before_answer))

    with conversations.open() as lines, out.open("w") as file:
        for line in lines:
            messages, text = json.loads(line)["messages"], ""
            answers = list[range]()
            for number, message in enumerate(messages):
                if message["role"] == "assistant":
                    prompt, answered = render(messages[:number], True), render(messages[: number + 1], False)
                    if not (prompt.startswith(text) and answered.startswith(prompt)):
                        raise ValueError("this template changes earlier text when a message is added")
                    answers.append(range(len(prompt), len(answered)))
                    text = answered
            # As one text: of a part, some tokenizers would begin with a space.
            tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            mask = [int(any(begin in answer for answer in answers)) for begin, _ in tokens["offset_mapping"]]
            file.write(json.dumps({"input_ids": tokens["input_ids"], "loss_mask": mask}) + "\n")


if __name__ == "__main__":
    rows(*map(Path, sys.argv[1:]))
