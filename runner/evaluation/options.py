"""The flags of `runner eval`: read by the command that starts the ranks, and again by each rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from manifests.errors import UsageError
from runner.config.declared import WholeNumber
from runner.config.flags import Device
from runner.config.schema import SYNTHETIC, DataOptions, Dtype, FramingOptions

PLAIN = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}
_Function = TypeVar("_Function", bound=Callable[..., Any])
_FLAGS = [
    click.argument("manifest", type=click.Path(path_type=Path)),
    click.option(
        "--data",
        type=click.Path(),
        multiple=True,
        required=True,
        metavar="PATH",
        help="Text: .txt, .jsonl or .parquet files, folders or globs of them. May be repeated.",
    ),
    click.option("--text-field", default="text", help="Field or column with the text."),
    click.option(
        "--pack/--no-pack",
        default=True,
        help="Pack documents end to end, or use one padded document per sequence, truncated at --seq-len.",
    ),
    click.option("--seq-len", type=WholeNumber(min=1), default=512, help="Tokens in a sequence."),
    click.option("--microbatch", type=WholeNumber(min=1), default=1, help="Sequences per microbatch."),
    click.option(
        "--add-eos-token/--no-add-eos-token",
        default=None,
        show_default="add",
        help="End every document with the EOS token.",
    ),
    click.option("--skip-bad-documents", is_flag=True, help="Skip and count documents that are not text."),
    click.option("--dtype", type=click.Choice(get_args(Dtype)), default="fp32", help="Dtype to compute in."),
    click.option("--device", type=click.Choice(get_args(Device)), default="auto", help="Device to compute on."),
    click.option("--timeout", type=WholeNumber(min=1), default=600, help="Seconds to wait for another rank."),
    click.option("--json", "is_json", is_flag=True, help="Print one JSON object."),
    click.option(
        "--add-bos-token/--no-add-bos-token",
        default=None,
        show_default="as the tokenizer does",
        help="Start every text with the BOS token.",
    ),
    click.option(
        "--self-check/--no-self-check",
        default=True,
        help="First compare a tiny model of the config, whole and in stages, if it is trained by the catalogue.",
    ),
    click.option("--quiet", "is_quiet", is_flag=True, help="Print only errors and the result."),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """The model to read, its device and dtype, and the form of the result."""

    manifest: Path
    dtype: Dtype
    device: Device
    timeout_s: int
    is_json: bool
    is_quiet: bool
    self_check: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """The text to evaluate on, in sequences of `seq_len` tokens, `microbatch` at a time."""

    read: ReadOptions
    data: DataOptions
    seq_len: int
    microbatch: int


def parse_eval(args: Sequence[str]) -> EvalOptions:
    """Read what follows `runner eval`.

    Raises:
        UsageError: an unknown flag, a value of the wrong kind, or conflicting values.
    """
    command = click.command("eval", context_settings=PLAIN)(with_flags(lambda **values: values))
    return eval_options(**_read_flags(command, "runner eval", args))


def with_flags(function: _Function) -> _Function:
    """Return a command with the flags of `runner eval`, in the order of its help."""
    for flag in reversed(_FLAGS):
        function = flag(function)
    return function


def _read_flags(command: click.Command, name: str, args: Sequence[str]) -> dict[str, Any]:
    try:
        with command.make_context(name, list(args)) as context:
            return dict(context.params)
    except click.exceptions.Exit as done:  # --help was shown
        sys.exit(done.exit_code)
    except click.UsageError as error:
        raise UsageError(
            name, error.format_message(), f"list the flags with {name} --help", code="usage.arguments"
        ) from error


def eval_options(
    *, data: tuple[str, ...], text_field: str, pack: bool, seq_len: int, microbatch: int, skip_bad_documents: bool,
    add_bos_token: bool | None, add_eos_token: bool | None, **read: Any,
) -> EvalOptions:  # fmt: skip
    if SYNTHETIC in data:
        problem = f"expected files, found {SYNTHETIC}, which is endless"
        raise UsageError("--data", problem, "choose files to evaluate on", code="options.synthetic")
    return EvalOptions(
        read=_read_options(**read),
        data=DataOptions(
            sources=data,
            text_field=text_field,
            pack=pack,
            skip_bad_documents=skip_bad_documents,
            framing=FramingOptions(bos=add_bos_token, eos=add_eos_token),
        ),
        seq_len=seq_len,
        microbatch=microbatch,
    )


def _read_options(
    *, manifest: Path, dtype: Dtype, device: Device, timeout: int, is_json: bool, is_quiet: bool,
    self_check: bool,
) -> ReadOptions:  # fmt: skip
    return ReadOptions(
        manifest=manifest, dtype=dtype, device=device, timeout_s=timeout, is_json=is_json, is_quiet=is_quiet,
        self_check=self_check,
    )  # fmt: skip
