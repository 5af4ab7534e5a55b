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

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer


def rows(folder: Path, conversations: Path, out: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(config["chat_template"])

    def render(messages: list[dict[str, Any]], is_before_answer: bool) -> str:
        special = {name: config.get(name) for name in ("bos_token", "eos_token")}
        special = {name: token["content"] if isinstance(token, dict) else token for name, token in special.items()}
        return template.render(messages=messages, add_generation_prompt=is_before_answer, **special)

    with conversations.open() as lines, out.open("w") as file:
        for line in lines:
            messages, ids, mask, begin = json.loads(line)["messages"], [], [], ""
            for number, message in enumerate(messages):
                if message["role"] == "assistant":
                    for end, counts in (
                        (render(messages[:number], True), 0),
                        (render(messages[: number + 1], False), 1),
                    ):
                        if not end.startswith(begin):
                            raise ValueError("this template changes earlier text when a message is added")
                        part = tokenizer.encode(end[len(begin) :], add_special_tokens=False).ids
                        ids, mask, begin = ids + part, mask + [counts] * len(part), end
            file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")


if __name__ == "__main__":
    rows(*map(Path, sys.argv[1:]))
