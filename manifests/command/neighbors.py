"""What other tools call a flag or a verb, and what it is here; and the refusal of a word that is neither."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from manifests.errors import UsageError


def _by_word(answers: Mapping[str, str]) -> dict[str, str]:
    """Return an answer for each word; those that have the same are given as one text."""
    return {word: answer for words, answer in answers.items() for word in words.split()}


_DEGREES = {
    "--dp": "--dp-replicate N (copies), or --dp-shard N (FSDP)",
    "--fsdp --zero --deepspeed": "--dp-shard N, or auto",
    "--tensor-parallel-size --tensor-model-parallel-size": "--tp N",
    "--expert-parallel-size --expert-model-parallel-size": "--ep N",
}
_TRAINING = _by_word({
    "--bf16": "--dtype bf16; with --master-dtype fp32 for mixed precision",
    "--fp16": "--dtype bf16 (or fp32)",
    "--mixed-precision --precision": "--dtype bf16 --master-dtype fp32",
    "--torch-dtype": "--dtype bf16, or fp32",
    "--batch-size": "--global-batch SEQUENCES (of a step), and --microbatch SEQUENCES",
    "--global-batch-size --train-batch-size": "--global-batch SEQUENCES",
    "--micro-batch-size --per-device-train-batch-size": "--microbatch SEQUENCES",
    "--gradient-accumulation-steps --grad-accum": "--global-batch SEQUENCES: microbatches follow from --microbatch",
    "--learning-rate": "--lr RATE",
    "--epochs --num-epochs --num-train-epochs": "--steps N: data starts again when it ends",
    "--max-steps --train-iters": "--steps N",
    "--gradient-checkpointing --activation-checkpointing --recompute-granularity":
        "--ac full, selective or N (every Nth layer)",
    "--output-dir": "--checkpoint DIR (to resume from), --save DIR (the trained weights), --log-dir DIR",
    "--checkpoint-dir": "--checkpoint DIR",
    "--save-interval --save-steps --save-every": "--checkpoint-every N",
    "--save-total-limit": "--keep N",
    "--resume-from-checkpoint": "--resume auto, step-N or DIR",
    "--load": "--resume DIR, or --checkpoint DIR --resume auto for the run's own; --loading rows or broadcast",
    "--pack": "--packing",
    "--no-pack": "--no-packing",
    "--host-memory": "--allocator auto, fast or compact",
    "--logging-steps --log-interval": "--log-every N",
    "--report-to": "--wandb, or --tensorboard",
    "--wandb-project": "--wandb: the variable WANDB_PROJECT names the project",
    "--seq-length --max-length --max-seq-length --block-size": "--seq-len TOKENS",
    "--clip-grad --max-grad-norm": "--max-norm NORM",
    "--warmup-ratio --num-warmup-steps --lr-warmup-iters": "--warmup-steps N",
    "--lr-scheduler --lr-scheduler-type --lr-decay-style": "--decay constant, linear, cosine or sqrt",
    "--adam-beta1": "--beta1 NUMBER",
    "--adam-beta2": "--beta2 NUMBER",
    "--adam-epsilon": "--eps NUMBER",
    "--dataset --data-path --train-file": "--data PATH",
    "--validation-file": "--eval-data PATH",
    "--tokenizer": "the packed folder's own, which --data is read with",
    "--torch-compile": "--compile",
    "--implementation": "transformers' modules, which all models are built of: leave it out",
    "--pp --pipeline-parallel-size --pipeline-model-parallel-size":
        "the pipeline ranks of the packed layout: reshard pack MODEL --layout pp=N",
    "--context-parallel-size": "--cp N",
    **_DEGREES,
})  # fmt: skip
_LAUNCHING = _by_word(
    {
        "--gpus --num-gpus --num-processes": "--nproc-per-node N, before --",
        "--num-nodes": "--nnodes N, before --",
    }
)
_PACKING = _by_word({
    "--bf16": "--dtype bf16",
    "--fp16": "--dtype fp16; to train, bf16 or fp32",
    "--output --output-dir --save-dir": "--out DIR",
    "--overwrite": "--force",
    "--memory": "--io-memory SIZE; of a GPU: --gpu-memory SIZE in reshard plan",
    "--host-memory": "--allocator fast or compact",
    "--torch-dtype": "--dtype bf16, fp16 or fp32",
    "--format": "--to FORMAT, of reshard export",
    "--num-stages --pipeline-parallel-size --pipeline-model-parallel-size": "--layout pp=N",
    "--virtual-pipeline-model-parallel-size": "--layout pp=N,vpp=K",
    "--num-gpus": "--gpus N",
    "--batch-size": "--microbatch SEQUENCES, or --global-batch SEQUENCES with --gpus",
    "--micro-batch-size": "--microbatch SEQUENCES",
    "--seq-length": "--seq-len TOKENS",
    "--gradient-checkpointing": "--ac full, selective or N (every Nth layer)",
    **_DEGREES,
})  # fmt: skip
_VERBS = _by_word({
    **{verb: f"runner {verb}" for verb in ("status", "logs", "list", "cancel", "measure", "report", "eval", "prove")},
    **{verb: f"reshard {verb}" for verb in ("check", "verify", "diff", "inspect", "layout", "commit", "push", "sign")},
    "convert": "reshard export MANIFEST --to hf (or another format), or reshard pack SOURCE --layout SPEC",
    "info show": "reshard inspect",
    "split shard pack": "reshard pack SOURCE --layout pp=N --out DIR",
    "reshard": "reshard pack MANIFEST --layout pp=N --out DIR",
    "compare": "reshard diff",
    "validate": "reshard verify (a packed model), or reshard check (any checkpoint)",
    "upload": "reshard push",
    "train launch run start": "runner launch MANIFEST -- --data PATH --steps N",
    "export": "reshard export MANIFEST --to hf --out DIR",
    "merge": "reshard merge BASE ADAPTER --out DIR",
    "resume": "runner launch MANIFEST -- --data PATH --checkpoint DIR --resume auto",
    "evaluate": "runner eval",
    "stop kill": "runner cancel",
    "ps": "runner status",
    "profile": "runner measure; or runner launch MANIFEST -- --trace A-B",
    "plan": "reshard plan MODEL --layout pp=N",
})  # fmt: skip
_VALUES = {"gpu": "cuda", "fp16": "bf16", "half": "bf16", "safetensors": "hf", "huggingface": "hf"}
_NO_VALUE = {"vllm": "vLLM reads a packed folder as it is"}  # of --to, which had it once
DTYPES: Mapping[str, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
NEIGHBORS: Mapping[str, Mapping[str, str]] = {
    "reshard": {**_TRAINING, **_PACKING, **_VERBS},
    "runner": {**_TRAINING, **_LAUNCHING, **_VERBS},
}
# What to add where a parameter is missing: of a command, or of all that have it.
_REQUIRED = {
    "reshard plan --layout": "add --layout pp=2, or --gpus N --gpu-memory 80GB to search for the fastest layouts",
    "--layout": "add --layout pp=2 (see docs/layouts.md); reshard plan SOURCE --gpus N --gpu-memory 80GB finds one",
    "--out": "add --out and a folder, or a file, to write",
    "--to": "add --to hf, or another of the formats",
    "--data": "add --data and a text, .jsonl or .parquet file, or a folder of them; or --data synthetic",
    "--layers": "add --layers and the number of decoder layers",
    "SOURCE": "name a Hugging Face folder, a packed folder or a hub repository, such as ./Llama-3.2-1B",
    "MANIFEST": "name a packed folder, such as ./Llama-3.2-1B-pp2",
    "B": "name two checkpoints: reshard diff A B",
    "ADAPTER...": "name a PEFT folder, such as runner launch --save writes with --lora-rank",
    "--key": "add --key and the file of a private key (docs/signing.md)",
    "ORG/NAME": "name the repository on the hub: reshard push MANIFEST my-org/my-model",
}
# What an argument too many is for, if it is not written for another parameter.
_EXTRA = {
    "reshard plan": "a layout follows --layout, such as --layout pp=2",
    "reshard pack": "the output follows --out, and a layout --layout",
    "reshard export": "the output follows --out",
    "reshard verify": "--against SOURCE compares with another checkpoint; so does reshard diff A B",
    "runner eval": "text follows --data",
    "runner launch": "training data follows --: runner launch MANIFEST -- --data PATH",
    "runner launch MANIFEST --": "training data follows --data",
}
_DASHES, _QUOTES = "\u2010\u2011\u2012\u2013\u2014\u2212", "\u2018\u2019\u201c\u201d"
_CLOSE = 0.65  # similarity of words that may be meant


def usage_error(error: Any, where: str = "") -> UsageError:
    """Return the error of a click exception; of an unknown word, with the word that is meant here, or is close.

    Args:
        error: click's UsageError. click is not a dependency of this package.
        where: what is named where the error is about no word and no parameter.
    """
    context = getattr(error, "ctx", None)
    path = context.command_path if context else ""
    see = f"{path} --help"
    word = getattr(error, "option_name", None) or getattr(error, "command_name", None) or _parameter(error)
    if not hasattr(error, "possibilities"):  # it knows the word
        problem = (error.message if word else error.format_message()).removeprefix(f"Option {word!r} ").rstrip(".")
        if not problem or problem == "requires an argument":
            return missing(path, word or where, "expects a value" if problem else "is required")
        problem, place, _ = problem.partition(" (the job file)")
        problem, hint = _in_our_words(problem, path)
        return UsageError(
            word or where, problem + place, hint or (f"see {see}" if path else ""), code="usage.arguments"
        )
    answer, kind = _answer(word, path, _known_words(context)), "an option" if word.startswith("-") else "a command"
    hint = f"{see} lists them"
    return UsageError(word, f"is not {kind} of {path}", f"{answer}; {hint}" if answer else hint, code="usage.arguments")


def missing(path: str, word: str, problem: str = "is required") -> UsageError:
    """Return the refusal of a command without one of its parameters."""
    hint = _REQUIRED.get(f"{path} {word}") or _REQUIRED.get(word) or (f"see {path} --help" if path else "")
    return UsageError(word, problem, hint, code="usage.arguments")


def _answer(word: str, path: str, words: set[str]) -> str:
    """Return what is said here for an unknown word: a neighbor's, or the closest ones."""
    plain, table = word.lower().replace("_", "-"), NEIGHBORS.get(path.split(" ")[0], {})
    if answer := table.get(plain):
        if not word.startswith("-"):
            return answer
        is_here = {*re.findall(r"--[a-z0-9-]+", answer)} <= words
        if path.startswith("runner launch") or is_here:
            return f"use {answer}" + (", after --" if path == "runner launch" and not is_here else "")
    is_flag = word.startswith("-")
    bare = {known.lstrip("-"): known for known in sorted(words) if known.startswith("-") >= is_flag}
    begun = [known for name, known in bare.items() if name.startswith(plain.lstrip("-"))]
    close = begun[:3] or [bare[name] for name in get_close_matches(plain.lstrip("-"), bare, n=3, cutoff=_CLOSE)]
    if not close and is_flag and " " not in path:
        return f"flags follow the command: {path} COMMAND {word}"
    if not close and plain not in table and (foreign := get_close_matches(plain, table, n=1, cutoff=0.85)):
        return _answer(foreign[0], path, words)
    return f"did you mean {' or '.join(close)}?" if close else ""


