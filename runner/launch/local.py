"""One machine: check the request against the manifest, then become torchrun."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click

from manifests.errors import InputError, UserError
from manifests.schema import Manifest
from manifests.store import find_manifest, read_manifest
from runner.options import parse_training
from runner.recipe import check_schedule, check_trainable, default_schedule

__all__ = ["check_world", "launch_here"]


def launch_here(manifest_path: Path, training: Sequence[str], *, nproc_per_node: int | None, dry_run: bool) -> None:
    """Replace this process by torchrun, with one worker for each pipeline rank.

    Raises:
        UserError: no manifest, training options that do not fit it, or no torch installed.
    """
    options = parse_training(training)
    path = find_manifest(manifest_path).resolve()
    manifest = read_manifest(path)
    nproc = manifest.layout.num_ranks if nproc_per_node is None else nproc_per_node
    check_world(manifest, nproc)
    check_trainable(manifest.model.architecture)
    if options.resume.source is None:  # a checkpoint may remember other batch sizes: the ranks check them
        schedule = options.schedule or manifest.layout.schedule or default_schedule(manifest.placement)
        check_schedule(schedule, manifest.placement, options.batch.num_microbatches)
    if find_spec("torch") is None:
        raise UserError("runner", "torch is not installed here", "pip install 'reshard[runner]'")
    command = [
        sys.executable, "-m", "runner.agent", "--standalone", "--nproc-per-node", str(nproc),
        "-m", "runner.worker", str(path), *training,
    ]  # fmt: skip
    if dry_run:
        click.echo(shlex.join(command))
        return
    sys.stdout.flush()
    os.execv(sys.executable, command)


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
