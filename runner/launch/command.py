"""`runner launch`: read its flags and a job file, check them, and start or submit the ranks. No torch."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from manifests.command.schedulers import may_be_submitted
from manifests.command.signals import deferred
from manifests.command.sizes import read_size
from manifests.errors import UsageError, UserError
from manifests.models.memory import MemoryEstimate
from manifests.models.training import HostMemory
from manifests.schedules.actions import Table
from runner.bundle.cache_folder import check_cacheable
from runner.bundle.packed import Packed, name_of, opened
from runner.config.command import BeforeTraining
from runner.config.declared import LocalPath, WholeNumber
from runner.config.flags import Device, TrainOptions, flag_of, parse_training, unwritten
from runner.config.memory import planned_memory
from runner.config.parallel_dims import ParallelDims
from runner.launch.here import launch_here
from runner.launch.job import FlagKind, Job, read_environment, read_job_file, shown_address
from runner.launch.nodes import (
    check_groups,
    check_host_memory,
    check_memory,
    check_ranks,
    describe_nodes,
    describe_plan,
    parse_nnodes,
)
from runner.launch.run_folder import RunFolder, choose_folder
from runner.preflight.combinations import balance_flags, part_of, timetable_of
from runner.preflight.preflight import (
    check_beginning,
    check_device,
    check_request,
    check_resume,
    has_gpu,
    is_cpu_build,
)
from runner.rundir.records import SCHEDULERS

_COMMAND = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
_LIMIT_S = 20
_PLAIN_FIELDS = ("partition", "account", "qos", "time", "signal", "restarts", "requeue")
_CLUSTERS = ("env", "image", "mount", "sbatch_arg", "name", "follow", *_PLAIN_FIELDS)
_GROUPS = {
    "What and where": ("job", "nproc_per_node", "gpu_memory", "log_dir", "stage_to_local", "quiet", "dry_run"),
    "Clusters": ("scheduler", "nnodes", "name", "restarts", "follow", "env", "image", "mount"),
    "Slurm": ("partition", "account", "qos", "time", "signal", "requeue", "sbatch_arg"),
}


def _kind_of(option: click.Option) -> FlagKind:
    if option.is_flag:
        return "switch"
    return "several" if option.multiple else "one"


def _read_job(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Use the values of a job file as defaults of the flags."""
    if path is None:
        return
    options = [param for param in context.command.params if isinstance(param, click.Option)]
    kinds = {option.opts[-1].removeprefix("--"): _kind_of(option) for option in options if option.name != "job"}
    values = read_job_file(path, {**kinds, "manifest": "one"})
    context.obj = values.pop("training")
    context.default_map = values