def plain_characters(text: str) -> str:
    """Return text as it is typed: web pages and word processors turn hyphens into dashes, and quotes into others."""
    text = re.sub(f"(?<!\\S)[{_DASHES}]-?(?=\\w)", "--", text)
    return unicodedata.normalize("NFKC", re.sub(f"[{_QUOTES}]", "", text))


def _in_our_words(problem: str, path: str) -> tuple[str, str]:
    """Return a sentence of click's about a value as this project says it, and a hint if there is one."""
    if match := re.fullmatch(r"('.*') is not one of ('.*')", problem):
        choices = re.findall(r"'([^']*)'", match[2])
        value = match[1].strip("'").lower()
        close = get_close_matches(_VALUES.get(value, value), choices, n=1)
        listed = f"{', '.join(choices[:-1])} or {choices[-1]}" if len(choices) > 1 else choices[0]
        hint = _NO_VALUE.get(value) or (f"did you mean {close[0]}?" if close else "")
        return f"expected {listed}, found {match[1]}", hint
    if match := re.fullmatch(r"('.*') is not a valid (integer|number|float)", problem):
        whole = re.fullmatch(r"'(\d+(?:,\d{3})+|\d+\.0+|\d+e\d)'", match[1])  # 1,000 or 1e3
        hint = f"write {float(whole[1].replace(',', '')):.0f}" if whole and match[2] == "integer" else ""
        return f"expected a {'whole ' * (match[2] == 'integer')}number, found {match[1]}", hint
    if match := re.fullmatch(r"(.*) is not in the range (.*)", problem):
        limits = re.sub(r"(.+)<x<=(.+)", r"more than \1, up to \2", match[2])
        limits = re.sub(r"(.+)<=x<=(.+)", r"\1 to \2", re.sub(r"(.+)<=x<(?!=)(.+)", r"from \1 to below \2", limits))
        limits = re.sub(r"x>=(.+)", r"\1 or more", re.sub(r"x>(?!=)(.+)", r"more than \1", limits))
        return f"expected {limits}, found {match[1]}", ""
    if match := re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", problem):
        typed = plain_characters(match[1])
        return f"unexpected: {match[1]}", f"type {typed}" if typed != match[1] else _EXTRA.get(path, "")
    return problem, ""


def _known_words(context: Any) -> set[str]:
    """Return the options of a click command and, of a group, its commands."""
    command = context.command
    flags = {flag for param in command.get_params(context) for flag in (*param.opts, *param.secondary_opts)}
    return {*flags, *(command.list_commands(context) if hasattr(command, "list_commands") else ())}


def _parameter(error: Any) -> str:
    """Return the flag or the argument that a click exception is about, if it is about one."""
    parameter = getattr(error, "param", None)
    if parameter is None:
        return ""
    name: str = parameter.opts[0] if parameter.param_type_name == "option" else parameter.human_readable_name
    return name
