"""commit, and the flags with which pack writes one part or submits all of them."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from manifests.errors import UsageError
from reshard.cli import options
from reshard.cli.verb import Verb
from stores.address import is_url

if TYPE_CHECKING:
    from reshard.packing.prepare import PreparedPack
    from stores.open import Address

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
_LEFT_OUT = (
    "part",
    "num_parts",
    "scheduler",
    "image",
    "mounts",
    "partition",
    "account",
    "time",
    "sbatch_arg",
    "dry_run",
)
_SBATCH = ("--partition", "--account", "--time")  # of sbatch, which are flags of reshard, too


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """The parts of a pack and their commit, for a `scheduler`.

    Slurm gets options of `sbatch`, a Job of Kubernetes an `image` and `mounts`. `command` has the arguments of reshard
    without those that divide the pack.
    """

    num_parts: int
    scheduler: str
    sbatch: tuple[str, ...]
    image: str | None
    mounts: tuple[str, ...]
    command: tuple[str, ...]

    def submit(self, source: str, prepared: PreparedPack, *, dry_run: bool, as_json: bool) -> None:
        """Submit the jobs of a plan that can be packed, or print what would be submitted.

        Raises:
            UsageError: options conflict, pods could not run it, or there are more parts than shards.
            OutputError: `out` exists or cannot be written.
            LaunchError: the scheduler refuses the jobs.
            InputError: its command is not installed here.
        """
        from reshard.plans.partition import check_num_parts

        options = prepared.options
        check_num_parts("--parts", self.num_parts, prepared.shards)
        out, force = options.out, options.force
        if self.scheduler == "job":
            self._submit_pods(source, out, force=force, dry_run=dry_run, as_json=as_json)
            return
        from reshard.packing import slurm_array as slurm

        if not is_url(out):
            slurm.check_out(Path(out), force=force)
        commit = ("commit", str(out), *(["--force"] if force else []))
        job = slurm.PackJob(num_parts=self.num_parts, pack=self.command, commit=commit, options=self.sbatch)
        if dry_run:
            click.echo(json.dumps(slurm.show_json(job)) + "\n" if as_json else slurm.show(job), nl=False)
            return
        parts, last = slurm.submit(job)
        if as_json:
            numbers = {"parts": {"job": parts}, "commit": {"job": last}}
            click.echo(json.dumps({"version": 1, "num_parts": job.num_parts, **numbers}))
        else:
            click.echo(
                f"submitted {job.num_parts} parts as job {parts}\nsubmitted a commit that depends on them as {last}"
            )

    def _submit_pods(self, source: str, out: Address, *, force: bool, dry_run: bool, as_json: bool) -> None:
        from reshard.packing import kubernetes_job
        from reshard.packing.slurm_array import check_out

        if force:  # a pod that is started again cannot tell old from new
            problem, hint = "is not supported with --scheduler job", "remove the old output first"
            raise UsageError("--force", problem, hint, code="options.conflict")
        if not is_url(out):
            check_out(Path(out), force=False)
        pods = kubernetes_job.PackPods(
            num_parts=self.num_parts, pack=self.command, source=source, out=out, image=self.image, mounts=self.mounts
        )
        pods.check()
        text = kubernetes_job.render(pods)
        if dry_run:
            document = {"version": 1, "num_parts": pods.num_parts, "script": text}
            click.echo(json.dumps(document) if as_json else text, nl=as_json)
            return
        name = kubernetes_job.submit(pods)
        done = {"version": 1, "num_parts": pods.num_parts, "parts": {"job": name}}
        click.echo(json.dumps(done) if as_json else f"submitted {pods.num_parts} parts and their commit as {name}")


def flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags that divide a pack: the command receives `part`, a Part, and `submission`, a Submission."""

    @functools.wraps(command)
    def gathered(
        *, part: str | None, num_parts: int | None, scheduler: str | None,
        image: str | None, mounts: tuple[str, ...], partition: str | None, account: str | None, time: str | None,
        sbatch_arg: tuple[str, ...], **others: Any,
    ) -> Any:  # fmt: skip
        named_options = zip(_SBATCH, (partition, account, time), strict=True)
        named = (f"{flag}={value and shlex.quote(value)}" for flag, value in named_options if value is not None)
        sbatch = (*named, *sbatch_arg)
        if sbatch:
            from reshard.packing.slurm_array import check_options

            check_options(sbatch)
        _check(part, num_parts, scheduler, sbatch, {"--image": image, "--mount": mounts})
        arguments = command_line() if part or num_parts else ()
        submission = None
        if num_parts and scheduler:
            submission = Submission(
                num_parts=num_parts, scheduler=scheduler, sbatch=sbatch, image=image, mounts=mounts, command=arguments
            )
        part_of_pack = None
        if part is not None:
            from reshard.plans.partition import parse_part

            part_of_pack = parse_part(part, ("reshard", *arguments))
        return command(part=part_of_pack, submission=submission, **others)

    for flag in reversed(_FLAGS):
        gathered = flag(gathered)
    return gathered


def _check(
    part: str | None, num_parts: int | None, scheduler: str | None, sbatch: tuple[str, ...], pods: Mapping[str, object]
) -> None:
    """Refuse flags that conflict, before a source is opened."""
    if part is not None and num_parts is not None:
        problem = "conflicts with --parts: it packs one part here, --parts submits all of them"
        raise UsageError("--part", problem, "leave one of the two out", code="options.conflict")
    if (num_parts is None) != (scheduler is None):
        given, lacking = ("--parts", "--scheduler") if scheduler is None else ("--scheduler", "--parts")
        hint = "use --parts 8 --scheduler slurm, or --part 1/8"
        raise UsageError(given, f"requires {lacking}", hint, code="options.needs-scheduler")
    for flag, value in pods.items():
        if value and scheduler != "job":
            raise UsageError(flag, "requires --scheduler job", "leave it out", code="options.needs-scheduler")
    if sbatch and scheduler != "slurm":
        flag = sbatch[0].partition("=")[0]
        flag = flag if flag in _SBATCH else "--sbatch-arg"
        raise UsageError(flag, "requires --scheduler slurm", "leave it out", code="options.needs-scheduler")


def command_line() -> tuple[str, ...]:
    """Return the arguments of the running command, without those that divide it."""
    context = click.get_current_context()
    arguments = [context.info_name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name in _LEFT_OUT or source is not click.core.ParameterSource.COMMANDLINE:
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


@click.command(cls=Verb)
@click.argument("out", type=click.Path(), callback=lambda _, __, text: options.address(text, "OUT"))
@click.option("--wait", is_flag=True, help="Wait until all parts are written.")
@options.force
@options.as_json
@options.quiet
def commit(out: Address, wait: bool, force: bool, as_json: bool, quiet: bool) -> None:
    """Merge the parts that reshard pack --part has written to OUT into a checkpoint.

    OUT is a folder or s3://BUCKET/PREFIX, and all that is required. No tensors are copied. If it is killed, run it
    again. --force is not supported in a bucket.

    \b
    Example:
      reshard pack ./Llama-3.2-1B --layout pp=2 --out ./Llama-3.2-1B-pp2 --part 1/2
      reshard pack ./Llama-3.2-1B --layout pp=2 --out ./Llama-3.2-1B-pp2 --part 2/2
      reshard commit ./Llama-3.2-1B-pp2
    """
    from reshard.api.commit import commit as run
    from reshard.report.done import pack_json, pack_text

    done = run(out, force=force, wait=wait)
    options.print_result(quiet, as_json, lambda: pack_json(done), lambda: pack_text(done))
