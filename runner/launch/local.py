"""One machine: become torchrun; and whether a request fits a manifest. No torch."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import click

from manifests.errors import InputError, UserError
from manifests.schema import Manifest
from runner.degrees import Degrees
from runner.options import TrainOptions
from runner.recipe import check_trainable
from runner.refusals import check_combination, combine, share_of
from runner.timetable import choose_timetable

__all__ = ["check_request", "check_world", "launch_here"]


def launch_here(arguments: Sequence[str], *, nproc_per_node: int, dry_run: bool, worker: str = "runner.worker") -> None:
    """Replace this process by torchrun with so many workers; see `check_request`.

    Raises:
        UserError: no torch is installed.
    """
    if find_spec("torch") is None:
        raise UserError("runner", "torch is not installed here", "pip install 'reshard[runner]'")
    command = [
        sys.executable, "-m", "runner.agent", "--standalone", "--nproc-per-node", str(nproc_per_node),
        "-m", worker, *arguments,
    ]  # fmt: skip
    if dry_run:
        click.echo(shlex.join(command))
        return
    sys.stdout.flush()
    os.execv(sys.executable, command)


def check_request(manifest: Manifest, options: TrainOptions, world_size: int) -> Degrees:
    """Make sure, without torch, that these options fit a manifest and so many ranks, and give what each rank is for.

    Raises:
        UserError: what does not fit.
    """
    degrees = options.degrees.resolve(manifest.layout.num_ranks, world_size)
    check_trainable(manifest.model.architecture)
    if options.resume.source is None:  # a checkpoint may remember other batch sizes: the ranks check them
        batch = share_of(options.batch, degrees.data)
        timetable = choose_timetable(options.schedule, manifest, batch.num_microbatches)
        check_combination(combine(manifest, options, timetable, degrees))
    return degrees


def check_world(manifest: Manifest, world_size: int) -> None:
    """Raise unless there is one rank for each pipeline rank of the manifest."""
    num_ranks = manifest.layout.num_ranks
    if world_size != num_ranks:
        raise InputError(
            "",
            f"manifest needs {num_ranks} ranks, WORLD_SIZE is {world_size}",
            f"runner launch MANIFEST --nproc-per-node {num_ranks}, or "
            f"reshard pack MANIFEST --layout pp={world_size} --out DIR",
        )
