"""What `runner eval` takes, and what it refuses before any rank starts."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from manifests.digest import digest_bytes
from manifests.errors import UsageError
from manifests.models.adapters import RECORD_NAME
from runner.cli import main
from runner.commands import cli
from runner.config.schema import DataOptions
from runner.evaluation.options import parse_eval
from tests.builders import edit_manifest
from tests.fast.trained import write_trained


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained(tmp_path_factory.mktemp("verbs"), "pp=2", num_hidden_layers=1)


def run(arguments: Sequence[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", ["runner", *map(str, arguments)])
    main()
    return capsys.readouterr().out


def test_ranks_get_the_flags_as_they_were_written(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data", "two words.txt", "--seq-len", "3", "--dtype", "bf16"]
    (packed.parent / "two words.txt").write_text("a")
    monkeypatch.chdir(packed.parent)
    command = shlex.split(run(["eval", packed, *flags, "--dry-run"], monkeypatch, capsys))
    assert command[command.index("--nproc-per-node") + 1] == "2"
    assert command[command.index("runner.evaluation.evaluate") + 1 :] == [str(packed), *flags]
    options = parse_eval(command[command.index("runner.evaluation.evaluate") + 1 :])
    assert (options.data.sources, options.seq_len, options.dtype) == (("two words.txt",), 3, "bf16")
    assert options.manifest == packed


def test_two_dashes_before_the_flags_mean_nothing(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data", "a.txt", "--no-packing", "--dry-run"]
    with_dashes = run(["eval", packed, "--", *flags], monkeypatch, capsys)
    assert with_dashes == run(["eval", packed, *flags], monkeypatch, capsys)
    assert parse_eval([str(packed), *flags[:-1]]).data == DataOptions(sources=("a.txt",), pack=False)


@pytest.mark.parametrize("words", [("eval", "--data", "a.txt"), ("measure", "--out", "times.json")])
def test_manifest_that_is_not_on_this_machine_is_refused_as_it_was_typed(words: Sequence[str]) -> None:
    error = CliRunner().invoke(cli, [words[0], "s3://bucket/pp2", *words[1:]]).exception
    assert isinstance(error, UsageError)
    assert (error.code, error.where) == ("options.remote-manifest", "s3://bucket/pp2")


def test_flag_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError) as error:
        parse_eval(["folder", "--data", "a.txt", "--prompts", "a"])
    assert (error.value.where, error.value.code) == ("--prompts", "usage.arguments")


@pytest.mark.parametrize(
    ("flags", "code"),
    [(("--data", "empty.txt"), "data.empty"), (("--data", "a.txt", "--device", "cuda"), "launch.too-few-gpus")],
)
def test_request_that_every_rank_would_refuse_starts_none(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: Sequence[str], code: str
) -> None:
    monkeypatch.chdir(packed.parent)
    for name, text in (("empty.txt", ""), ("a.txt", "a")):
        Path(name).write_text(text)
    with pytest.raises(SystemExit):
        run(["eval", packed, *flags], monkeypatch, capsys)
    assert f"[{code}]" in capsys.readouterr().err


def test_checkpoint_of_adapters_alone_is_refused_before_any_rank_starts(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, record = tmp_path / "step-000003", json.dumps({"version": 1, "base": {"location": "base-pp2"}, "lora": {}})
    shutil.copytree(packed, place)
    (place / RECORD_NAME).write_text(record)
    entry = {"path": RECORD_NAME, "nbytes": len(record), "digest": digest_bytes(record.encode())}
    edit_manifest(place, lambda document: document["files"].append(entry))
    with pytest.raises(SystemExit):
        run(["eval", place, "--data", "a.txt", "--dry-run"], monkeypatch, capsys)
    said = capsys.readouterr().err
    assert "[checkpoint.adapters-alone]" in said
    assert "base-pp2" in said


def test_endless_data_cannot_be_evaluated() -> None:
    with pytest.raises(UsageError, match=r"^--data: "):
        parse_eval(["folder", "--data", "synthetic"])


def test_refusal_is_one_json_object_where_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(["eval", tmp_path / "nothing", "--data", "a.txt", "--json"], monkeypatch, capsys)
    assert exit_.value.code == 3
    printed = json.loads(capsys.readouterr().out)
    assert (printed["version"], str(tmp_path / "nothing") in printed["error"]["where"]) == (1, True)
