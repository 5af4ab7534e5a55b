"""Jobs on this machine: exec torchrun. No torch."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

import click

from manifests.command.interpreter import module_command, safe_environment
from manifests.command.signals import deferred
from runner.launch.run_folder import RunFolder, check_free, claim_log_dir
from runner.launch.schedulers.local import record_here
from runner.launch.supervisor import stopping
from runner.preflight.preflight import check_torch
from runner.rundir.exit_report import AGENT
from runner.rundir.records import make_log_dir

# This machine's ranks meet at its loopback address: torchrun would take its full name, which may resolve nowhere.
ALONE = ("--standalone", "--local-addr", "localhost")


def launch_here(
    arguments: Sequence[str], *, nproc_per_node: int, dry_run: bool, run: RunFolder | None = None,
    worker: str = "runner.train", quiet: bool = False, meeting: Sequence[str] = ALONE,
) -> None:  # fmt: skip
    """Replace this process by torchrun with so many workers. A training `run` is recorded in its folder.

    `meeting` has the flags of torchrun that say where nodes meet.
    """
    check_torch()
    os.getcwd()  # where ranks start: a deleted folder is refused before anything is written
    command = [
        *module_command("runner.launch.agent.agent"), *meeting, "--nproc-per-node", str(nproc_per_node),
        *(stopping(run.options.timeout_s) if run else ()), "-m", worker, *arguments,
    ]  # fmt: skip
    if dry_run:
        click.echo(shlex.join(command))
        return
    if run is not None:
        make_log_dir(run.path)
        check_free(run.path)  # asks a scheduler, which may not answer, before signals are deferred
    with deferred():  # the process on record always writes how it ended
        if run is not None:
            with claim_log_dir(run.path):
                run.begin()
                run.record(record_here(run.path, run.name))
        if not quiet:
            ranks = "1 rank" if nproc_per_node == 1 else f"{nproc_per_node} ranks"
            click.echo(f"starting {ranks}" + (f"; log in {run.path}" if run is not None else ""), err=True)
        sys.stdout.flush()
        # torchrun takes flags that are not given from PET_*, which Kubeflow sets in the pods of its own jobs.
        environment = {name: value for name, value in safe_environment().items() if not name.startswith("PET_")}
        # The process stays. torch and others read their own files in the encoding of the locale.
        environment |= {AGENT: str(os.getpid()), "PYTHONUTF8": "1"}
        os.execve(sys.executable, command, environment)
