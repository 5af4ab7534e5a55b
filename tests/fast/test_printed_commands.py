"""What is printed can be pasted: a folder with a space in its name is one word of a command."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from manifests.errors import UserError
from runner.commands import cli
from tests.builders import pack, reshard, run, write_model
from tests.fast.runner.launch.test_launch_refusals import quantize


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    folder = tmp_path / "a b"
    write_model(folder / "source")
    return pack(folder / "source", folder / "runs" / "step-000001")


def words_of_hint(*args: str | Path) -> list[str]:
    """Return the words, as of a shell, of what an error says to do."""
    return shlex.split(reshard(*args, "--json").json["error"]["hint"])


def test_newest_checkpoint_is_one_word(packed: Path) -> None:
    assert f"{packed}?" in words_of_hint("verify", packed.parent)


def test_damaged_folder_that_is_pushed_is_one_word(packed: Path) -> None:
    shard = next(packed.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert words_of_hint("push", packed, "org/name")[:3] == ["reshard", "verify", str(packed)]


def test_exported_folder_is_one_word(packed: Path) -> None:
    out = packed.parent / "exported"
    assert shlex.split(run("export", packed, "--to", "dcp", "--out", out).out)[-1] == str(out)


def test_quantized_manifest_that_is_launched_is_one_word(packed: Path) -> None:
    quantize(packed)
    done = CliRunner().invoke(cli, ["launch", str(packed), "--dry-run", "--", "--data", "synthetic"])
    assert isinstance(done.exception, UserError), done.output
    assert shlex.split(done.exception.hint)[:3] == ["reshard", "pack", str(packed / "manifest.json")]
