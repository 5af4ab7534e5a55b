"""What commands share: their class, flags and the frozen objects that these become, and how results are printed."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from manifests.command import defaults
from manifests.command.console import GroupedHelp, LazyGroup
from manifests.command.neighbors import DTYPES as _TORCH_DTYPES
from manifests.command.neighbors import missing
from manifests.errors import UsageError, flag_like, naming_flags
from stores.address import hub_output, is_url

if TYPE_CHECKING:
    from manifests.models.training import Recompute
    from manifests.module_times import ModuleTime
    from reshard.copy.runs import Progress
    from stores.open import Address

Command = Callable[..., Any]
MEASURED = "reshard.measured"  # of a context: how the times of --cost were measured


class Verb(GroupedHelp, click.Command):
    """A command that calls a function of the Python API; its options are called like the function's parameters."""

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]] | None = None, **settings: Any) -> None:
        super().__init__(*args, groups=groups or {}, **settings)

    def invoke(self, ctx: click.Context) -> Any:
        group = ctx.find_root().command
        verbs = group.import_verbs if isinstance(group, LazyGroup) else tuple
        with naming_flags(lambda parameter: flag_of((self, *verbs()), parameter)):
            return super().invoke(ctx)


def flag_of(verbs: Iterable[click.Command], parameter: str) -> str:
    """Return the flag of the first of the commands that has it: `--bytes` for `reads_bytes`."""
    name = parameter.rpartition(".")[2]
    flags = (option.opts[0] for verb in verbs for option in verb.params if option.name == name)
    return next((flag for flag in flags if flag.startswith("-")), flag_like(parameter))


class WholeNumber(click.IntRange):
    """An integer from `min` to `most`. Help shows the lower bound alone."""

    name = "integer"

    def __init__(self, min: int, most: int = (1 << 31) - 1) -> None:
        super().__init__(min=min)
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = int(super().convert(value, param, ctx))
        if number > self.most:
            self.fail(f"expected at most {self.most}, found {str(value)[:40]}", param, ctx)
        return number