@click.command(cls=BeforeTraining, groups=_GROUPS)
@click.argument("manifest", type=click.Path(), metavar="[MANIFEST]", required=False)
@click.option(
    "--job", type=click.Path(path_type=Path), is_eager=True, expose_value=False, callback=_read_job, metavar="FILE",
    help="TOML file with flags, manifest and a [training] table; flags on the command line override it.",
)  # fmt: skip
@click.option("--scheduler", type=click.Choice(SCHEDULERS), default="local", help="Where the ranks are started.")
@click.option("--nnodes", metavar="N", default="1", help="Nodes of the job.")
@click.option(
    "--nproc-per-node", type=WholeNumber(min=1), metavar="N",
    show_default="the manifest's pipeline ranks, over the nodes", help="Ranks to start on each node.",
)  # fmt: skip
@click.option(
    "--gpu-memory",
    metavar="SIZE",
    help="Memory of each GPU, such as 80GB (which is 80GiB): refuse stages whose weights, gradients and optimizer "
    "state exceed it, note those that exceed it with activations.",
)
@click.option(
    "--env", multiple=True, metavar="K[=V]", help="Environment variable for the ranks; without V, its value here."
)
@click.option("--image", metavar="NAME", help="Container image (Slurm: with pyxis).")
@click.option("--mount", multiple=True, metavar="FROM:TO", help="Mount a folder, or a volume claim, in the container.")
@click.option("--partition", metavar="NAME", help="Slurm partition.")
@click.option("--account", metavar="NAME", help="Slurm account.")
@click.option("--qos", metavar="NAME", help="Slurm quality of service.")
@click.option("--time", metavar="LIMIT", help="Slurm time limit, such as 4:00:00.")
@click.option("--sbatch-arg", multiple=True, metavar="ARG", help="Another flag for sbatch, such as --gpus-per-node=8.")
@click.option("--signal", metavar="USR2@SECONDS", help="Save and stop this many seconds before the time limit.")
@click.option("--restarts", type=WholeNumber(min=0), default=0, metavar="N", help="Restart all ranks up to N times.")
@click.option("--requeue", is_flag=True, help="Requeue the job when it was stopped by a signal.")
@click.option("--name", metavar="NAME", show_default="the manifest's folder", help="Name of the job.")
@click.option("--log-dir", type=LocalPath(), metavar="DIR", help="Same as --log-dir after --.")
@click.option(
    "--stage-to-local", type=click.Path(path_type=Path), metavar="DIR", help="Same as --stage-to-local after --."
)
@click.option("--quiet", is_flag=True, help="Same as --quiet after --.")
@click.option("--follow", is_flag=True, help="Print the output of the job until it ends.")
@click.option("--dry-run", is_flag=True, help="Print what would be run or submitted, and stop.")
def launch(
    manifest: str | None, scheduler: str, nnodes: str,
    nproc_per_node: int | None, gpu_memory: str | None, follow: bool, dry_run: bool, log_dir: Path | None,
    stage_to_local: Path | None, name: str | None, quiet: bool, **cluster_flags: Any,
) -> None:  # fmt: skip
    """Train the model of MANIFEST: on this machine, under torchrun, or on the nodes of a cluster.

    Training flags follow --; "runner launch -- --help" lists them. --nnodes above 1, --env, --image, --mount,
    --restarts, --name and --follow require --scheduler slurm or jobset, and the Slurm flags require slurm.

    \b
    Examples:
      runner launch ./Llama-3.2-1B-pp2 --nproc-per-node 2 -- --steps 100 --data text/
      runner launch --job job.toml --scheduler slurm --nnodes 4 --dry-run
    """
    context = click.get_current_context()
    if not manifest:
        raise UsageError(
            "MANIFEST",
            "is missing",
            "runner launch DIR/manifest.json, or manifest = … in the job file",
            code="launch.no-manifest",
        )
    training = training_words(context, quiet=quiet, log_dir=log_dir, stage_to_local=stage_to_local)
    options, num_nodes = _parse_training(context, training), parse_nnodes(nnodes)
    gpu_nbytes = None if gpu_memory is None else read_size("--gpu-memory", gpu_memory)
    if scheduler == "local":
        _refuse_clusters(context, num_nodes)
        name = None  # a job file's has no effect here
    with opened(manifest, is_staged=options.stage_to_local is not None) as (address, launched):
        if is_chosen := "log_dir" not in options.given:
            training += ("--log-dir", str(choose_folder(options, name or name_of(launched.location))))
        if added := balance_flags(launched, options):
            training += added
            if not options.quiet:
                click.echo(f"note: {' '.join(added)} is added: it balances experts of new weights", err=True)
        options = parse_training(training)
        num_per_node = nproc_per_node or max(1, launched.manifest.layout.num_ranks // num_nodes)
        degrees = _check_placement(launched, options, num_nodes, num_per_node, gpu_nbytes)
        if scheduler == "local":
            _check_here(launched, options, degrees, num_per_node, gpu_nbytes, dry_run=dry_run)
        else:
            check_resume(launched, options)
            if not options.quiet:
                click.echo(describe_nodes(launched.manifest, num_nodes, num_per_node), err=True)
    run = RunFolder(
        path=options.log_dir if scheduler == "local" else options.log_dir.resolve(),
        name=name or name_of(launched.location),
        manifest=address,
        digest=launched.read.digest,
        options=options,
        is_chosen=is_chosen,
    )
    if dry_run and not options.quiet:
        for line in _plan(launched, options, degrees, is_here=scheduler == "local"):
            click.echo(line, err=True)
    start: Callable[[], None]
    if scheduler == "local":
        start = partial(
            launch_here, (address, *training), nproc_per_node=num_per_node, dry_run=dry_run, run=run,
            quiet=options.quiet,
        )  # fmt: skip
    else:
        job = Job(
            manifest=shown_address(address, manifest, cluster_flags["mount"]),
            training=training,
            name=name_of(launched.location).lower() if name is None else name,
            log_dir=run.path,
            nnodes=num_nodes,
            nproc_per_node=num_per_node,
            environment=read_environment(cluster_flags["env"]),
            image=cluster_flags["image"],
            mounts=cluster_flags["mount"],
            sbatch_args=cluster_flags["sbatch_arg"],
            **{field: cluster_flags[field] for field in _PLAIN_FIELDS},
        )
        start = partial(_submit, job, scheduler, run, follow=follow, dry_run=dry_run)
    try:
        start()
    except UserError as error:
        # A launch of the same second may have got the folder meanwhile: another one is chosen then.
        is_taken = is_chosen and error.code in ("launch.folder-in-use", "launch.log-folder-in-use")
        if not is_taken or choose_folder(options, run.name).name == run.path.name:
            raise
        context.invoke(context.command.callback, **context.params)  # type: ignore[arg-type]  # this function


def _parse_training(context: click.Context, training: tuple[str, ...]) -> TrainOptions:
    try:
        return parse_training(training)
    except UsageError as error:
        unknown = error.__cause__
        flags = {flag for param in context.command.params for flag in (*param.opts, *param.secondary_opts)}
        if not isinstance(unknown, click.NoSuchOption) or unknown.option_name not in flags:
            raise
        name = unknown.option_name
        hint = f"put it before --: runner launch MANIFEST {name} … -- …"
        raise UsageError(name, "is a flag of runner launch", hint, code="launch.flag-order") from error


def training_words(context: click.Context, *, quiet: bool, **paths: Path | None) -> tuple[str, ...]:
    """Return the arguments for the ranks: flags of the job file that are not overridden, then those given."""
    of_file, written = dict(context.obj or {}), list(context.meta["training"])
    for name, path in paths.items():
        words = () if path is None else (flag_of(name), str(path))
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            written += words
        elif words:
            of_file[flag_of(name)] = words
    if quiet:
        of_file[flag_of("quiet")] = (flag_of("quiet"),)
    return (*unwritten(of_file, written), *written)


def _check_placement(
    launched: Packed, options: TrainOptions, nnodes: int, nproc_per_node: int, gpu_nbytes: int | None
) -> ParallelDims:
    """Return the parallel degrees, after checking them against the manifest, the options, the nodes and the GPUs."""
    manifest = launched.manifest
    if nnodes > 1:
        check_ranks(manifest.layout.num_ranks, nnodes, nproc_per_node)
    degrees = check_request(launched, options, nnodes * nproc_per_node)
    for sentence in () if options.quiet else check_groups(degrees, nnodes, nproc_per_node):
        click.echo(f"note: {sentence}", err=True)
    if options.stage_to_local is not None:
        check_cacheable(manifest, launched.where)
    if gpu_nbytes is not None:
        _check_memory(launched, options, degrees, gpu_nbytes)
    return degrees


def _check_here(
    launched: Packed, options: TrainOptions, degrees: ParallelDims, nproc_per_node: int, gpu_nbytes: int | None,
    *, dry_run: bool,
) -> None:  # fmt: skip
    """Check that this machine has the GPUs or the memory for its ranks, and all inputs that they start from.

    The command of a dry run may be for another machine: it needs no GPU or memory here.
    """
    if not dry_run:
        check_device(options.device)
    memories = memories_gib(options.device)
    check_gpus(len(memories), nproc_per_node)
    if memories and gpu_nbytes is None:
        _check_memory(launched, options, degrees, int(min(memories[:nproc_per_node]) * 2**30), "nvidia-smi")
    check_beginning(launched, options, degrees, dry_run=dry_run)
    is_known = options.resume.source is None  # a checkpoint may recall other dtypes and batch sizes
    if not dry_run and is_known and not memories and (options.device == "cpu" or not has_gpu()):
        check_host_memory(_plan_memory(launched, options, degrees, host_memory="compact"), degrees.per_stage)


def _check_memory(
    launched: Packed, options: TrainOptions, degrees: ParallelDims, gpu_nbytes: int, where: str = "--gpu-memory"
) -> None:
    note = check_memory(_plan_memory(launched, options, degrees), gpu_nbytes, where)
    if note and not options.quiet:
        click.echo(f"note: {note}", err=True)


def _plan_memory(
    launched: Packed, options: TrainOptions, degrees: ParallelDims, *, host_memory: HostMemory | None = None
) -> MemoryEstimate:
    placement = launched.manifest.placement
    table = Table(placement=placement, num_microbatches=0, ranks=((),) * placement.num_ranks)
    if options.resume.source is None:  # a checkpoint may recall another batch size
        _, table = _timetable(launched, options, degrees)
    shape, modules, config = launched.shape, launched.stage_modules, launched.config
    return planned_memory(shape, modules, table, options, degrees, host_memory=host_memory, config=config)


def _timetable(launched: Packed, options: TrainOptions, degrees: ParallelDims) -> tuple[str, Table]:
    timetable = timetable_of(launched.manifest, options, degrees)
    return timetable.name, timetable.planned(part_of(options.batch, degrees).num_microbatches)


def _plan(launched: Packed, options: TrainOptions, degrees: ParallelDims, *, is_here: bool) -> Iterator[str]:
    """Yield the lines of the job's plan; where a checkpoint recalls the batch, only where it resumes."""
    if options.resume.source is not None:
        yield f"resumes: --resume {options.resume.source}; batch, learning rate and dtypes are those of the checkpoint"
        return
    is_cpu = options.device == "cpu" or (is_here and options.device == "auto" and not has_gpu())
    memory = _plan_memory(launched, options, degrees, host_memory="fast" if is_cpu else None)
    name, table = _timetable(launched, options, degrees)
    yield from describe_plan(launched, options, degrees, name, table, memory, "cpu" if is_cpu else "gpu")


def _refuse_clusters(context: click.Context, num_nodes: int) -> None:
    sources = {ParameterSource.COMMANDLINE}
    if (
        context.get_parameter_source("scheduler") is ParameterSource.DEFAULT
    ):  # with --scheduler local, a job file is tried here on purpose
        sources.add(ParameterSource.DEFAULT_MAP)
    on = [name for name in _CLUSTERS if context.params[name] not in (False, ())]  # 0 restarts count as off
    given = [name for name in on if context.get_parameter_source(name) in sources]
    if num_nodes > 1:
        given.insert(0, "nnodes")
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise UsageError(
            flag,
            f"requires --scheduler slurm{'' if given[0] in _GROUPS['Slurm'] else ' or jobset'}",
            "without a scheduler, all ranks run on this machine",
            code="launch.scheduler-flag",
        )
    unused = [flag_of(name) for name in on if context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP]
    if unused:
        click.echo(f"note: the job file's {', '.join(unused)} have no effect on this machine", err=True)


def _submit(job: Job, scheduler: str, run: RunFolder, *, follow: bool, dry_run: bool) -> None:
    from runner.launch.run_folder import claim_log_dir
    from runner.launch.schedulers.table import cluster_of
    from runner.launch.verbs import follow_job
    from runner.rundir.records import make_log_dir

    cluster = cluster_of(scheduler)
    rendered = cluster.render(job)
    if dry_run:
        click.echo(rendered, nl=False)
        return
    make_log_dir(job.log_dir)
    with claim_log_dir(job.log_dir), deferred():  # a submitted job is always on record
        aside = run.begin()
        try:
            record = cluster.submit(job)
        except UserError as error:
            if aside is not None and not may_be_submitted(error):
                run.restore(aside)
            raise
        try:
            run.record(record)
        except BaseException as stopped:  # the next launch would not know of it
            try:
                cluster.cancel(record, is_forced=False)
            except UserError as error:
                hint = f"{scheduler} job {record.id} is submitted, and not on record: cancel it yourself"
                raise error.changed(hint=hint) from stopped
            raise
    status = shlex.join(["runner", "status", str(job.log_dir)])
    click.echo(f"submitted {record.name} as {scheduler} job {record.id}; {status}")
    if follow:
        sys.exit(follow_job(record, Path(record.output), lambda text: click.echo(text, nl=False), job.log_dir))


def memories_gib(device: Device, environment: Mapping[str, str] = os.environ) -> tuple[float, ...]:
    """Return the memory of each GPU that ranks here would train on; nothing where there is none or it is unknown."""
    if device == "cpu" or is_cpu_build():
        return ()
    try:
        done = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
        rows = [line.split(", ") for line in done.stdout.splitlines()]
        gpus = [(index, uuid, int(mib) / 2**10) for index, uuid, mib in rows]
    except (OSError, subprocess.SubprocessError, ValueError):  # no driver, or unknown output
        return ()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    wanted = [index for index, _, _ in gpus]
    if visible is not None:
        wanted = [word.strip() for word in visible.split(",") if word.strip()]
    chosen = [gib for word in wanted for index, uuid, gib in gpus if word == index or uuid.startswith(word)]
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and any(map(str.isdecimal, wanted)):
        # CUDA numbers the fastest first, which may not be this order: only what no choice of so many has is too much.
        chosen = sorted((gib for _, _, gib in gpus), reverse=True)[: len(chosen)]
    return tuple(chosen)


def check_gpus(count: int, nproc_per_node: int) -> None:
    """Check that each rank of this machine has a GPU."""
    if 0 < count < nproc_per_node:
        raise UsageError(
            "--nproc-per-node",
            f"{nproc_per_node} ranks require a GPU each, found {count} GPUs",
            f"reshard pack MANIFEST --layout pp={count}, or train on the CPU with --device cpu after --",
            code="launch.too-few-gpus",
        )
