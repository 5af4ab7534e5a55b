"""The reshard command: a skin over the verbs. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from manifests.errors import InputError, UserError, error_json

if TYPE_CHECKING:
    from reshard.blocks import Io

__all__ = ["main"]

_PLAIN = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
quiet = click.option("--quiet", is_flag=True, help="Show no progress.")
force = click.option("--force", is_flag=True, help="Replace an output that exists, in one step.")
layout_option = click.option(
    "--layout", "spec", required=True, metavar="SPEC",
    help="pp=N[,vpp=K], a Megatron layout string, or a .toml file of module lists.",
)  # fmt: skip
ranks_option = click.option(
    "--pp", "num_ranks", type=click.IntRange(min=1), metavar="P",
    help="Pipeline ranks, for a SPEC that does not say (a Megatron string).",
)  # fmt: skip
drop_option = click.option("--drop", multiple=True, metavar="FQN", help="Leave this tensor behind; may be repeated.")
io_option = click.option(
    "--io",
    type=click.Choice(["direct", "buffered"]),
    default="direct",
    help="Write past the page cache, where the file system can, or through it.",
)
sync_option = click.option(
    "--sync/--no-sync", default=True, help="Wait until the disk has everything, or leave that to the kernel."
)
manifest_argument = click.argument("manifest", type=click.Path(path_type=Path))


@click.group(context_settings=_PLAIN)
@click.version_option(package_name="reshard", prog_name="reshard")
def cli() -> None:
    """Cut a Hugging Face checkpoint into pipeline stages, and put it together again.

    \b
    Example:
      reshard pack ./Llama-3.2-1B --layout pp=2 --out ./Llama-3.2-1B-pp2
    """


@cli.command()
@click.argument("source")
@layout_option
@ranks_option
@drop_option
@as_json
def plan(source: str, spec: str, num_ranks: int | None, drop: tuple[str, ...], as_json: bool) -> None:
    """Show the stages that SPEC gives, before a byte moves.

    SOURCE is a Hugging Face folder or a manifest.

    \b
    Example:
      reshard plan ./Llama-3.2-1B --layout pp=4
    """
    from reshard import report

    _, planned = _plan(source, spec, num_ranks, drop)
    click.echo(json.dumps(report.plan_json(planned)) if as_json else report.plan_table(planned))


@cli.command()
@click.argument("source")
@layout_option
@ranks_option
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write; it must not exist.")
@drop_option
@force
@io_option
@sync_option
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@as_json
@quiet
def pack(
    source: str, spec: str, num_ranks: int | None, out: Path, drop: tuple[str, ...], force: bool, io: Io, sync: bool,
    dry_run: bool, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Write one bundle per stage, and a manifest.

    SOURCE is a Hugging Face folder or a manifest; packing a manifest cuts its bundles anew.

    \b
    Example:
      reshard pack ./Llama-3.2-1B --layout pp=2 --out ./Llama-3.2-1B-pp2
    """
    from reshard import report
    from reshard.engine import WriteOptions
    from reshard.pack import PackOptions
    from reshard.pack import pack as run

    checkpoint, planned = _plan(source, spec, num_ranks, drop)
    if dry_run:
        click.echo(json.dumps(report.plan_json(planned)) if as_json else report.plan_table(planned))
        return
    for name in checkpoint.source.left_out:
        click.echo(f"left out: {name} (weights in a format that reshard does not read)", err=True)
    with _progress("pack", planned.read_nbytes, quiet) as progress:
        write = WriteOptions(io=io, sync=sync, progress=progress)
        manifest = run(checkpoint, planned, PackOptions(out=out, force=force, write=write))
    click.echo(json.dumps(report.pack_json(manifest, out)) if as_json else report.pack_text(manifest, out))


