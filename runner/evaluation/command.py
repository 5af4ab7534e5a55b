"""The flags of `runner eval` and `runner generate`, parsed by the launcher and by every rank. No torch."""

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
from runner.config.declared import Number, WholeNumber
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is sampled; at temperature 0 it is the most likely one.

    Raises:
        UsageError: a temperature that is not a number, or a filter or a seed at temperature 0.
    """

    temperature: float = 0.0
    top_p: float = 1.0  # the most likely tokens whose probabilities sum to this
    top_k: int = 0  # so many of the most likely tokens; 0: all
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature < math.inf:
            raise UsageError(
                "--temperature", f"expected a number from 0 up, found {self.temperature}", code="options.invalid-value"
            )
        if not self.temperature and (self.top_p < 1 or self.top_k or self.seed):
            flag = "--top-p" if self.top_p < 1 else "--top-k" if self.top_k else "--seed"
            raise UsageError(
                flag,
                "requires --temperature above 0: at 0 the most likely token is chosen",
                code="options.needs-temperature",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """Prompts to continue, as text or as token ids, and for how many tokens.

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
        UsageError: an unknown flag, a value of the wrong kind, or conflicting values.
    """
    return _eval_options(**_read_flags(eval_command, "runner eval", args))


def parse_generate(args: Sequence[str]) -> GenerateOptions:
    """Read what follows `runner generate`; see `parse_eval`."""
    return _generate_options(**_read_flags(generate_command, "runner generate", args))


class _Verb(click.Command):
    """A command whose arguments are passed to the ranks as given; `--` among them is ignored."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            args.remove("--")
        ctx.meta[_ARGS] = tuple(args)
        return super().parse_args(ctx, args)


C = TypeVar("C", bound=click.Command)


def _reading(command: C) -> C:
    """Add the flags that both commands have."""
    command.params += (
        click.Option(["--dtype"], type=click.Choice(get_args(Dtype)), default="fp32", help="Dtype to compute in."),
        click.Option(["--device"], type=click.Choice(get_args(Device)), default="auto", help="Device to compute on."),
        click.Option(["--timeout"], type=WholeNumber(min=1), default=600, help="Seconds to wait for another rank."),
        click.Option(["--json", "is_json"], is_flag=True, help="Print one JSON object."),
        click.Option(
            ["--add-bos-token/--no-add-bos-token"],
            default=None,
            show_default="as the tokenizer does",
            help="Start every text with the BOS token.",
        ),
        click.Option(
            ["--self-check/--no-self-check"],
            default=True,
            help="First compare a tiny model of the config, whole and in stages, if it is trained by the catalogue.",
        ),
        click.Option(["--quiet", "is_quiet"], is_flag=True, help="Print only errors and the result."),
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
@click.option("--text-field", default="text", help="Field or column with the text.")
@click.option(
    "--pack/--no-pack", default=True,
    help="Pack documents end to end, or use one padded document per sequence, truncated at --seq-len.",
)  # fmt: skip
@click.option("--seq-len", type=WholeNumber(min=1), default=512, help="Tokens in a sequence.")
@click.option("--microbatch", type=WholeNumber(min=1), default=1, help="Sequences per microbatch.")
@click.option(
    "--add-eos-token/--no-add-eos-token",
    default=None,
    show_default="add",
    help="End every document with the EOS token.",
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
@click.option("--prompt", multiple=True, metavar="TEXT", help="Text to continue. May be repeated.")
@click.option("--tokens", multiple=True, metavar="1,2,3", help="Token ids to continue; requires no tokenizer.")
@click.option("--max-new-tokens", type=WholeNumber(min=1), default=32, help="Most tokens to generate.")
@click.option("--temperature", type=Number(min=0), default=0.0, help="Sampling temperature; 0: the most likely token.")
@click.option(
    "--top-p",
    type=Number(0, 1, min_open=True),
    default=1.0,
    help="Sample from tokens of this total probability.",
)
@click.option("--top-k", type=WholeNumber(min=0), default=0, help="Sample from so many tokens; 0: all.")
@click.option("--seed", type=WholeNumber(min=0), default=0, help="Seed of sampling; each prompt gets its own stream.")
@click.option(
    "--add-eos-token/--no-add-eos-token", default=None, show_default="as the tokenizer does",
    help="End every prompt with the EOS token.",
)  # fmt: skip
@click.pass_context
def generate_command(context: click.Context, /, dry_run: bool, **values: Any) -> None:
    """Print what MANIFEST's model writes after a prompt.

    A check of a packed model, not a server: there is no KV cache, so every token runs the whole sequence
    through the pipeline. Starts one rank for each pipeline rank of the manifest.

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
    check_trainable(manifest.model.architecture, is_described=manifest.model.description is not None)
    check_model(open_packed(path.parent, manifest))
    check_stdout()
    if not dry_run:
        find_files(texts)
    if texts:
        check_tokenizer(path.parent)
    num_ranks = manifest.layout.num_ranks
    words = [
        word for word in context.meta[_ARGS] if word != "--dry-run"
    ]  # is for the launcher, which prints the command
    launch_here(words, nproc_per_node=num_ranks, dry_run=dry_run, worker=worker, quiet=read.is_quiet)


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


def _eval_options(
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
    *, manifest: Path, dtype: Dtype, device: Device, timeout: int, is_json: bool, is_quiet: bool, dry_run: bool,
    self_check: bool,
) -> ReadOptions:  # fmt: skip
    return ReadOptions(
        manifest=manifest, dtype=dtype, device=device, timeout_s=timeout, is_json=is_json, is_quiet=is_quiet,
        self_check=self_check,
    )  # fmt: skip


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
