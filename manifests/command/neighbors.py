"""What other tools call a flag or a verb, and what it is here; and the refusal of a word that is neither."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from manifests.errors import UsageError

_LAYOUT = "the pipeline ranks of the packed layout: reshard pack MODEL --layout pp=N"
_DEGREES = {
    "--dp": "--dp-replicate N (copies), or --dp-shard N (FSDP)",
    "--fsdp": "--dp-shard N, or auto",
    "--tensor-parallel-size": "--tp N",
    "--tensor-model-parallel-size": "--tp N",
    "--expert-parallel-size": "--ep N",
    "--expert-model-parallel-size": "--ep N",
}
_TRAINING = {
    "--bf16": "--dtype bf16; with --master-dtype fp32 for mixed precision",
    "--fp16": "--dtype bf16 (or fp32)",
    "--mixed-precision": "--dtype bf16 --master-dtype fp32",
    "--torch-dtype": "--dtype bf16, or fp32",
    "--batch-size": "--global-batch SEQUENCES (of a step), and --microbatch SEQUENCES",
    "--global-batch-size": "--global-batch SEQUENCES",
    "--train-batch-size": "--global-batch SEQUENCES",
    "--micro-batch-size": "--microbatch SEQUENCES",
    "--per-device-train-batch-size": "--microbatch SEQUENCES",
    "--gradient-accumulation-steps": "--global-batch SEQUENCES: microbatches follow from --microbatch",
    "--learning-rate": "--lr RATE",
    "--epochs": "--steps N: data starts again when it ends",
    "--num-epochs": "--steps N: data starts again when it ends",
    "--num-train-epochs": "--steps N: data starts again when it ends",
    "--max-steps": "--steps N",
    "--train-iters": "--steps N",
    "--gradient-checkpointing": "--ac full, selective or N (every Nth layer)",
    "--activation-checkpointing": "--ac full, selective or N (every Nth layer)",
    "--recompute-granularity": "--ac full, selective or N (every Nth layer)",
    "--output-dir": "--checkpoint DIR (to resume from), --save DIR (the trained weights), --log-dir DIR",
    "--checkpoint-dir": "--checkpoint DIR",
    "--save-interval": "--checkpoint-every N",
    "--save-steps": "--checkpoint-every N",
    "--save-total-limit": "--keep N",
    "--resume-from-checkpoint": "--resume auto, step-N or DIR",
    "--logging-steps": "--log-every N",
    "--seq-length": "--seq-len TOKENS",
    "--max-length": "--seq-len TOKENS",
    "--max-seq-length": "--seq-len TOKENS",
    "--block-size": "--seq-len TOKENS",
    "--clip-grad": "--max-norm NORM",
    "--max-grad-norm": "--max-norm NORM",
    "--warmup-ratio": "--warmup-steps N",
    "--num-warmup-steps": "--warmup-steps N",
    "--lr-warmup-iters": "--warmup-steps N",
    "--lr-scheduler-type": "--decay constant, linear, cosine or sqrt",
    "--lr-decay-style": "--decay constant, linear, cosine or sqrt",
    "--adam-beta1": "--beta1 NUMBER",
    "--adam-beta2": "--beta2 NUMBER",
    "--adam-epsilon": "--eps NUMBER",
    "--dataset": "--data PATH",
    "--data-path": "--data PATH",
    "--train-file": "--data PATH",
    "--validation-file": "--eval-data PATH",
    "--tokenizer": "the packed folder's own, which --data is read with",
    "--torch-compile": "--compile",
    "--pp": _LAYOUT,
    "--pipeline-parallel-size": _LAYOUT,
    "--pipeline-model-parallel-size": _LAYOUT,
    "--context-parallel-size": "--cp N",
    **_DEGREES,
}
_PACKING = {
    "--output": "--out DIR",
    "--output-dir": "--out DIR",
    "--save-dir": "--out DIR",
    "--overwrite": "--force",
    "--torch-dtype": "--dtype bf16, fp16 or fp32",
    "--format": "--to FORMAT, of reshard export",
    "--num-stages": "--layout pp=N",
    "--pipeline-parallel-size": "--layout pp=N",
    "--pipeline-model-parallel-size": "--layout pp=N",
    "--virtual-pipeline-model-parallel-size": "--layout pp=N,vpp=K",
    "--num-gpus": "--gpus N",
    "--batch-size": "--microbatch SEQUENCES, or --global-batch SEQUENCES with --gpus",
    "--micro-batch-size": "--microbatch SEQUENCES",
    "--seq-length": "--seq-len TOKENS",
    "--gradient-checkpointing": "--ac full, selective or N (every Nth layer)",
    **_DEGREES,
}
_RESHARD = {
    "convert": "reshard export MANIFEST --to hf (or another format), or reshard pack SOURCE --layout SPEC",
    "info": "reshard inspect",
    "show": "reshard inspect",
    "split": "reshard pack SOURCE --layout pp=N --out DIR",
    "shard": "reshard pack SOURCE --layout pp=N --out DIR",
    "reshard": "reshard pack MANIFEST --layout pp=N --out DIR",
    "compare": "reshard diff",
    "validate": "reshard verify (a packed model), or reshard check (any checkpoint)",
    "upload": "reshard push",
    "train": "runner launch MANIFEST -- --data PATH --steps N",
    "launch": "runner launch MANIFEST -- --data PATH --steps N",
}
_RUNNER = {
    "train": "runner launch MANIFEST -- --data PATH --steps N",
    "run": "runner launch MANIFEST -- --data PATH --steps N",
    "resume": "runner launch MANIFEST -- --data PATH --checkpoint DIR --resume auto",
    "evaluate": "runner eval",
    "stop": "runner cancel",
    "kill": "runner cancel",
    "ps": "runner status",
    "profile": "runner measure; or runner launch MANIFEST -- --trace A-B",
    "pack": "reshard pack SOURCE --layout pp=N --out DIR",
    "plan": "reshard plan MODEL --layout pp=N",
}
DTYPES: Mapping[str, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
NEIGHBORS: Mapping[str, Mapping[str, str]] = {
    "reshard": {**_PACKING, **_RESHARD},
    "runner": {**_TRAINING, **_RUNNER},
}


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
        hint = f"see {see}" if path else ""
        return UsageError(word or where, problem or "is required", hint, code="usage.arguments")
    words, kind = _known_words(context), "an option" if word.startswith("-") else "a command"
    answer = NEIGHBORS.get(path.split(" ")[0], {}).get(word.lower().replace("_", "-"))
    if answer is not None and kind == "an option":
        flags = {*re.findall(r"--[a-z0-9-]+", answer)}
        answer = f"use {answer}" if flags & words or path.startswith("runner launch") else None
    if answer is None and (close := get_close_matches(word, sorted(words), n=3)):
        answer = f"did you mean {' or '.join(close)}?"
    hint = f"{see} lists them"
    return UsageError(word, f"is not {kind} of {path}", f"{answer}; {hint}" if answer else hint, code="usage.arguments")


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
