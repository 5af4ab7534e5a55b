"""Generate text with a packed model, token by token through the pipeline."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from manifests.errors import UsageError
from manifests.models import ConfigReader
from manifests.probe import print_result
from manifests.store import read_config
from runner.bundle.packed import Packed, open_packed
from runner.config.schema import BatchOptions
from runner.data.framing import encode, load_tokenizer, prompt_frame
from runner.distributed.fail_together import alone, together
from runner.distributed.rank_process import run_rank
from runner.distributed.world import World
from runner.evaluation.command import GenerateOptions, Sampling, parse_generate
from runner.evaluation.reader import ReadModel, meet, read_model
from runner.evaluation.sampling import draw, generators_of
from runner.models.decoders import DECODERS
from runner.models.family import Family

__all__ = ["Completion", "complete", "completions_of", "generate", "main", "stop_tokens"]

_SHORTEST = 64  # sequences are padded to so many tokens at first


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The ids of a prompt and those generated after it; with `eos`, the last one ended the text."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    stopped: Literal["eos", "length"]


def generate(options: GenerateOptions, world: World) -> None:
    """Print what a manifest's model generates after each prompt; every rank calls this."""
    root, manifest, device = meet(options.read, world)
    started_s = time.perf_counter()
    with together("manifest"):
        packed = open_packed(root, manifest)
    found, tokenizer = completions_of(options, packed, world, device)
    if world.rank == 0:
        _print(found, tokenizer, time.perf_counter() - started_s, is_json=options.read.is_json)


def completions_of(
    options: GenerateOptions, packed: Packed, world: World, device: torch.device
) -> tuple[tuple[Completion, ...], Tokenizer | None]:
    """Return what a model generates after each prompt, texts first, and its tokenizer."""
    root = packed.root
    with together("prompt"):
        tokenizer = load_tokenizer(root) if options.prompts or (root / "tokenizer.json").exists() else None
        prompts = [*_encode(root, tokenizer, options), *options.tokens]
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
    """Continue each prompt for so many tokens, or up to the first of `stops`; the same on every rank.

    For every token all unfinished sequences run through the pipeline, padded on the right to a length that doubles: a
    causal model ignores the padding, and stages see few shapes. Where RoPE frequencies depend on the length, sequences
    are padded, and grouped, by `Family.padded_length`. Only the rank of the last stage has the logits; it samples, and
    broadcasts the tokens.
    """
    rows, generators = [list(prompt) for prompt in prompts], generators_of(sampling, len(prompts))
    done = [False] * len(rows)
    most = max(map(len, prompts)) + max_new_tokens
    for _ in range(max_new_tokens):
        drawn = torch.zeros(len(rows), dtype=torch.int64)
        for numbers, seq_len in _alike(model.family, rows, done, most):
            cut = BatchOptions(global_batch=len(numbers), microbatch=1, seq_len=seq_len)
            tokens = _filled_up([rows[number] for number in numbers], seq_len) if model.schedule.has_first else None
            logits = model.schedule.logits(tokens, cut)
            if logits is not None:
                for found, number in zip(logits, numbers, strict=True):
                    with alone(model.last_rank):
                        last = found[len(rows[number]) - 1].float().cpu()
                        drawn[number] = draw(last, sampling, generators[number])
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
    """Return the ids that end a text, as in `transformers`: from generation_config.json, or from config.json."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        found = read_config(file).get("eos_token_id") if file.exists() else None
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


def main() -> None:
    words = sys.argv[1:]
    run_rank(
        lambda world: generate(parse_generate(words), world), is_json="--json" in words, is_quiet="--quiet" in words
    )


def _encode(folder: Path, tokenizer: Tokenizer | None, options: GenerateOptions) -> list[tuple[int, ...]]:
    """Return the ids of prompts; see Note [Framing]."""
    if tokenizer is None:
        return []
    frame = prompt_frame(folder, tokenizer, options.framing)
    return [frame.around(encode(tokenizer, prompt, "--prompt")) for prompt in options.prompts]


def _check_prompts(prompts: Sequence[Sequence[int]], longest: int, packed: Packed) -> None:
    if not all(prompts):
        raise UsageError("--prompt", "expected a text of at least one token, found none", code="data.empty-prompt")
    vocab_size = packed.config.get("vocab_size")
    highest = max(max(prompt) for prompt in prompts)
    if isinstance(vocab_size, int) and highest >= vocab_size:
        raise UsageError(
            "--tokens", f"{highest} is beyond the model's vocabulary of {vocab_size}", code="data.outside-vocabulary"
        )
    limit = packed.config.get("max_position_embeddings")
    decoder = DECODERS.get(packed.shape.architecture)
    if decoder is not None and decoder.length is not None:
        limit = decoder.positions_in(ConfigReader(packed.config, "config.json"))
    if isinstance(limit, int) and longest > limit:
        raise UsageError(
            "--max-new-tokens",
            f"expected at most the model's {limit} tokens, found {longest} with the longest prompt",
            f"use at most {limit - max(map(len, prompts))}",
            code="options.too-many-tokens",
        )


def _alike(
    family: Family, rows: Sequence[Sequence[int]], done: Sequence[bool], most: int
) -> Iterator[tuple[list[int], int]]:
    """Yield the numbers of unfinished rows that can be padded to one length, and that length."""
    groups: dict[int, list[int]] = {}
    for number, (row, is_done) in enumerate(zip(rows, done, strict=True)):
        if not is_done:
            groups.setdefault(family.padded_length(len(row), most), []).append(number)
    for longest, numbers in groups.items():
        length = max(len(rows[number]) for number in numbers)
        yield numbers, min(longest, max(_SHORTEST, 1 << (length - 1).bit_length()))


def _filled_up(rows: Sequence[Sequence[int]], seq_len: int) -> torch.Tensor:
    """Return rows as tokens (B, L), padded with 0."""
    tokens = torch.zeros(len(rows), seq_len, dtype=torch.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
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
        print_result(json.dumps({"version": 1, "completions": completions, "seconds": took_s}))
        return
    for one, text in zip(found, texts, strict=True):
        print_result(text if text is not None else ",".join(map(str, (*one.prompt, *one.tokens))))


if __name__ == "__main__":
    main()
