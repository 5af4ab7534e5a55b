"""pack, commit and export: the commands that write, and the flags that divide a pack into parts."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from manifests.errors import UsageError
from reshard.cli import options
from reshard.formats.table import TIED_KEY, export_targets, names_of_targets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.packing.options import Part
    from reshard.packing.pack import PreparedPack
    from reshard.transforms.conversion import ExportDtype
    from stores.open import Address

_DIVISION_FLAGS = (
    click.option("--part", metavar="I/N", help="Pack only part I of N; reshard commit merges the parts."),
    click.option(
        "--parts", "num_parts", type=click.IntRange(1, 99_999), metavar="N", help="Submit N parts and a commit."
    ),
    click.option(
        "--scheduler", type=click.Choice(["slurm", "job"]), help="Submit them to Slurm, or as a Job of Kubernetes."
    ),
    click.option("--image", metavar="IMAGE", help="With --scheduler job: image that contains reshard."),
    click.option(
        "--mount",
        "mounts",
        multiple=True,
        metavar="X:/FOLDER",
        help="With --scheduler job: mount a claim, or a node's /FOLDER; may be repeated.",
    ),
    click.option("--partition", metavar="NAME", help="Slurm partition."),
    click.option("--account", metavar="NAME", help="Slurm account."),
    click.option("--time", metavar="TIME", help="Time limit of each part, such as 1:00:00."),
    click.option("--sbatch-arg", multiple=True, metavar="X", help="Another option for sbatch; may be repeated."),
)
_SBATCH = ("--partition", "--account", "--time")  # of sbatch, which are flags of reshard, too


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """The part to pack here, or the parts to submit to a scheduler; its fields are called like the flags."""

    part: str | None
    num_parts: int | None
    scheduler: str | None
    image: str | None
    mounts: tuple[str, ...]
    partition: str | None
    account: str | None
    time: str | None
    sbatch_arg: tuple[str, ...]

    @property
    def is_submitted(self) -> bool:
        return self.num_parts is not None

    @property
    def sbatch(self) -> tuple[str, ...]:
        named = zip(_SBATCH, (self.partition, self.account, self.time), strict=True)
        given = (f"{flag}={value and shlex.quote(value)}" for flag, value in named if value is not None)
        return (*given, *self.sbatch_arg)

    def check(self) -> None:
        """Refuse flags that conflict, before a source is opened."""
        if self.sbatch:
            from reshard.packing.jobs import check_sbatch

            check_sbatch(self.sbatch)
        if self.part is not None and self.is_submitted:
            problem = "conflicts with --parts: it packs one part here, --parts submits all of them"
            raise UsageError("--part", problem, "leave one of the two out", code="options.conflict")
        if self.is_submitted != (self.scheduler is not None):
            given, lacking = ("--parts", "--scheduler") if self.is_submitted else ("--scheduler", "--parts")
            hint = "use --parts 8 --scheduler slurm, or --part 1/8"
            raise UsageError(given, f"requires {lacking}", hint, code="options.needs-scheduler")
        flag = self.sbatch[0].partition("=")[0] if self.sbatch else ""
        for flags, value, scheduler in (
            ("--image", self.image, "job"),
            ("--mount", self.mounts, "job"),
            (flag if flag in _SBATCH else "--sbatch-arg", self.sbatch, "slurm"),
        ):
            if value and self.scheduler != scheduler:
                problem = f"requires --scheduler {scheduler}"
                raise UsageError(flags, problem, "leave it out", code="options.needs-scheduler")

    def part_to_pack(self) -> Part | None:
        """Return the part to pack here; None: all of the pack, or none of it."""
        from reshard.packing.options import parse_part

        return None if self.part is None else parse_part(self.part, ("reshard", *command_line()))

    def submit(self, source: str, prepared: PreparedPack, *, dry_run: bool, as_json: bool) -> None:
        """Submit the jobs of a plan that can be packed, or print what would be submitted."""
        from reshard.layouts.spelling import names_file
        from reshard.packing.jobs import IndexedJob, SlurmArray
        from reshard.packing.options import check_num_parts
        from stores.address import is_url

        assert self.num_parts is not None
        check_num_parts("--parts", self.num_parts, prepared.shards)
        options, spec = prepared.options, prepared.options.layout.spec or ""
        out, force = options.out, options.force
        job: IndexedJob | SlurmArray = SlurmArray(
            num_parts=self.num_parts, pack=command_line(), out=out, force=force, options=self.sbatch
        )
        if self.scheduler == "job":
            adapters = (adapter for adapter in options.conversion.adapters if Path(adapter).exists())  # not on the hub
            is_remote = is_url(prepared.staged.checkpoint.location)  # a bare name of the hub, too
            inputs = [] if is_remote else [("SOURCE", source)]
            inputs += [("--adapter", adapter) for adapter in adapters]
            inputs += [("--layout", spec)] if names_file(spec) else []
            inputs += [("--model", str(options.model))] if options.model else []
            job = IndexedJob(
                num_parts=self.num_parts, pack=command_line(), inputs=tuple(inputs), out=out, force=force,
                image=self.image, mounts=self.mounts,
            )  # fmt: skip
        job.check()
        if dry_run:
            click.echo(json.dumps(job.document()) if as_json else job.text(), nl=as_json)
            return
        document, text = job.submit()
        click.echo(json.dumps(document) if as_json else text)


_division_flags = partial(options.as_object_of, name="division", kind=f"{__name__}.Division", flags=_DIVISION_FLAGS)


def command_line() -> tuple[str, ...]:
    """Return the arguments of the running command, without those that divide it."""
    context = click.get_current_context()
    arguments = [context.info_name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name in (*Division.__dataclass_fields__, "dry_run") or source is not click.core.ParameterSource.COMMANDLINE:
            continue
        value = context.params.get(name, True)  # absent: a flag with a callback that exposes no value
        if isinstance(parameter, click.Argument):
            arguments.append(str(value))
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            arguments.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            values = value if isinstance(value, tuple) else (value,)
            unit = "B" if name.endswith("nbytes") else ""
            arguments += [word for item in values for word in (parameter.opts[0], f"{item}{unit}")]
    return tuple(arguments)


_BYTES, _REMOTE = ("io", "sync", "num_threads"), ("num_streams", "memory_nbytes")
_GROUPS = {
    "What and where": (
        "layout", "out", "pp", "force", "dry_run", "stages", "virtual", "drop", "model",
        "verify_source", "as_json", "quiet",
    ),
    "Bytes": (
        "init", "dtype", "dequantize", "adapters", "merge_slices", "max_shard_nbytes", *_BYTES,
    ),
    "Remote": _REMOTE,
    "Clusters": (*Division.__dataclass_fields__,),
}  # fmt: skip
_EXPORT_GROUPS = {
    "What and where": (
        "to", "out", "names", "dtype", "quantize", "weights_only", "weights", "tied_key", "force", "as_json", "quiet",
    ),
    "Bytes": _BYTES, "Remote": _REMOTE,
}  # fmt: skip


@click.command(cls=options.Verb, groups=_GROUPS)
@click.argument("source", type=click.Path(), metavar="SOURCE")
@options.layout_flags
@options.out_or_hub
@options.drop
@options.model
@click.option("--virtual", is_flag=True, help="Copy no tensors; bundles refer to the bytes in SOURCE.")
@click.option("--stages", metavar="N-M,...", help="Pack only these stages; the bundles of the others are virtual.")
@options.conversion_flags
@click.option(
    "--init",
    type=options.WholeNumber(min=0),
    metavar="SEED",
    help="Initialize the model of a config.json as transformers does, each tensor from SEED and its name.",
)
@options.max_shard_size
@options.force
@options.writing_flags
@_division_flags
@click.option(
    "--verify-source",
    is_flag=True,
    help="Compare the SHA-256 of every hub file, reading also what is not packed.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan, or the jobs of --scheduler, and exit.")
@options.as_json
@options.quiet
def pack(
    source: str, out: Address, division: Division, dry_run: bool, as_json: bool, quiet: bool, **arguments: Any
) -> None:  # fmt: skip
    """Write one bundle per stage, a manifest, and an index that makes the output a Hugging Face folder.

    SOURCE is a Hugging Face folder, hub repository or bucket, a checkpoint of torchtitan (DCP), DeepSpeed or
    Megatron-Core, CHAIN@N, or a manifest, which is resharded. A layout that is solved for (balance:) assumes the
    training step that reshard plan assumes by default; for another one, pack the file of reshard plan --write. Virtual
    bundles are valid as long as SOURCE is unchanged; packing their manifest copies the bytes.

    Objects in a bucket are written in order, and a shard's digests come first in it: tensors without a known digest are
    read twice, unless SOURCE is remote and the longest shard fits into --io-memory (see --max-shard-size). If reading
    is slow, pack into a folder, then pack that manifest into the bucket.

    With --out hf://org/name[@branch], the model is packed below HF_HOME, pushed in one commit, and removed there; see
    reshard push.

    Machines that share a file system or a bucket can each pack a --part, some of the shards, and reshard commit merges
    them; --parts N --scheduler slurm submits all of it. In a folder, the output is the same, byte for byte; in a
    bucket, shards stay below parts-KEY.

    \b
    Example:
      reshard pack ./Llama-3.2-1B --layout pp=2 --out ./Llama-3.2-1B-pp2
      reshard pack ./Llama-3.1-405B --layout pp=16 --out ./405B-pp16 --parts 8 --scheduler slurm --time 1:00:00
    """
    from reshard.formatting import untied_notes
    from reshard.packing.options import PackOptions
    from reshard.packing.pack import pack as run
    from reshard.report.done import hub_lines, pack_json, pack_text

    division.check()
    if division.is_submitted:
        checked = {name: arguments[name] for name in ("force", "verify_source", "virtual", "init")}
        PackOptions(out=out, **checked).check_divided("--parts")

    def show(prepared: PreparedPack) -> None:
        """Print what is about to be packed; exit if it was a dry run, or once the parts are submitted."""
        if division.is_submitted:
            division.submit(source, prepared, dry_run=dry_run, as_json=as_json)
            raise click.exceptions.Exit
        options.name_links(prepared.staged.links, quiet)
        for note in () if quiet else untied_notes(prepared.staged.checkpoint.misread):
            click.echo(note, err=True)
        if dry_run:
            from reshard.report.plan_summary import plan_json, plan_text

            planned, traffic = prepared.planned, prepared.traffic
            click.echo(json.dumps(plan_json(planned, traffic)) if as_json else plan_text(planned, traffic))
            raise click.exceptions.Exit
        for note in () if quiet else _notes(prepared):
            click.echo(note, err=True)

    with options.progress("pack", quiet) as progress, options.upload_bars(out, quiet):
        done = run(source, out, part=division.part_to_pack(), on_plan=show, progress=progress, **arguments)
    for line in () if quiet else hub_lines(done.hub):
        click.echo(line, err=True)
    options.print_result(quiet, as_json, lambda: pack_json(done), lambda: pack_text(done))


_OPTIMIZER_OF_TRAINER = re.compile(r"optimizer\.(?:pt|bin)$|optimizer_\d+(?=/)")  # with FSDP, the latter two


def _notes(prepared: PreparedPack) -> Iterator[str]:
    left_out = prepared.staged.checkpoint.source.left_out
    for name in left_out:
        yield f"left out: {name} (not part of the weights that are packed)"
    if state := next(filter(None, map(_OPTIMIZER_OF_TRAINER.match, left_out)), None):
        what = f"warning: {state[0]} is optimizer state of transformers' Trainer, which is not read"
        yield f"{what}: what is packed has weights alone, and training begins at step 1"
    if (step := prepared.assumed_step) is not None:
        yield f"{step}; reshard plan --write FILE solves for another step"
    if (dtype := prepared.options.conversion.dtype) is not None:
        from manifests.models.config import CONFIG_DTYPES
        from reshard.transforms.conversion import STORED

        config = prepared.staged.checkpoint.read_config()
        named, packed = config.get("dtype") or config.get("torch_dtype"), STORED[dtype]
        if named is not None and CONFIG_DTYPES.get(str(named)) != packed:
            what = f"note: weights are packed in {packed}, and config.json still says {named}"
            yield f"{what}: transformers casts them to that, unless from_pretrained is given a dtype"
    for shard in prepared.large_headers:
        what = f"warning: the header of {shard.path} takes {shard.header_nbytes} bytes"
        yield f"{what}, and the Hugging Face hub reads up to 25 MB: use a smaller --max-shard-size"


@click.command(cls=options.Verb, groups=_EXPORT_GROUPS)
@options.manifest
@click.option(
    "--to",
    type=click.Choice(list(export_targets())),
    required=True,
    help="Format to write.",
)
@click.option(
    "--for",
    "names",
    type=click.Choice(names_of_targets()),
    default="hf",
    help="Whose names to use: torchtitan's with --to dcp, a PipelineModule's with --to universal.",
)
@click.option(
    "--tied-key",
    metavar="KEY",
    default=TIED_KEY,
    show_default=True,
    help="With --for pipeline: the key of the TiedLayerSpec of a tied embedding.",
)
@click.option("--weights-only", is_flag=True, help="With --to dcp, universal, megatron: leave out optimizer state.")
@click.option(
    "--weights",
    type=click.Choice(["trained", "ema"]),
    default="trained",
    help="The weights as they were trained, or their exponential moving average.",
)
@options.out
@click.option(
    "--dtype",
    type=options.DtypeName(options.DTYPES),
    default="source",
    help="Dtype of the weights: as in the source, or one for all parameters.",
)
@click.option(
    "--quantize",
    type=click.Choice(["like-source"]),
    help="Quantize weights that pack --dequantize made plain, as the source has them: float8 blocks or MXFP4.",
)
@options.force
@options.writing_flags
@options.as_json
@options.quiet
def export(
    manifest: str, to: str, names: str, out: Address, dtype: ExportDtype, as_json: bool, quiet: bool, **arguments: Any
) -> None:  # fmt: skip
    """Write a manifest's model as a Hugging Face folder, or as a checkpoint that another trainer loads.

    In a Hugging Face folder, untrained tensors are restored byte for byte, in the files that they came from.
    Tensors that were trained in a dtype other than the source's are rounded to the source's, unless --dtype says
    otherwise. A DCP folder (--to dcp) has weights as they were trained and, if there is any, optimizer state. --to
    deepspeed writes the layers of DeepSpeed's PipelineModule, and --to universal its Universal Checkpoint, in
    float32. --to megatron writes what Megatron-LM loads, with the state of its distributed optimizer.

    \b
    Example:
      reshard export ./Llama-3.2-1B-pp2 --to hf --out ./Llama-3.2-1B-again
      reshard export ./checkpoints/step-001000 --to dcp --for torchtitan --out ./outputs/checkpoint/step-1000
      reshard export ./Llama-3.2-1B-pp2 --to deepspeed --out ./Llama-3.2-1B-deepspeed
    """
    from reshard.formats.export import export as run
    from reshard.report.done import export_json, export_text

    with options.progress("export", quiet) as progress:
        done = run(manifest, out, to=to, names=names, dtype=dtype, progress=progress, **arguments)
    options.print_result(
        quiet, as_json, lambda: export_json(done, to, out), lambda: export_text(done, to, names, dtype, out)
    )


@click.command(cls=options.Verb)
@click.argument("out", type=click.Path(), callback=lambda _, __, text: options.address(text, "OUT"))
@click.option("--wait", is_flag=True, help="Wait until all parts are written.")
@click.option("--force", is_flag=True, help="Replace an existing folder.")
@options.as_json
@options.quiet
def commit(as_json: bool, quiet: bool, **arguments: Any) -> None:
    """Merge the parts that reshard pack --part has written to OUT into a checkpoint.

    OUT is a folder or s3://BUCKET/PREFIX, and all that is required. No tensors are copied. If it is killed, run it
    again. With --force, run it once a part has begun: before that, it leaves the checkpoint in OUT as it is. --force is
    not supported in a bucket.

    \b
    Example:
      reshard pack ./Llama-3.2-1B --layout pp=2 --out ./Llama-3.2-1B-pp2 --part 1/2
      reshard pack ./Llama-3.2-1B --layout pp=2 --out ./Llama-3.2-1B-pp2 --part 2/2
      reshard commit ./Llama-3.2-1B-pp2
    """
    from reshard.packing.parts import commit as run
    from reshard.report.done import pack_json, pack_text

    done = run(**arguments)
    options.print_result(quiet, as_json, lambda: pack_json(done), lambda: pack_text(done))
