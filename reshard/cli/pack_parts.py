"""commit, and what pack does with --part and --parts."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from manifests.errors import UsageError
from reshard.cli import options
from stores.address import is_url

if TYPE_CHECKING:
    from reshard.plans.partition import Part

__all__ = ["Division", "command_line", "commit", "flags", "part_of", "submit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """How a pack is divided: one `part` is packed here, or `num_parts` are submitted with `sbatch` options."""

    part: str | None
    num_parts: int | None
    scheduler: str | None
    sbatch: tuple[str, ...]

    def check(self, out: str | Path, *, virtual: bool, verify_source: bool) -> None:
        """Refuse what makes no sense, before a source is opened.

        Raises:
            UsageError: naming the flag.
        """
        flag = "--part" if self.part is not None else "--parts"
        if self.part is not None and self.num_parts is not None:
            raise UsageError(
                "--part",
                "packs one part here, --parts submits all",
                "leave one of the two out",
                code="options.conflict",
            )
        if (self.num_parts is None) != (self.scheduler is None):
            given, lacking = ("--parts", "--scheduler") if self.scheduler is None else ("--scheduler", "--parts")
            raise UsageError(
                given,
                f"needs {lacking} beside it",
                "say --parts 8 --scheduler slurm, or --part 1/8",
                code="options.needs-scheduler",
            )
        if self.sbatch and self.scheduler is None:
            flag = self.sbatch[0].partition("=")[0]
            flag = flag if flag in _NAMED else "--sbatch-arg"
            raise UsageError(flag, "is for --scheduler slurm", "leave it out", code="options.needs-scheduler")
        divided = self.part is not None or self.num_parts is not None
        if divided and verify_source:
            problem = "no part reads whole files"
            raise UsageError("--verify-source", problem, "pack without --part", code="options.conflict")
        if divided and is_url(out):
            hint = "pack into a folder, and its manifest into the bucket"
            raise UsageError(
                flag, "parts meet in a folder, which a bucket does not have", hint, code="options.parts-in-bucket"
            )
        if divided and virtual:
            raise UsageError(
                flag, "a virtual pack has no bytes to divide", "leave one of the two out", code="options.conflict"
            )


def part_of(division: Division) -> Part | None:
    """Give the part that is to be packed here, if one is, and the command that packs the others."""
    from reshard.plans.partition import parse_part

    command = ("reshard", *command_line())
    return None if division.part is None else replace(parse_part(division.part), command=command)


_FLAGS = (
    click.option("--part", metavar="I/N", help="Pack this part of N alone; reshard commit makes a whole of them."),
    click.option("--parts", "num_parts", type=click.IntRange(1, 512), metavar="N", help="Submit N parts and a commit."),
    click.option("--scheduler", type=click.Choice(["slurm"]), help="Where to submit them."),
    click.option("--partition", metavar="NAME", help="Slurm's partition."),
    click.option("--account", metavar="NAME", help="Whom Slurm charges."),
    click.option("--time", metavar="TIME", help="Slurm's limit on each part's time: 1:00:00."),
    click.option("--sbatch-arg", multiple=True, metavar="X", help="Another option for sbatch; may be repeated."),
)
_NAMED = ("--partition", "--account", "--time")
_OWN = ("--array", "-a", "--wrap", "--requeue", "--no-requeue", "--open-mode", "--dependency", "-d")
_OURS = ("part", "num_parts", "scheduler", "partition", "account", "time", "sbatch_arg")


def flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags that divide a pack; the command gets them as `division`, a Division."""

    @functools.wraps(command)
    def gathered(
        *, part: str | None, num_parts: int | None, scheduler: str | None, partition: str | None,
        account: str | None, time: str | None, sbatch_arg: tuple[str, ...], **others: Any,
    ) -> Any:  # fmt: skip
        given = dict(zip(_NAMED, (partition, account, time), strict=True))
        named = (f"{flag}={value and shlex.quote(value)}" for flag, value in given.items() if value is not None)
        sbatch = (*named, *sbatch_arg)
        for option in sbatch:
            if not option.isprintable() or not option.startswith("-") or option.endswith("="):
                raise UsageError(
                    "--sbatch-arg",
                    f"expected an option of sbatch, found {option[:80]!r}",
                    code="options.sbatch-argument",
                )
            try:
                words = shlex.split(option)
            except ValueError as error:
                raise UsageError(
                    "--sbatch-arg", f"{option[:80]!r}: {error}", "close its quotes", code="options.sbatch-argument"
                ) from error
            # sbatch takes a word that is no flag, and no flag's value, for its script.
            if len(words) > 2 or (len(words) == 2 and ("=" in words[0] or words[1][:1] in ("-", "#"))):
                raise UsageError(
                    "--sbatch-arg",
                    f"expected one option, found {option[:80]!r}",
                    "quote a value with spaces",
                    code="options.sbatch-argument",
                )
            if words[0].partition("=")[0] in _OWN:
                raise UsageError(
                    "--sbatch-arg",
                    f"{option!r} is not for you to say: the parts are an array of our own",
                    code="options.sbatch-argument",
                )
        division = Division(part=part, num_parts=num_parts, scheduler=scheduler, sbatch=sbatch)
        return command(division=division, **others)

    for flag in reversed(_FLAGS):
        gathered = flag(gathered)
    return gathered


