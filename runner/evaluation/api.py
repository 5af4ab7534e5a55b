"""`runner.evaluate`: what `runner eval` prints, in Python. No torch."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.command.interpreter import module_command
from manifests.errors import RankError, UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The mean loss of a model over the tokens of a text."""

    loss: float
    perplexity: float
    num_tokens: int
    seconds: float
    skipped_documents: int = 0


def evaluate(
    manifest: str | Path,
    data: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    flags: Sequence[str] = (),
    **options: str | int | Path | None,
) -> Evaluation:
    """Evaluate a packed model on ranks of this machine, as `runner eval` does.

    `data` are files, folders or globs. `out` is a Parquet file with the loss of each token. Other `options` are those
    of the command, such as `seq_len=2048`, `dtype="bf16"` or `top_k=5`; `flags` are written as there, such as
    `["--tokenized", "--force"]`.

    Raises:
        UserError: as the command prints it.

    Example:
        >>> runner.evaluate("model-pp2", "held-out.jsonl", seq_len=2048, out="scores.parquet").num_tokens
        81920
    """
    sources = data if isinstance(data, Iterable) and not isinstance(data, str) else (data,)
    words = [str(manifest), *(word for source in sources for word in ("--data", str(source)))]
    for name, value in {"out": out, **options}.items():
        word = name.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{word}" if value else f"--no-{word}"]
        else:
            words += [] if value is None else [f"--{word}", str(value)]
    command = module_command("runner.cli", "eval", *words, *flags, "--quiet", "--json")
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        problem = f"exited with code {done.returncode}: {reason}"
        raise RankError("runner eval", problem, code="rank.ended") from error
    if "error" in answer:
        failure = answer["error"]
        raise UserError(failure["where"], failure["problem"], failure.get("hint") or "", code=failure["code"])
    del answer["version"]
    return Evaluation(**answer)
