"""The flags of `runner eval`: read by the command that starts the ranks, and again by each rank."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import click

from manifests.command.neighbors import usage_error
from manifests.errors import UsageError
from runner.config.declared import DtypeName, LocalManifest, WholeNumber, build, flag, group, parameters_of
from runner.config.flags import Device
from runner.config.schema import SYNTHETIC, DataOptions, Dtype, TextOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """The model, its device and dtype, and the text: sequences of `seq_len` tokens, `microbatch` at a time."""

    manifest: Path
    sources: tuple[str, ...] = flag(
        "--data", type=click.Path(), multiple=True, required=True, metavar="PATH",
        help="Text: .txt, .jsonl or .parquet files, folders or globs of them. May be repeated.",
    )  # fmt: skip
    text: TextOptions = group(TextOptions)
    seq_len: int = flag("--seq-len", type=WholeNumber(min=1), written_default=512, help="Tokens in a sequence.")
    microbatch: int = flag("--microbatch", type=WholeNumber(min=1), written_default=1, help="Sequences per microbatch.")
    dtype: Dtype = flag("--dtype", type=DtypeName(get_args(Dtype)), written_default="fp32", help="Dtype to compute in.")
    device: Device = flag(
        "--device", type=click.Choice(get_args(Device)), written_default="auto", help="Device to compute on."
    )
    out: Path | None = flag(
        "--out", default=None, type=click.Path(path_type=Path), metavar="FILE",
        help="Parquet file with the loss of each token, a row for each document.",
    )  # fmt: skip
    top_k: int = flag(
        "--top-k", type=WholeNumber(min=0), written_default=0, help="Largest logits of each token to write, too."
    )
    hidden_states: str | None = flag(
        "--hidden-states", default=None, metavar="MODULE",
        help="Module whose hidden states are written, too, such as model.layers.3.",
    )  # fmt: skip
    force: bool = flag("--force", is_flag=True, help="Replace an existing --out.")
    nproc_per_node: int | None = flag(
        "--nproc-per-node", default=None, type=WholeNumber(min=1), metavar="N",
        show_default="the manifest's pipeline ranks, over the nodes",
        help="Ranks on each node; over all nodes a multiple of the pipeline ranks, of which replicas share the text.",
    )  # fmt: skip
    nnodes: int = flag("--nnodes", type=WholeNumber(min=1), written_default=1, help="Nodes; run the command on each.")
    node_rank: int = flag("--node-rank", type=WholeNumber(min=0), written_default=0, help="The number of this node.")
    rendezvous: str | None = flag(
        "--rendezvous", default=None, metavar="HOST:PORT", help="Address of node 0, where nodes meet."
    )
    timeout_s: int = flag(
        "--timeout", type=WholeNumber(min=1), written_default=600, help="Seconds to wait for another rank."
    )
    is_json: bool = flag("--json", "is_json", is_flag=True, help="Print one JSON object.")
    self_check: bool = flag(
        "--self-check/--no-self-check", written_default=True,
        help="First compare a tiny model of the config in stages with transformers' whole model, if it is built of "
        "transformers' modules.",
    )  # fmt: skip
    is_quiet: bool = flag("--quiet", "is_quiet", is_flag=True, help="Print only errors and the result.")

    def __post_init__(self) -> None:
        if SYNTHETIC in self.sources:
            problem = f"expected files, found {SYNTHETIC}, which is endless"
            raise UsageError("--data", problem, "choose files to evaluate on", code="options.synthetic")
        if self.out is None and (self.top_k or self.hidden_states is not None or self.force):
            flag_name = "--top-k" if self.top_k else "--force" if self.force else "--hidden-states"
            raise UsageError(flag_name, "is for --out, which is missing", "add --out FILE", code="options.scores")
        if self.node_rank >= self.nnodes:
            problem = f"expected a number below {self.nnodes} (--nnodes), found {self.node_rank}"
            raise UsageError("--node-rank", problem, code="launch.nodes")
        if self.nnodes > 1 and not _is_address(self.rendezvous):
            problem = f"expected HOST:PORT of node 0, found {self.rendezvous or 'none'}"
            raise UsageError("--rendezvous", problem, "name a free port, the same on all nodes", code="launch.nodes")

    @property
    def data(self) -> DataOptions:
        how = {member.name: getattr(self.text, member.name) for member in fields(TextOptions)}
        return DataOptions(sources=self.sources, **how)


def _is_address(text: str | None) -> bool:
    host, _, port = (text or "").rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16


PARAMETERS = (click.Argument(["manifest"], type=LocalManifest()), *parameters_of(EvalOptions))


def parse_eval(args: Sequence[str]) -> EvalOptions:
    """Read what follows `runner eval`."""
    name, command = "runner eval", click.Command("eval", params=[*PARAMETERS])
    try:
        with command.make_context(name, list(args)) as context:
            return eval_options(context.params)
    except click.exceptions.Exit as done:  # --help was shown
        sys.exit(done.exit_code)
    except click.UsageError as error:
        raise usage_error(error, name) from error


def eval_options(values: Mapping[str, Any]) -> EvalOptions:
    return build(EvalOptions, values, manifest=values["manifest"])