@cli.command()
@manifest_argument
@click.option("--to", "form", type=click.Choice(["hf"]), required=True, help="Format to write.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write; it must not exist.")
@force
@io_option
@sync_option
@as_json
@quiet
def export(
    manifest: Path, form: str, out: Path, force: bool, io: Io, sync: bool, as_json: bool, quiet: bool
) -> None:  # fmt: skip
    """Write a manifest's model as a Hugging Face folder.

    Tensors that were not trained come back byte for byte, in the files they came from.

    \b
    Example:
      reshard export ./Llama-3.2-1B-pp2 --to hf --out ./Llama-3.2-1B-again
    """
    from reshard import report
    from reshard.engine import WriteOptions
    from reshard.export import export_huggingface
    from reshard.formats.bundles import open_manifest

    checkpoint = open_manifest(manifest)
    nbytes = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    with _progress("export", nbytes, quiet) as progress:
        options = WriteOptions(io=io, sync=sync, progress=progress)
        done = export_huggingface(checkpoint, out, force=force, options=options)
    click.echo(json.dumps(report.export_json(done, form, out)) if as_json else report.export_text(done, out))


@cli.command()
@manifest_argument
@as_json
@quiet
def verify(manifest: Path, as_json: bool, quiet: bool) -> None:
    """Read every byte that MANIFEST names, and compare digests. Exit code 4 says that something differs.

    \b
    Example:
      reshard verify ./Llama-3.2-1B-pp2
    """
    from manifests.store import read_manifest
    from reshard import report
    from reshard.verify import verify as run

    nbytes = sum(stage.nbytes for stage in read_manifest(manifest).stages)
    with _progress("verify", nbytes, quiet) as progress:
        done = run(manifest, progress)
    click.echo(json.dumps(report.verify_json(done)) if as_json else report.verify_text(done, manifest))
    if done.differences:
        sys.exit(4)


@cli.command()
@manifest_argument
@click.option("--tensors", is_flag=True, help="List every tensor with its stage, dtype, shape and digest.")
@as_json
def inspect(manifest: Path, tensors: bool, as_json: bool) -> None:
    """Say what a manifest holds, from headers alone.

    \b
    Example:
      reshard inspect ./Llama-3.2-1B-pp2 --tensors
    """
    from reshard.inspect import inspect_json, inspect_text

    click.echo(json.dumps(inspect_json(manifest, tensors)) if as_json else inspect_text(manifest, tensors))


def main() -> None:
    """Run the command; end with its exit code."""
    wants_json = "--json" in sys.argv[1:]
    try:
        try:
            cli.main(standalone_mode=False)
        except OSError as error:
            if error.filename is None:
                raise
            raise InputError(str(error.filename), f"cannot be used: {error.strerror}") from error
    except UserError as error:
        _fail(error_json(error) if wants_json else f"error: {error}", wants_json, error.exit_code)
    except click.exceptions.Abort:
        _fail("interrupted", False, 130)
    except KeyboardInterrupt:
        _fail("interrupted", False, 130)
    except click.ClickException as error:
        if wants_json:
            shown = UserError("", error.format_message(), "see --help")
            _fail(error_json(shown), True, 2)
        error.show()
        sys.exit(2)


def _fail(text: str, on_stdout: bool, code: int) -> None:
    click.echo(text, err=not on_stdout)
    sys.exit(code)


def _plan(source: str, spec: str, num_ranks: int | None, drop: tuple[str, ...]) -> Any:
    from reshard.layout.inventory import inventory_of_modules
    from reshard.layout.spelling import parse_layout
    from reshard.plan import plan_pack
    from reshard.source import open_source

    checkpoint = open_source(source, frozenset(drop))
    shape = checkpoint.shape
    inventory = inventory_of_modules(shape.modules, shape.num_layers, shape.architecture)
    return checkpoint, plan_pack(checkpoint, parse_layout(spec, inventory, num_ranks=num_ranks))


@contextlib.contextmanager
def _progress(verb: str, nbytes: int, quiet: bool) -> Iterator[Callable[[int], object]]:
    from tqdm import tqdm

    with tqdm(
        total=nbytes, desc=verb, unit="B", unit_scale=True, unit_divisor=1024, disable=True if quiet else None
    ) as bar:
        yield bar.update


if __name__ == "__main__":
    main()
