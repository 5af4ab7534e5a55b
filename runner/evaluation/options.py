"""The flags of `runner eval`: read by the command that starts the ranks, and again by each rank."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click

from manifests.command.neighbors import usage_error
from manifests.errors import UsageError
from runner.config.declared import DtypeName, WholeNumber, build, flag, parameters_of
from runner.config.flags import Device
from runner.config.schema import SYNTHETIC, DataOptions, Dtype, FramingOptions

PLAIN = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """The model, its device and dtype, and the text: sequences of `seq_len` tokens, `microbatch` at a time.

    Raises:
        UsageError: the text is synthetic.
    """

    manifest: Path
    sources: tuple[str, ...] = flag(
        "--data", type=click.Path(), multiple=True, required=True, metavar="PATH",
        help="Text: .txt, .jsonl or .parquet files, folders or globs of them. May be repeated.",
    )  # fmt: skip
    text_field: str = flag("--text-field", written_default="text", help="Field or column with the text.")
    completion_field: str | None = flag(
        "--completion-field", written_default=None, metavar="NAME", show_default="the whole text counts",
        help="Field or column of a completion, whose tokens alone count in the loss; --text-field is its prompt.",
    )  # fmt: skip
    is_tokenized: bool = flag(
        "--tokenized", "is_tokenized", is_flag=True, help="The data is rows of token ids, as runner launch reads them."
    )
    pack: bool = flag(
        "--pack/--no-pack", written_default=True,
        help="Pack documents end to end, or use one padded document per sequence, truncated at --seq-len.",
    )  # fmt: skip
    document_mask: bool = flag(
        "--document-mask/--no-document-mask", written_default=False,
        help="Keep packed documents apart: tokens attend within their document, whose positions begin at 0.",
    )  # fmt: skip
    seq_len: int = flag("--seq-len", type=WholeNumber(min=1), written_default=512, help="Tokens in a sequence.")
    microbatch: int = flag("--microbatch", type=WholeNumber(min=1), written_default=1, help="Sequences per microbatch.")
    eos: bool | None = flag(
        "--add-eos-token/--no-add-eos-token", written_default=None, show_default="add",
        help="End every document with the EOS token.",
    )  # fmt: skip
    skip_bad_documents: bool = flag(
        "--skip-bad-documents", is_flag=True, help="Skip and count documents that are not text."
    )
    dtype: Dtype = flag("--dtype", type=DtypeName(get_args(Dtype)), written_default="fp32", help="Dtype to compute in.")
    device: Device = flag(
        "--device", type=click.Choice(get_args(Device)), written_default="auto", help="Device to compute on."
    )
    timeout_s: int = flag(
        "--timeout", type=WholeNumber(min=1), written_default=600, help="Seconds to wait for another rank."
    )
    is_json: bool = flag("--json", "is_json", is_flag=True, help="Print one JSON object.")
    bos: bool | None = flag(
        "--add-bos-token/--no-add-bos-token", written_default=None, show_default="as the tokenizer does",
        help="Start every text with the BOS token.",
    )  # fmt: skip
    self_check: bool = flag(
        "--self-check/--no-self-check", written_default=True,
        help="First compare a tiny model of the config, whole and in stages, if it is trained by the catalogue.",
    )  # fmt: skip
    is_quiet: bool = flag("--quiet", "is_quiet", is_flag=True, help="Print only errors and the result.")

    def __post_init__(self) -> None:
        if SYNTHETIC in self.sources:
            problem = f"expected files, found {SYNTHETIC}, which is endless"
            raise UsageError("--data", problem, "choose files to evaluate on", code="options.synthetic")

    @property
    def data(self) -> DataOptions:
        return DataOptions(
            sources=self.sources,
            text_field=self.text_field,
            completion_field=self.completion_field,
            is_tokenized=self.is_tokenized,
            pack=self.pack,
            document_mask=self.document_mask,
            skip_bad_documents=self.skip_bad_documents,
            framing=FramingOptions(bos=self.bos, eos=self.eos),
        )


PARAMETERS = (click.Argument(["manifest"], type=click.Path(path_type=Path)), *parameters_of(EvalOptions))


def parse_eval(args: Sequence[str]) -> EvalOptions:
    """Read what follows `runner eval`.

    Raises:
        UsageError: an unknown flag, a value of the wrong kind, or conflicting values.
    """
    name, command = "runner eval", click.Command("eval", context_settings=PLAIN, params=[*PARAMETERS])
    try:
        with command.make_context(name, list(args)) as context:
            return eval_options(context.params)
    except click.exceptions.Exit as done:  # --help was shown
        sys.exit(done.exit_code)
    except click.UsageError as error:
        raise usage_error(error, name) from error


def eval_options(values: Mapping[str, Any]) -> EvalOptions:
    return build(EvalOptions, values, manifest=values["manifest"])
