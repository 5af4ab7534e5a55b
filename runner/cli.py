"""The runner command: checks what can be checked without torch, then hands over to torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from manifests.errors import UserError

__all__ = ["main"]

_PLAIN = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@click.group(context_settings=_PLAIN)
@click.version_option(package_name="reshard", prog_name="runner")
def cli() -> None:
    """Train a packed model, each rank holding only its own pipeline stages.

    \b
    Example:
      runner launch ./Llama-3.2-1B-pp2 -- --steps 100 --seq-len 512 --global-batch 16 --data text/
    """


@cli.command()
@click.argument("manifest", type=click.Path(path_type=Path))
@click.argument("training", nargs=-1, type=click.UNPROCESSED, metavar="-- [TRAINING OPTIONS]")
@click.option(
    "--nproc-per-node",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="as many as the manifest has pipeline ranks",
    help="Ranks to start on this machine.",
)
@click.option("--dry-run", is_flag=True, help="Print the command and stop.")
def launch(manifest: Path, training: tuple[str, ...], nproc_per_node: int | None, dry_run: bool) -> None:
    """Train the model of MANIFEST on this machine, under torchrun.

    What follows -- is for the training; "runner launch MANIFEST -- --help" lists it.

    \b
    Example:
      runner launch ./Llama-3.2-1B-pp2 --nproc-per-node 2 -- --steps 100 --data text/
    """
    from runner.launch.local import launch_here

    launch_here(manifest, training, nproc_per_node=nproc_per_node, dry_run=dry_run)


def main() -> None:
    """Run the command; end with its exit code."""
    try:
        cli.main(standalone_mode=False)
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)


if __name__ == "__main__":
    main()
