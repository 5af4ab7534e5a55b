"""The command itself: what it prints, how it ends, what it imports."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from manifests.command.console import run_command
from reshard.cli.command import cli
from reshard.cli.options import Verb
from tests.builders import EMBEDDING, HEAD, leftovers, llama_config, refusal, reshard, run, without_digest, write_model

ROOT = Path(__file__).parents[4]
COMMAND = "from reshard.cli import main; main()"
LOADED = (
    "import atexit, sys; atexit.register(lambda: print(*sorted({m.partition('.')[0] for m in sys.modules}), "
    "file=sys.stderr)); "
)
HEAVY = {"numpy", "safetensors", "torch", "torchtitan", "transformers"}


def subprocess_of(code: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_home_is_no_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "source")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "source")
    run("pack", "~/source", "--layout", "pp=2", "--out=~/out")
    assert (tmp_path / "out" / "manifest.json").is_file()
    assert not (tmp_path / "source" / "~").exists()


@pytest.mark.parametrize("verb", ["pack", "export", "verify", "inspect"])
def test_folder_of_checkpoints_is_refused_with_the_newest(verb: str, tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    for step in ("step-000009", "step-000010", "step-1000000"):
        run("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "checkpoints" / step)
    for left in ("step-000009.set-aside-1", ".step-000010.removed"):
        shutil.copytree(tmp_path / "checkpoints" / "step-000010", tmp_path / "checkpoints" / left)
    out = ("--out", tmp_path / "out")
    flags = {"pack": ("--layout", "pp=2", *out), "export": ("--to", "hf", *out)}
    error = reshard(verb, tmp_path / "checkpoints", *flags.get(verb, ()), "--json").json["error"]
    assert error["hint"] == f"did you mean {tmp_path}/checkpoints/step-1000000?"


def test_inspect_names_model_source_layout_stages_ties_and_files(tmp_path: Path) -> None:
    write_model(tmp_path / "source", llama_config(tie_word_embeddings=True))
    reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "out")
    lines = reshard("inspect", tmp_path / "out").out.splitlines()
    assert lines[0] == "LlamaForCausalLM, 4 layers, 8,464 parameters"
    assert lines[1] == f"from huggingface: {tmp_path}/source"
    assert lines[3] == "layout pp=2: 2 stages on 2 ranks, style loop"
    assert lines[5] == "    0     0    0  model.embed_tokens, model.layers.0-1        19   4,544  8.88 KiB"
    assert lines[7] == f"tied: {EMBEDDING} (stage 0) = {HEAD} (stage 1)"
    assert lines[8] == "files: config.json, generation_config.json, tokenizer.json, source.json"
    shown = reshard("inspect", tmp_path / "out", "--json").json
    assert shown == {
        "version": 1,
        "manifest": json.loads(without_digest((tmp_path / "out/manifest.json").read_bytes())),
    }


@pytest.mark.parametrize("args", [("--help",), ("pack", "--help")])
def test_help_imports_nothing_heavy(args: tuple[str, ...]) -> None:
    assert subprocess_of(COMMAND, *args).stdout.startswith("Usage:")
    assert set(subprocess_of(LOADED + COMMAND, *args).stderr.split()) & HEAVY == set()


def test_plan_pack_verify_and_export_run_without_torch(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    out, again = tmp_path / "out", tmp_path / "again"
    for args in (
        ("plan", tmp_path / "source", "--layout", "pp=2"),
        ("pack", tmp_path / "source", "--layout", "pp=2", "--out", out),
        ("verify", out),
        ("inspect", out, "--tensors"),
        ("export", out, "--to", "hf", "--out", again),
    ):
        ended = subprocess_of(LOADED + COMMAND, *args)
        assert ended.returncode == 0, ended.stderr
        loaded = set(ended.stderr.split())
        assert "reshard" in loaded
        assert loaded & HEAVY == set()


def test_disk_that_refuses_a_shard_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "source", llama_config(vocab_size=4000))
    limited = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)); "
    )
    ended = subprocess_of(limited + COMMAND, "pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "out")
    assert ended.returncode == 3
    assert ended.stderr.startswith(f"error: {tmp_path}/out: ")
    assert leftovers(tmp_path / "out") == []


def test_path_that_the_system_refuses_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a" * 300
    assert refusal("plan", name, "--layout", "pp=2").found == (3, "store.unreadable", f"{name}/manifest.json")
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: len(os.listdir(name)), is_json=True)
    error = json.loads(capsys.readouterr().out)["error"]
    assert (ended.value.code, error["code"], error["where"]) == (3, "system.refused", name)


def test_thread_that_the_system_refuses_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise RuntimeError("can't start new thread")  # Source: Modules/_threadmodule.c

    with pytest.raises(SystemExit) as ended:
        run_command(refuse, is_json=True)
    assert (ended.value.code, json.loads(capsys.readouterr().out)["error"]["code"]) == (3, "system.refused")


@pytest.mark.parametrize("verb", ["pack", "export", "plan"])
def test_help_has_every_flag_in_one_group_and_a_dozen_first(verb: str) -> None:
    command = cli.get_command(None, verb)
    assert isinstance(command, Verb)
    names = [name for of_group in command.groups.values() for name in of_group]
    assert sorted(names) == sorted(str(option.name) for option in command.params if isinstance(option, click.Option))
    shown = run(verb, "--help").out
    titles = [line.removesuffix(":") for line in shown.splitlines() if line[:1].isalpha() and line.endswith(":")]
    assert titles[-1 - len(command.groups) :] == [*command.groups, "Options"]
    assert len(next(iter(command.groups.values()))) <= 12
    assert not re.search("^  (SOURCE|MANIFEST)", shown.partition("Options:")[2], re.MULTILINE)
