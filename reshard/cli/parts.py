"""commit, and the flags with which pack writes one part or submits all of them."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from manifests.errors import UsageError
from reshard.cli import options

if TYPE_CHECKING:
    from reshard.packing.pack import PreparedPack
    from reshard.plans.partition import Part

_FLAGS = (
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
        """The options of sbatch."""
        named = zip(_SBATCH, (self.partition, self.account, self.time), strict=True)
        given = (f"{flag}={value and shlex.quote(value)}" for flag, value in named if value is not None)
        return (*given, *self.sbatch_arg)

    def check(self) -> None:
        """Refuse flags that conflict, before a source is opened.

        Raises:
            UsageError: naming the flag.
        """
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
        from reshard.plans.partition import parse_part

        return None if self.part is None else parse_part(self.part, ("reshard", *command_line()))

    def submit(self, source: str, prepared: PreparedPack, *, dry_run: bool, as_json: bool) -> None:
        """Submit the jobs of a plan that can be packed, or print what would be submitted.

        Raises:
            UsageError: options conflict, pods could not run it, or there are more parts than shards.
            OutputError: `out` exists or cannot be written.
            LaunchError: the scheduler refuses the jobs.
            InputError: its command is not installed here.
        """
        from reshard.packing.jobs import IndexedJob, SlurmArray
        from reshard.plans.partition import check_num_parts

        assert self.num_parts is not None
        check_num_parts("--parts", self.num_parts, prepared.shards)
        out, force = prepared.options.out, prepared.options.force
        job: IndexedJob | SlurmArray = SlurmArray(
            num_parts=self.num_parts, pack=command_line(), out=out, force=force, options=self.sbatch
        )
        if self.scheduler == "job":
            job = IndexedJob(
                num_parts=self.num_parts, pack=command_line(), source=source, out=out, force=force, image=self.image,
                mounts=self.mounts,
            )  # fmt: skip
        job.check()
        if dry_run:
            click.echo(json.dumps(job.document()) if as_json else job.text(), nl=as_json)
            return
        document, text = job.submit()
        click.echo(json.dumps(document) if as_json else text)


def flags(command: options.Command) -> options.Command:
    """Add the flags that divide a pack, which the command receives as `division`, a Division."""
    return options.as_object_of(command, "division", Division, _FLAGS)


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
            arguments += [word for item in values for word in (parameter.opts[0], str(item))]
    return tuple(arguments)


@click.command(cls=options.Verb)
@click.argument("out", type=click.Path(), callback=lambda _, __, text: options.address(text, "OUT"))
@click.option("--wait", is_flag=True, help="Wait until all parts are written.")
@options.force
@options.as_json
@options.quiet
def commit(as_json: bool, quiet: bool, **arguments: Any) -> None:
    """Merge the parts that reshard pack --part has written to OUT into a checkpoint.

    OUT is a folder or s3://BUCKET/PREFIX, and all that is required. No tensors are copied. If it is killed, run it
    again. --force is not supported in a bucket.

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