def command_line(leaving_out: Collection[str] = ()) -> tuple[str, ...]:
    """Give the arguments of the command that runs now, without those that divide it."""
    context = click.get_current_context()
    said = [context.info_name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name in (*_OURS, *leaving_out) or source is not click.core.ParameterSource.COMMANDLINE:
            continue
        value = context.params.get(name, True)  # of a flag that acts by itself, its command has none
        if isinstance(parameter, click.Argument):
            said.append(str(value))
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            said.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            values = value if isinstance(value, tuple) else (value,)
            said += [word for each in values for word in (parameter.opts[0], str(each))]
    return tuple(said)


def submit(division: Division, out: str | Path, *, force: bool, dry_run: bool, as_json: bool) -> None:
    """Hand the parts and their commit to Slurm, or print what would be handed over.

    Raises:
        UserError: nothing could be written to `out`, there is no Slurm here, or it refuses the jobs.
    """
    from reshard.operations import slurm_array as slurm

    slurm.check_out(Path(out), force=force)
    job = slurm.PackJob(
        num_parts=division.num_parts or 1,
        pack=command_line(leaving_out=("dry_run",)),
        commit=("commit", str(out), *(["--force"] if force else [])),
        options=division.sbatch,
    )
    if dry_run:
        click.echo(json.dumps(slurm.show_json(job)) + "\n" if as_json else slurm.show(job), nl=False)
        return
    parts, ending = slurm.submit(job)
    if as_json:
        numbers = {"parts": {"job": parts}, "commit": {"job": ending}}
        click.echo(json.dumps({"version": 1, "num_parts": job.num_parts, **numbers}))
    else:
        click.echo(f"submitted {job.num_parts} parts: {parts}\nand the commit that waits for them: {ending}")


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@options.force
@options.as_json
@options.quiet
def commit(out: Path, force: bool, as_json: bool, quiet: bool) -> None:
    """Make a checkpoint of the parts that reshard pack --part has written to OUT.

    It needs nothing but OUT, moves no tensor, and can be run again after a kill.

    \b
    Example:
      reshard pack ./Llama-3.2-1B --layout pp=2 --out ./Llama-3.2-1B-pp2 --part 1/2
      reshard pack ./Llama-3.2-1B --layout pp=2 --out ./Llama-3.2-1B-pp2 --part 2/2
      reshard commit ./Llama-3.2-1B-pp2
    """
    if is_url(str(out).replace(":/", "://", 1)):
        raise UsageError(
            "OUT",
            "parts meet in a folder, which a bucket does not have",
            "name the folder of the parts",
            code="options.parts-in-bucket",
        )
    from manifests.store import read_manifest
    from reshard.operations.pack_distributed import commit as run
    from reshard.operations.pack_result import PackResult
    from reshard.report.done import pack_json, pack_text

    manifest = run(out, force=force)
    if manifest is None:
        manifest = read_manifest(out)
        if not quiet:
            click.echo(f"{out} is committed already: no parts of a pack wait for it", err=True)
    done = PackResult(manifest=manifest, out=out)
    options.say_done(quiet, as_json, lambda: pack_json(done), lambda: pack_text(done))
