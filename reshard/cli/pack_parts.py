"""commit, and the flags with which pack writes one part or submits all of them."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from reshard.cli import options
from reshard.cli.verb import Verb

if TYPE_CHECKING:
    from reshard.packing.divide import Division
    from reshard.packing.kubernetes_job import PackPods
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


def flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags that divide a pack, which the command receives as `division`, a Division."""

    @functools.wraps(command)
    def gathered(
        *, part: str | None, num_parts: int | None, scheduler: str | None,
        image: str | None, mounts: tuple[str, ...], partition: str | None, account: str | None, time: str | None,
        sbatch_arg: tuple[str, ...], **others: Any,
    ) -> Any:  # fmt: skip
        from reshard.packing.divide import NAMED_OPTIONS, Division
        from reshard.plans.partition import parse_part

        given = zip(NAMED_OPTIONS, (partition, account, time), strict=True)
        named = (f"{flag}={value and shlex.quote(value)}" for flag, value in given if value is not None)
        arguments = command_line()
        division = Division(
            part=None if part is None else parse_part(part, ("reshard", *arguments)),
            num_parts=num_parts,
            scheduler=scheduler,
            sbatch=(*named, *sbatch_arg),
            image=image,
            mounts=mounts,
            command=arguments,
        )
        return command(division=division, **others)

    for flag in reversed(_FLAGS):
        gathered = flag(gathered)
    return gathered


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
            arguments += [word for each in values for word in (parameter.opts[0], str(each))]
    return tuple(arguments)


def submit(division: Division, source: str, out: Address, *, force: bool, dry_run: bool, as_json: bool) -> None:
    """Submit the parts and their commit, or print what would be submitted.

    Raises:
        UsageError: see `Division.pods`.
        OutputError: `out` exists or cannot be written.
        LaunchError: the scheduler refuses the jobs.
        InputError: its command is not installed here.
    """
    if division.scheduler == "job":
        _submit_pods(division.pods(source, out, force=force), dry_run=dry_run, as_json=as_json)
        return
    from reshard.packing import slurm_array as slurm

    job = division.job(out, force=force)
    if dry_run:
        click.echo(json.dumps(slurm.show_json(job)) + "\n" if as_json else slurm.show(job), nl=False)
        return
    parts, commit = slurm.submit(job)
    if as_json:
        numbers = {"parts": {"job": parts}, "commit": {"job": commit}}
        click.echo(json.dumps({"version": 1, "num_parts": job.num_parts, **numbers}))
    else:
        click.echo(
            f"submitted {job.num_parts} parts as job {parts}\nsubmitted a commit that depends on them as {commit}"
        )


def _submit_pods(pods: PackPods, *, dry_run: bool, as_json: bool) -> None:
    from reshard.packing import kubernetes_job

    text = kubernetes_job.render(pods)
    if dry_run:
        document = {"version": 1, "num_parts": pods.num_parts, "script": text}
        click.echo(json.dumps(document) if as_json else text, nl=as_json)
        return
    name = kubernetes_job.submit(pods)
    done = {"version": 1, "num_parts": pods.num_parts, "parts": {"job": name}}
    click.echo(json.dumps(done) if as_json else f"submitted {pods.num_parts} parts and their commit as {name}")


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
    from reshard.packing.parts import commit as run
    from reshard.packing.result import PackResult
    from reshard.report.done import pack_json, pack_text

    done = PackResult(manifest=run(out, force=force, wait=wait), out=out)
    options.print_result(quiet, as_json, lambda: pack_json(done), lambda: pack_text(done))
