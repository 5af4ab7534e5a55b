"""The flags of `runner eval`, parsed by the launcher and by every rank. No torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click

from manifests.errors import UsageError
from manifests.probe import check_stdout
from manifests.store import find_manifest, read_manifest
from runner.bundle.packed import check_tokenizer, open_packed
from runner.config.architectures import check_trainable
from runner.config.declared import WholeNumber
from runner.config.flags import Device
from runner.config.schema import SYNTHETIC, DataOptions, Dtype, FramingOptions
from runner.data.files import find_files
from runner.launch.local import launch_here
from runner.launch.preflight import check_model

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


def parse_eval(args: Sequence[str]) -> EvalOptions:
    """Read what follows `runner eval`.

    Raises:
        UsageError: an unknown flag, a value of the wrong kind, or conflicting values.
    """
    return _eval_options(**_read_flags(eval_command, "runner eval", args))


class _Verb(click.Command):
    """A command whose arguments are passed to the ranks as given; `--` among them is ignored."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            args.remove("--")
        ctx.meta[_ARGS] = tuple(args)
        return super().parse_args(ctx, args)


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
@click.option("--dtype", type=click.Choice(get_args(Dtype)), default="fp32", help="Dtype to compute in.")
@click.option("--device", type=click.Choice(get_args(Device)), default="auto", help="Device to compute on.")
@click.option("--timeout", type=WholeNumber(min=1), default=600, help="Seconds to wait for another rank.")
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--add-bos-token/--no-add-bos-token",
    default=None,
    show_default="as the tokenizer does",
    help="Start every text with the BOS token.",
)
@click.option(
    "--self-check/--no-self-check",
    default=True,
    help="First compare a tiny model of the config, whole and in stages, if it is trained by the catalogue.",
)
@click.option("--quiet", "is_quiet", is_flag=True, help="Print only errors and the result.")
@click.option("--dry-run", is_flag=True, help="Print the command that starts the ranks, and stop.")
@click.pass_context
def eval_command(context: click.Context, /, dry_run: bool, **values: Any) -> None:
    """Print the loss of MANIFEST's model over a text: the mean over all tokens, each predicted once.

    Starts one rank for each pipeline rank of the manifest, on this machine, under torchrun.

    \b
    Example:
      runner eval ./Llama-3.2-1B-pp2 --data held-out.jsonl --seq-len 2048
    """
    options = _eval_options(**values, dry_run=dry_run)
    path = find_manifest(options.read.manifest)
    manifest = read_manifest(path)
    check_trainable(manifest.model.architecture, is_described=manifest.model.description is not None)
    check_model(open_packed(path.parent, manifest))
    check_stdout()
    if not dry_run:
        find_files(options.data.sources)
    check_tokenizer(path.parent)
    # --dry-run is for the launcher, which prints the command.
    words = [word for word in context.meta[_ARGS] if word != "--dry-run"]
    num_ranks, worker = manifest.layout.num_ranks, "runner.evaluation.evaluate"
    launch_here(words, nproc_per_node=num_ranks, dry_run=dry_run, worker=worker, quiet=options.read.is_quiet)


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


def _read_options(
    *, manifest: Path, dtype: Dtype, device: Device, timeout: int, is_json: bool, is_quiet: bool, dry_run: bool,
    self_check: bool,
) -> ReadOptions:  # fmt: skip
    return ReadOptions(
        manifest=manifest, dtype=dtype, device=device, timeout_s=timeout, is_json=is_json, is_quiet=is_quiet,
        self_check=self_check,
    )  # fmt: skip
