"""What a packed model writes after a prompt, token by token through the pipeline."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from manifests.errors import UsageError
from manifests.jsontext import parse_json_object
from manifests.models import ConfigReader
from manifests.store import read_small_file
from runner.data.vocabulary import load_tokenizer
from runner.families.decoders import DECODERS
from runner.life.rank import run_rank
from runner.life.together import alone, together
from runner.life.world import World
from runner.loading.packed import Packed, open_packed
from runner.reading.reader import ReadModel, meet, read_model
from runner.reading.sampling import draw, generators_of
from runner.reading.verbs import GenerateOptions, Sampling, parse_generate
from runner.recipe import BatchOptions

__all__ = ["Completion", "complete", "completions_of", "generate", "main", "stop_tokens"]

_SHORTEST = 64  # tokens to which sequences are filled up at first


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The ids of a prompt and those written after it; with `eos`, the last one ended the text."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    stopped: Literal["eos", "length"]


def generate(options: GenerateOptions, world: World) -> None:
    """Print what a manifest's model writes after each prompt; every rank calls this."""
    root, device = meet(options.read, world)
    started_s = time.perf_counter()
    found, tokenizer = completions_of(options, root, world, device)
    if world.rank == 0:
        _print(found, tokenizer, time.perf_counter() - started_s, is_json=options.read.is_json)


def completions_of(
    options: GenerateOptions, root: Path, world: World, device: torch.device
) -> tuple[tuple[Completion, ...], Tokenizer | None]:
    """Give what the model in `root` writes after each prompt, texts first, and its tokenizer; the ranks have met."""
    with together("prompt"):
        packed = open_packed(root)
        tokenizer = load_tokenizer(root) if options.prompts or (root / "tokenizer.json").exists() else None
        prompts = [*_encode(tokenizer, options.prompts), *options.tokens]
        longest = max(map(len, prompts)) + options.max_new_tokens
        _check_prompts(prompts, longest, packed)
        stops = stop_tokens(root)
    model = read_model(packed, options.read, world, device, max_seq_len=longest)
    found = complete(model, prompts, options.sampling, max_new_tokens=options.max_new_tokens, stops=stops)
    return found, tokenizer


def complete(
    model: ReadModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    stops: frozenset[int] = frozenset(),
) -> tuple[Completion, ...]:
    """Go on from each prompt for so many tokens, or up to the first of `stops`; the same on every rank.

    Every token takes all sequences through the pipeline anew, filled up on the right to a length that
    doubles: a causal model does not look there, and stages meet few shapes. Only the last stage's rank
    knows the logits; it draws, and tells the others.
    """
    rows, generators = [list(prompt) for prompt in prompts], generators_of(sampling, len(prompts))
    done = [False] * len(rows)
    seq_len, final_len = 0, max(map(len, prompts)) + max_new_tokens
    for _ in range(max_new_tokens):
        longest = max(len(row) for row, is_done in zip(rows, done, strict=True) if not is_done)
        if longest > seq_len:
            seq_len = min(final_len, max(_SHORTEST, 1 << (longest - 1).bit_length()))
            cut = BatchOptions(global_batch=len(rows), microbatch=1, seq_len=seq_len)
        tokens = _filled_up(rows, seq_len) if model.schedule.has_first else None
        logits = model.schedule.logits(tokens, cut)
        drawn = torch.zeros(len(rows), dtype=torch.int64)
        if logits is not None:
            for number, (row, generator) in enumerate(zip(rows, generators, strict=True)):
                last = min(len(row), seq_len) - 1
                with alone(model.last_rank):
                    drawn[number] = draw(logits[number, last].float().cpu(), sampling, generator)
        dist.broadcast(drawn, src=model.last_rank)
        for number, token in enumerate(drawn.tolist()):
            if not done[number]:
                rows[number].append(token)
                done[number] = token in stops
        if all(done):
            break
    return tuple(
        Completion(prompt=tuple(prompt), tokens=tuple(row[len(prompt) :]), stopped="eos" if is_done else "length")
        for prompt, row, is_done in zip(prompts, rows, done, strict=True)
    )


def stop_tokens(folder: Path) -> frozenset[int]:
    """Give the ids that end a text, as `transformers` knows them: of generation_config.json, or of config.json."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        found = parse_json_object(read_small_file(file), str(file)).get("eos_token_id") if file.exists() else None
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


def main() -> None:
    run_rank(lambda world: generate(parse_generate(sys.argv[1:]), world), is_json="--json" in sys.argv)


def _encode(tokenizer: Tokenizer | None, prompts: Iterable[str]) -> list[tuple[int, ...]]:
    """Give ids as `transformers` does: with what the tokenizer puts before and after a text."""
    return [tuple(tokenizer.encode(prompt).ids) for prompt in prompts] if tokenizer else []


def _check_prompts(prompts: Sequence[Sequence[int]], longest: int, packed: Packed) -> None:
    if not all(prompts):
        raise UsageError("--prompt", "its tokenizer gives it no tokens")
    vocab_size = packed.config.get("vocab_size")
    highest = max(max(prompt) for prompt in prompts)
    if isinstance(vocab_size, int) and highest >= vocab_size:
        raise UsageError("--tokens", f"{highest} is beyond the model's vocabulary of {vocab_size}")
    limit = packed.config.get("max_position_embeddings")
    decoder = DECODERS.get(packed.shape.architecture)
    if decoder is not None and decoder.length is not None:
        limit = decoder.positions_in(ConfigReader(packed.config, "config.json"))
    if isinstance(limit, int) and longest > limit:
        raise UsageError(
            "--max-new-tokens",
            f"the model was made for {limit} tokens, and the longest prompt and these are {longest}",
            f"take at most {limit - max(map(len, prompts))}",
        )


def _filled_up(rows: Sequence[Sequence[int]], seq_len: int) -> torch.Tensor:
    """Give rows as tokens (B, L); what they lack is 0, and finished rows are cut."""
    tokens = torch.zeros(len(rows), seq_len, dtype=torch.int64)
    for number, row in enumerate(rows):
        kept = row[:seq_len]
        tokens[number, : len(kept)] = torch.tensor(kept)
    return tokens


def _print(found: Sequence[Completion], tokenizer: Tokenizer | None, took_s: float, *, is_json: bool) -> None:
    texts = [
        tokenizer.decode([*one.prompt, *one.tokens], skip_special_tokens=True) if tokenizer else None for one in found
    ]
    if is_json:
        completions = [
            {"prompt_tokens": one.prompt, "tokens": one.tokens, "stopped": one.stopped, "text": text}
            for one, text in zip(found, texts, strict=True)
        ]
        print(json.dumps({"version": 1, "completions": completions, "seconds": took_s}), flush=True)
        return
    for one, text in zip(found, texts, strict=True):
        print(text if text is not None else ",".join(map(str, (*one.prompt, *one.tokens))), flush=True)


if __name__ == "__main__":
    main()