class DtypeName(click.Choice[str]):
    """A choice of dtypes, which may be called as torch does: `bfloat16` is `bf16`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(_TORCH_DTYPES.get(value, value), param, ctx)


# Repeated here, since --help imports nothing that a command needs; a test compares them.
MAX_LAYERS = 10_000
DTYPES = ("source", "fp32", "bf16", "fp16")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
max_shard_size = click.option(
    "--max-shard-size", "max_shard_nbytes", metavar="SIZE", default="45GB", show_default=True,
    callback=lambda _, __, text: _size("--max-shard-size", text),
    help="Largest size of a shard's tensors; a larger tensor gets its own shard. 1GB is 1024^3 bytes.",
)  # fmt: skip
quiet = click.option(
    "--quiet", is_flag=True, help="Print only errors, differences and requested output; no progress, no notes."
)
force = click.option("--force", is_flag=True, help="Replace an existing output; in a bucket, only an unfinished one.")
force_file = click.option("--force", is_flag=True, help="Replace a file that exists.")
_output = functools.partial(
    click.option, "--out", type=click.Path(), required=True, metavar="DIR|URL",
    callback=lambda _, __, text: address(text),
)  # fmt: skip
out = _output(help="Folder to write, or s3://BUCKET/PREFIX (gs://, az://).")
out_or_hub = _output(help="Folder to write, s3://BUCKET/PREFIX (gs://, az://) or hf://org/name.")
drop = click.option(
    "--drop", multiple=True, metavar="FQN", help="Leave this tensor, or all of this module, out; may be repeated."
)
model = click.option(
    "--model", type=click.Path(path_type=Path), metavar="FILE",
    help="TOML file that names the modules of an unknown architecture; see docs/own-models.md.",
)  # fmt: skip
manifest = click.argument("manifest", type=click.Path(), metavar="MANIFEST")
layout = click.option(
    "--layout", type=click.Path(), metavar="SPEC", show_default="a manifest's own",
    help="pp=N[,vpp=K], a Megatron string, balance:COST,pp=N, or a .toml or .json file of "
    "module lists.",
)  # fmt: skip
ranks = click.option(
    "--pp", type=WholeNumber(min=1), metavar="P",
    help="Number of pipeline ranks, if SPEC does not say it (a Megatron string).",
)  # fmt: skip
write = click.option(
    "--write", type=click.Path(path_type=Path), metavar="FILE",
    help="Write the layout as a .toml or .json file of module lists, which --layout reads.",
)  # fmt: skip
cost = click.option(
    "--cost", "measured", type=click.Path(path_type=Path), metavar="FILE",
    callback=lambda context, _, path: None if path is None else _times(path, context),
    help="Measured seconds of each module (JSON), used instead of FLOPs.",
)  # fmt: skip
_CONVERSION = (
    click.option(
        "--dtype", type=DtypeName(DTYPES[1:]), help="Cast weights to this dtype.",
        show_default="as they are",
    ),
    click.option(
        "--dequantize", "--dequantise", type=DtypeName(["bf16", "fp32"]), show_default="as they are",
        help="Turn quantized weights (fp8 in blocks, mxfp4) into plain ones of this dtype.",
    ),
    click.option(
        "--adapter", "adapters", type=click.Path(), multiple=True, metavar="DIR",
        help="Add the LoRA adapter of this PEFT folder to the weights; may be repeated.",
    ),
    click.option("--merge-slices", is_flag=True, help="Merge tensors that several ranks stored in slices."),
)  # fmt: skip
_WRITING = (
    click.option(
        "--io",
        type=click.Choice(["direct", "buffered"]),
        default="direct",
        help="Bypass the page cache where the file system allows it (O_DIRECT), or write through it.",
    ),
    click.option(
        "--sync/--no-sync", default=True, help="Flush the output to disk (fsync), or leave that to the kernel."
    ),
)
_PARALLELISM = (
    click.option(
        "--threads", "num_threads", type=WholeNumber(min=1, most=256), metavar="N", show_default="by number of cores",
        help="Threads that read, hash and write.",
    ),
    click.option(
        "--streams", "num_streams", type=WholeNumber(min=1, most=1024), metavar="N",
        show_default="raised while it helps",
        help="Concurrent requests to a remote SOURCE, and concurrent parts of uploads to a bucket.",
    ),
    click.option(
        "--io-memory", "memory_nbytes", metavar="SIZE", default="640MB", show_default=True,
        callback=lambda _, __, text: _size("--io-memory", text),
        help="Memory for requests to a remote SOURCE, and for parts of uploads; 10MB of it for each at most.",
    ),
)  # fmt: skip
_count = partial(click.option, type=WholeNumber(min=1))
_degree = partial(_count, default=1, metavar="N")
_TRAINING = (
    click.option(
        "--schedule", metavar="NAME|FILE.csv", show_default="the layout's, or one that supports its stages",
        help=f"Pipeline schedule to assume: {', '.join(SCHEDULES)}; or a CSV file of its actions.",
    ),
    click.option(
        "--microbatch-group", type=WholeNumber(min=1), metavar="N", show_default="groups of equal size",
        help="With Interleaved1F1B: microbatches that pass through a stage before the rank switches to its next one.",
    ),
    _count(
        "--microbatches", "num_microbatches", metavar="M",
        show_default="as many as --global-batch has",
        help="Microbatches per step of a replica, instead of --global-batch.",
    ),
    _count(
        "--global-batch", metavar="B",
        show_default=f"{defaults.GLOBAL_BATCH} in whole microbatches, or as many of these as stages if that is more; "
        "with --gpus N: 512, or N if that is more",
        help="Sequences in an optimizer step.",
    ),
    _count("--microbatch", default=defaults.MICROBATCH, metavar="B", help="Sequences per microbatch."),
    _count(
        "--seq-len", default=defaults.SEQ_LEN, metavar="L",
        show_default=f"{defaults.SEQ_LEN}; with --gpus {defaults.SEARCH_SEQ_LEN}", help="Tokens per sequence.",
    ),
    click.option(
        "--dtype", type=DtypeName(DTYPES[1:3]), default=defaults.DTYPE,
        show_default=f"{defaults.DTYPE}; with --gpus bf16", help="Dtype of weights and activations.",
    ),
    click.option(
        "--master-dtype", type=DtypeName(DTYPES[1:3]), show_default="--dtype; with --gpus fp32, or else bf16",
        help="Dtype of gradients, master weights and optimizer state.",
    ),
    click.option(
        "--optimizer", metavar="NAME|FILE.toml", default=defaults.OPTIMIZER,
        help="Optimizer, whose state takes memory: adamw, adam, sgd, adafactor, muon, or a TOML file of groups.",
    ),
    click.option(
        "--ema", type=click.FloatRange(0, 1, max_open=True), metavar="DECAY", default=0.0, show_default="none",
        help="Count the memory of a moving average of the weights, which training keeps with this flag.",
    ),
    _degree("--dp-replicate", "replicate", help="Data-parallel replicas of each stage (DDP, HSDP)."),
    _degree("--dp-shard", "shard", help="Data-parallel ranks that shard each stage (FSDP)."),
    _degree("--tp", "tensor", help="Tensor-parallel degree."),
    _degree("--cp", "context", help="Context-parallel degree: ranks that each have a part of every sequence."),
    click.option(
        "--cp-method", "context_method", type=click.Choice(["gather", "ulysses"]), default=defaults.CONTEXT_METHOD,
        help="How attention sees the whole sequence.",
    ),
    _degree("--ep", "expert", help="Expert-parallel degree: ranks of a replica among which experts are divided."),
    click.option(
        "--ac", "recompute", default=defaults.RECOMPUTE, metavar="none|full|selective|N",
        callback=lambda _, __, text: _recompute(text),
        help="Activation checkpointing: none, every layer (full), all but matrix products and attention "
        "(selective), or every Nth layer.",
    ),
    _count(
        "--loss-chunk", metavar="N", show_default="a whole microbatch",
        help="Compute logits and loss in chunks of this many tokens.",
    ),
    click.option(
        "--allocator", "host_memory", type=click.Choice(["fast", "compact"]), show_default="ranks on GPUs",
        help="Estimate the memory of ranks on CPUs that reuse freed memory (fast), or return it (compact).",
    ),
    click.option(
        "--gpu-memory", "memory_limit", metavar="SIZE",
        callback=lambda _, __, text: None if text is None else _size("--gpu-memory", text),
        help="Memory per rank, such as 80GB (read as 80GiB); a layout that is solved for stays within it.",
    ),
    cost,
)  # fmt: skip

_SEARCH = (
    click.option(
        "--gpus", type=WholeNumber(min=1), metavar="N",
        help="Search for the fastest layouts on this many GPUs of --gpu-memory, with the degrees given, if any.",
    ),
    click.option("--gpus-per-node", type=WholeNumber(min=1), metavar="N", default=defaults.GPUS_PER_NODE,
                 help="GPUs of a node."),
    click.option(
        "--hardware", metavar="NAME", default=defaults.HARDWARE,
        help="GPUs to assume: a100, h100, h200, or TFLOP/s, GB/s on a node and GB/s between nodes: 165,32,12.5.",
    ),
    click.option("--efficiency", type=click.FloatRange(0, 1, min_open=True), metavar="F", default=0.33,
                 help="Fraction of the peak FLOP/s that ranks reach while they compute."),
)  # fmt: skip


def layout_flags(command: Command) -> Command:
    """Add the flags of a layout, which only a manifest as SOURCE does without."""

    @functools.wraps(command)
    def checked(*, source: str, layout: str | None, **others: Any) -> Any:
        if layout is None and not others.get("gpus"):
            from reshard.formats.open import names_manifest

            if not names_manifest(source):
                raise missing(click.get_current_context().command_path, "--layout")
        return command(source=source, layout=layout, **others)

    return with_flags(checked, (layout, ranks))


def as_object_of(command: Command, name: str, kind: str, flags: Sequence[Callable[[Command], Command]]) -> Command:
    """Add flags that are called like the fields of an object, which the command receives as `name`.

    `kind` is the path of its class, which is imported when the command runs.
    """

    @functools.wraps(command)
    def gathered(**values: Any) -> Any:
        module, _, kind_name = kind.rpartition(".")
        fields = {option.name: values.pop(option.name) for option in options}
        return command(**{name: getattr(import_module(module), kind_name)(**fields)}, **values)

    before = len(getattr(command, "__click_params__", ()))
    wrapped = with_flags(gathered, flags)
    options: list[click.Parameter] = wrapped.__click_params__[before:]  # type: ignore[attr-defined]  # click's
    return wrapped


conversion_flags = partial(
    as_object_of, name="conversion", kind="reshard.transforms.conversion.Conversion", flags=_CONVERSION
)
parallelism_flags = partial(
    as_object_of, name="parallelism", kind="reshard.copy.parallelism.Parallelism", flags=_PARALLELISM
)
training_flags = partial(as_object_of, name="assumed", kind="reshard.estimate.assumptions.Assumptions", flags=_TRAINING)
search_flags = partial(as_object_of, name="search", kind="builtins.dict", flags=_SEARCH)


def writing_flags(command: Command) -> Command:
    """Add the flags of how an output is written, and those of threads and requests."""
    return with_flags(parallelism_flags(command), _WRITING)


def _recompute(ac: str) -> Recompute:
    if ac == "none":
        return "none"
    from manifests.models.training import parse_recompute  # which a pack without --ac does without

    return parse_recompute(ac)


def name_links(links: Iterable[tuple[str, str]], quiet: bool) -> None:
    """Name the links out of SOURCE on standard error: nobody may want to publish what they lead to."""
    for name, target in () if quiet else links:
        click.echo(f"link out of SOURCE: {name} -> {target}", err=True)


def print_result(quiet: bool, as_json: bool, as_object: Callable[[], object], as_text: Callable[[], str]) -> None:
    """Print what a command has done: as JSON with --json, and as text unless --quiet."""
    if as_json:
        click.echo(json.dumps(as_object()))
    elif not quiet:
        click.echo(as_text())


def print_report(
    is_ok: bool, quiet: bool, as_json: bool, as_object: Callable[[], object], as_text: Callable[[], str]
) -> None:
    """Print what a command has compared, with --quiet only if something is wrong; then, exit with code 4."""
    print_result(quiet and is_ok, as_json, as_object, as_text)
    if not is_ok:
        sys.exit(4)


@contextlib.contextmanager
def progress(verb: str, quiet: bool, *, is_report: bool = False) -> Iterator[Progress | None]:
    """Show a bar on a terminal, and yield the operation's progress callback.

    Before a command whose result is its report, check that this can be printed.
    """
    if is_report and not quiet:
        from stores.folders.probe import check_stdout

        check_stdout()
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with contextlib.ExitStack() as stack:

        @functools.cache
        def bar() -> Any:  # with the first bytes: notes are printed before
            return stack.enter_context(tqdm(desc=verb, unit="iB", unit_scale=True, unit_divisor=1024))

        def show(done_nbytes: int, total_nbytes: int) -> None:
            bar().total = total_nbytes
            bar().update(done_nbytes - bar().n)

        yield show


def upload_bars(out: Address, quiet: bool) -> AbstractContextManager[None]:
    """Show the bars of an upload on a terminal, if `out` is on the hub; see `progress`."""
    if hub_output(out) is None:
        return contextlib.nullcontext()
    from stores.hub.upload import showing_bars

    return showing_bars(not quiet)


def _times(path: Path, context: click.Context) -> Mapping[str, ModuleTime]:
    from manifests.module_times import read_times

    times = read_times(path)
    context.meta[MEASURED] = times.how
    return times.modules


def _size(flag: str, text: str) -> int:
    from manifests.command.sizes import read_size

    return read_size(flag, text)


def address(text: str, where: str = "--out") -> str | Path:
    """Return a URL as it is, and anything else as a path; errors name `where`."""
    from manifests.paths import is_unicode

    if not is_unicode(text):
        raise UsageError(where, f"{text!r} is not valid UTF-8", "choose another name", code="options.not-utf8")
    return text if is_url(text) else Path(text)


def with_flags(command: Command, flags: Sequence[Callable[[Command], Command]]) -> Command:
    for flag in reversed(flags):
        command = flag(command)
    return command
