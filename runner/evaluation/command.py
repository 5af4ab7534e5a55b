"""The flags of `runner eval` and `runner generate`, read by the launcher and by every rank. No torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from manifests.console import utf8_argument
from manifests.errors import UsageError
from manifests.probe import check_stdout
from manifests.store import find_manifest, read_manifest
from runner.bundle.packed import check_tokenizer, open_packed
from runner.config.architectures import check_trainable
from runner.config.declared import Whole
from runner.config.flags import Device
from runner.config.schema import SYNTHETIC, DataOptions, Dtype, FramingOptions
from runner.data.files import find_files
from runner.launch.local import launch_here
from runner.launch.preflight import check_model

__all__ = [
    "EvalOptions",
    "GenerateOptions",
    "ReadOptions",
    "Sampling",
    "eval_command",
    "generate_command",
    "parse_eval",
    "parse_generate",
]

_PLAIN = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}
_ARGS = "runner.args"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """Which model is read, where it computes, and how the result is shown."""

    manifest: Path
    dtype: Dtype
    device: Device
    timeout_s: int
    is_json: bool
    is_quiet: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """The text whose loss is wanted, and how it is cut: sequences of `seq_len` tokens, `microbatch` at a time."""

    read: ReadOptions
    data: DataOptions
    seq_len: int
    microbatch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is drawn; at temperature 0 it is the likeliest one.

    Raises:
        UsageError: a temperature that is no number, or a filter or a seed where nothing is drawn.
    """

    temperature: float = 0.0
    top_p: float = 1.0  # of the likeliest tokens, as many as it takes to have this share
    top_k: int = 0  # of the likeliest tokens, so many; 0: all
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature < math.inf:
            raise UsageError(
                "--temperature", f"expected a number from 0 up, found {self.temperature}", code="options.invalid-value"
            )
        if not self.temperature and (self.top_p < 1 or self.top_k or self.seed):
            flag = "--top-p" if self.top_p < 1 else "--top-k" if self.top_k else "--seed"
            raise UsageError(
                flag, "needs --temperature above 0: at 0 the likeliest token is taken", code="options.needs-temperature"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """Prompts to go on from, as text or as token ids, and for how long.

    Raises:
        UsageError: no prompt, or an empty one.
    """

    read: ReadOptions
    prompts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    sampling: Sampling
    framing: FramingOptions

    def __post_init__(self) -> None:
        if not self.prompts and not self.tokens:
            raise UsageError("--prompt", "expected a text, or --tokens with ids", code="options.no-prompt")
        if not all(self.prompts):
            raise UsageError("--prompt", "expected a text, found an empty one", code="options.no-prompt")


def parse_eval(args: Sequence[str]) -> EvalOptions:
    """Read what follows `runner eval`.

    Raises:
        UsageError: an unknown flag, a value of the wrong kind, or values that do not go together.
    """
    return _eval_options(**_read_flags(eval_command, "runner eval", args))


def parse_generate(args: Sequence[str]) -> GenerateOptions:
    """Read what follows `runner generate`; see `parse_eval`."""
    return _generate_options(**_read_flags(generate_command, "runner generate", args))


class _Verb(click.Command):
    """A command whose arguments are kept as they are written, for the ranks; `--` among them means nothing."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            args.remove("--")
        ctx.meta[_ARGS] = tuple(args)
        return super().parse_args(ctx, args)


C = TypeVar("C", bound=click.Command)


def _reading(command: C) -> C:
    """Add the flags that both commands have."""
    command.params += (
        click.Option(["--dtype"], type=click.Choice(get_args(Dtype)), default="fp32", help="Of the arithmetic."),
        click.Option(["--device"], type=click.Choice(get_args(Device)), default="auto"),
        click.Option(["--timeout"], type=Whole(min=1), default=600, help="Seconds to wait for another rank."),
        click.Option(["--json", "is_json"], is_flag=True, help="Print one JSON object."),
        click.Option(
            ["--add-bos-token/--no-add-bos-token"],
            default=None,
            show_default="as the tokenizer does",
            help="Begin every text with bos.",
        ),
        click.Option(["--quiet", "is_quiet"], is_flag=True, help="Print errors and the answer alone."),
        click.Option(["--dry-run"], is_flag=True, help="Print the command that starts the ranks, and stop."),
    )
    return command


@_reading
@click.command("eval", cls=_Verb, context_settings=_PLAIN)
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option(
    "--data", type=click.Path(), multiple=True, required=True, metavar="PATH",
    help="Text: .txt, .jsonl or .parquet files, folders or globs of them. May be repeated.",
)  # fmt: skip
@click.option("--text-field", default="text", help="Field or column that holds the text.")
@click.option(
    "--pack/--no-pack", default=True,
    help="Documents end to end, every token once, or one padded document a sequence, cut at --seq-len.",
)  # fmt: skip
@click.option("--seq-len", type=Whole(min=1), default=512, help="Tokens in a sequence.")
@click.option("--microbatch", type=Whole(min=1), default=1, help="Sequences in a stage at a time.")
@click.option(
    "--add-eos-token/--no-add-eos-token", default=None, show_default="add", help="End every document with eos."
)
@click.option("--skip-bad-documents", is_flag=True, help="Skip and count documents that are not text.")
@click.pass_context
def eval_command(context: click.Context, /, dry_run: bool, **values: Any) -> None:
    """Print the loss of MANIFEST's model over a text: the mean over all tokens, each predicted once.

    Starts one rank for each pipeline rank of the manifest, on this machine, under torchrun.

    \b
    Example:
      runner eval ./Llama-3.2-1B-pp2 --data held-out.jsonl --seq-len 2048
    """
    options = _eval_options(**values, dry_run=dry_run)
    _launch("runner.evaluation.evaluate", context, options.read, texts=options.data.sources, dry_run=dry_run)


@_reading
@click.command("generate", cls=_Verb, context_settings=_PLAIN)
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option("--prompt", multiple=True, metavar="TEXT", help="Text to go on from. May be repeated.")
@click.option("--tokens", multiple=True, metavar="1,2,3", help="Token ids to go on from; needs no tokenizer.")
@click.option("--max-new-tokens", type=Whole(min=1), default=32, help="Tokens to add, unless the text ends.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="Of the draw; 0: the likeliest token.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Draw from this share.")
@click.option("--top-k", type=Whole(min=0), default=0, help="Draw from so many tokens; 0: from all.")
@click.option("--seed", type=Whole(min=0), default=0, help="Of the draw; each prompt has its own.")
@click.option(
    "--add-eos-token/--no-add-eos-token", default=None, show_default="as the tokenizer does",
    help="End every prompt with eos.",
)  # fmt: skip
@click.pass_context
def generate_command(context: click.Context, /, dry_run: bool, **values: Any) -> None:
    """Print what MANIFEST's model writes after a prompt.

    A check of a packed model, not a server: no keys and values are kept, so that every token takes the
    whole sequence through the pipeline anew. Starts one rank for each pipeline rank of the manifest.

    \b
    Example:
      runner generate ./Llama-3.2-1B-pp2 --prompt "The capital of France is" --max-new-tokens 8
    """
    _launch("runner.evaluation.generate", context, _generate_options(**values, dry_run=dry_run).read, dry_run=dry_run)


def _launch(
    worker: str, context: click.Context, read: ReadOptions, *, texts: tuple[str, ...] = (), dry_run: bool
) -> None:
    path = find_manifest(read.manifest)
    manifest = read_manifest(path)
    check_trainable(manifest.model.architecture)
    check_model(open_packed(path.parent, manifest))
    check_stdout()
    if not dry_run:
        find_files(texts)
    if texts:
        check_tokenizer(path.parent)
    num_ranks = manifest.layout.num_ranks
    words = [word for word in context.meta[_ARGS] if word != "--dry-run"]  # of the launcher, which prints the command
    launch_here(words, nproc_per_node=num_ranks, dry_run=dry_run, worker=worker, quiet=read.is_quiet)


def _read_flags(command: click.Command, name: str, args: Sequence[str]) -> dict[str, Any]:
    try:
        with command.make_context(name, list(args)) as context:
            return dict(context.params)
    except click.exceptions.Exit as done:  # --help was asked for, and shown
        sys.exit(done.exit_code)
    except click.UsageError as error:
        raise UsageError(
            name, error.format_message(), f"{name} --help lists the flags", code="usage.arguments"
        ) from error


def _eval_options(
    *, data: tuple[str, ...], text_field: str, pack: bool, seq_len: int, microbatch: int, skip_bad_documents: bool,
    add_bos_token: bool | None, add_eos_token: bool | None, **read: Any,
) -> EvalOptions:  # fmt: skip
    if SYNTHETIC in data:
        problem = f"{SYNTHETIC} has no end, so it cannot be read once"
        raise UsageError("--data", problem, "name files", code="options.synthetic")
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


def _generate_options(
    *, prompt: tuple[str, ...], tokens: tuple[str, ...], max_new_tokens: int, temperature: float, top_p: float,
    top_k: int, seed: int, add_bos_token: bool | None, add_eos_token: bool | None, **read: Any,
) -> GenerateOptions:  # fmt: skip
    return GenerateOptions(
        read=_read_options(**read),
        prompts=tuple(map(_utf8, prompt)),
        tokens=tuple(map(_ids, tokens)),
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed),
        framing=FramingOptions(bos=add_bos_token, eos=add_eos_token),
    )


def _read_options(
    *, manifest: Path, dtype: Dtype, device: Device, timeout: int, is_json: bool, is_quiet: bool, dry_run: bool
) -> ReadOptions:
    return ReadOptions(
        manifest=manifest, dtype=dtype, device=device, timeout_s=timeout, is_json=is_json, is_quiet=is_quiet
    )


def _utf8(prompt: str) -> str:
    try:
        return utf8_argument(prompt)
    except UnicodeError as error:
        raise UsageError("--prompt", f"is not UTF-8: {ascii(prompt)[:80]}", code="options.not-utf8") from error


def _ids(text: str) -> tuple[int, ...]:
    ids = text.replace(",", " ").split()
    if not ids or not all(number.isascii() and number.isdigit() for number in ids):
        raise UsageError("--tokens", f"expected ids such as 1,2,3, found {text[:80]!r}", code="options.invalid-value")
    return tuple(map(int, ids))
