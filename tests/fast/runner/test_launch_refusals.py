"""What `runner launch` refuses at once, before torchrun starts and torch is imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from manifests.digest import digest_bytes
from manifests.errors import InputError, ModelError, UsageError, UserError
from runner.checkpoint.history import checkpoint_path
from runner.commands import cli
from tests.builders import llama_config, reshard, write_model
from tests.fast.models.built import build, read_config
from tests.fast.reshard.forged import change_file
from tests.fast.trained import write_trained

Words = tuple[str, ...]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("refused")
    write_trained(place, "pp=2")
    write_trained(place / "other", "pp=2", intermediate_size=32)
    for name in ("pp2", "quantized"):
        assert reshard("pack", place / "source", "--layout", "pp=2", "--out", place / name).code == 0
    quantize(place / "quantized")
    (place / "text").mkdir()
    (place / "text" / "one.txt").write_text("one two three")
    (place / "link").symlink_to(place)
    return place


def quantize(packed: Path) -> None:
    """Let a config say that its weights are quantized."""
    config = json.loads((packed / "config.json").read_bytes())
    change_file(packed, "config.json", json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}).encode())


REFUSED: list[tuple[str, Words, Words, str]] = [
    ("quantized", (), (), "PLACE/quantized/config.json: quantization_config: training on quantized weights is not "
     "supported\nhint: reshard pack PLACE/quantized/manifest.json --layout SPEC --dequantize bf16 --out DIR"),
    ("trained", (), (), "PLACE/trained/manifest.json: holds optimizer state, and nothing says whether training goes "
     "on from it\nhint: --resume auto does; --resume-weights-only begins a new run with its weights"),
    ("trained", (), ("--resume", "PLACE/gone"), "--resume PLACE/gone: no manifest.json in PLACE/gone\n"
     "hint: a folder without one was never finished"),
    ("trained", (), ("--resume", "PLACE/other/trained"), "PLACE/other/trained/manifest.json: holds another model "
     "of this architecture: they differ in model.layers.0.mlp.down_proj.weight\n"
     "hint: resume a checkpoint of the model that is launched, or launch the manifest of this one"),
    ("trained", (), ("--resume", "PLACE/pp2"), "PLACE/pp2/manifest.json: holds no optimizer state, so training "
     "cannot go on from it\nhint: --resume-weights-only begins a new run with its weights"),
    ("trained", (), ("--resume", "PLACE/trained", "--schedule", "ZBVZeroBubble"), "--schedule: "
     "ZBVZeroBubble requires 2 stages per rank in style v, found 1 in style loop\n"
     "hint: use the layout pp=2,vpp=2,style=v, or the schedule GPipe or 1F1B"),
    ("pp2", ("--nproc-per-node", "8"), ("--tp", "4"),
     "--tp: expected a divisor of 2 (num_key_value_heads of config.json), found 4"),
    ("pp2", ("--nproc-per-node", "6"), (), "--global-batch: expected a multiple of 3, --microbatch 1 times 3 "
     "pipelines side by side, found 8\nhint: take 6 or 9"),
    ("pp2", (), ("--data", "PLACE/gone"), "PLACE/gone: no file, folder or glob matches it\n"
     "hint: check the path for typos"),
    ("pp2", (), ("--eval-data", "PLACE/gone"), "PLACE/gone: no file, folder or glob matches it\n"
     "hint: check the path for typos"),
    ("pp2", (), ("--eval-data", "synthetic"), "--eval-data: synthetic has no end, so it cannot be read once\n"
     "hint: name files"),
    ("pp2", (), ("--save", "PLACE/trained"), "PLACE/trained: already exists\n"
     "hint: choose another folder, or replace it with --force"),
    ("pp2", (), ("--save", "PLACE/source", "--force"), "PLACE/source: already exists and was not "
     "written by this command; --force does not replace it\nhint: choose another folder, or remove it"),
]  # fmt: skip

TAKEN: list[tuple[Words, str]] = [
    (("--save", "PLACE/pp2"), "the launched PLACE/pp2"),
    (("--save", "PLACE"), "the launched PLACE/pp2"),
    (("--save", "PLACE/out", "--checkpoint", "PLACE/out"), "--checkpoint PLACE/out"),
    (("--save", "PLACE/out/../out", "--checkpoint", "PLACE/out/ck"), "--checkpoint PLACE/out/ck"),
    (("--save", "PLACE/link/out", "--log-dir", "PLACE/out/log"), "--log-dir PLACE/out/log"),
    (("--save", "PLACE/other/trained", "--resume", "PLACE/other/trained/manifest.json"),
     "--resume PLACE/other/trained/manifest.json"),
    (("--save", "PLACE/text", "--data", "PLACE/te*/*.txt"), "--data PLACE/te*/*.txt"),
    (("--save", "PLACE/text", "--eval-data", "PLACE/text/one.txt"), "--eval-data PLACE/text/one.txt"),
]  # fmt: skip


@pytest.mark.parametrize(("packed", "flags", "training", "message"), REFUSED)
def test_request_that_cannot_begin_is_refused(
    packed: str, flags: Words, training: Words, message: str, place: Path
) -> None:
    data = () if "--data" in training else ("--data", "synthetic")
    words = ["launch", f"PLACE/{packed}", *flags, "--dry-run", "--", *data, *training]
    done = CliRunner().invoke(cli, [word.replace("PLACE", str(place)) for word in words])
    assert isinstance(done.exception, UserError), done.output
    assert str(done.exception).replace(str(place), "PLACE") == message


@pytest.mark.parametrize("training", [(), ("--resume", "auto", "--checkpoint", "PLACE/new")])
@pytest.mark.parametrize(
    ("config", "num_tensor", "code"),
    [("tiny-qwen2", 2, "options.tp-architecture"), ("tiny-llama", 3, "options.tp-divisor")],
)
def test_tensor_parallelism_that_no_number_of_ranks_allows_is_refused_before_ranks_are_counted(
    config: str, num_tensor: int, code: str, training: Words, tmp_path: Path
) -> None:
    build(read_config(config)).save_pretrained(tmp_path / "source")
    assert reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "pp2").code == 0
    words = ["launch", "PLACE/pp2", "--nproc-per-node", "2", "--dry-run", "--", "--data", "synthetic", *training]
    words += ["--tp", str(num_tensor)]
    done = CliRunner().invoke(cli, [word.replace("PLACE", str(tmp_path)) for word in words])
    assert isinstance(done.exception, UsageError), done.output
    assert (done.exception.code, done.exception.where) == (code, "--tp")


@pytest.mark.parametrize(("training", "taken"), TAKEN)
def test_save_that_would_take_something_of_the_run_away_is_refused(training: Words, taken: str, place: Path) -> None:
    data = () if "--data" in training else ("--data", "synthetic")
    words = ["launch", "PLACE/pp2", "--dry-run", "--", *data, "--force", *training]
    done = CliRunner().invoke(cli, [word.replace("PLACE", str(place)) for word in words])
    assert isinstance(done.exception, UsageError), done.output
    assert str(done.exception).replace(str(place), "PLACE") == (
        f"--save {training[1]}: would take the place of {taken}\nhint: choose a folder with nothing else of this run"
    )


@pytest.mark.parametrize("flag", ["--save", "--checkpoint"])
@pytest.mark.parametrize("inside", ["pp2/trained", "pp2/../pp2/a/b", "linked/a"])
def test_run_that_would_save_inside_its_bundles_is_refused(flag: str, inside: str, place: Path) -> None:
    if not (place / "linked").exists():
        (place / "linked").symlink_to("pp2")
    training = ["--data", "synthetic", flag, str(place / inside)]
    done = CliRunner().invoke(cli, ["launch", str(place / "pp2"), "--dry-run", "--", *training])
    assert str(done.exception) == (
        f"{flag} {place}/{inside}: would save inside the launched {place}/pp2, and be gone when that is replaced\n"
        "hint: choose a folder beside it"
    )


def test_run_whose_checkpoints_lie_inside_its_bundles_goes_on(place: Path, tmp_path: Path) -> None:
    packed = shutil.copytree(place / "pp2", tmp_path / "pp2")
    history = packed / "ck"
    shutil.copytree(place / "trained", checkpoint_path(history, 60))
    words = ["launch", str(packed), "--dry-run", "--", "--data", "synthetic", "--checkpoint", str(history)]
    done = CliRunner().invoke(cli, [*words, "--resume", "auto"])
    assert done.exception is None, done.exception
    inside = CliRunner().invoke(cli, [*words, "--save", f"{history}/final"]).exception
    assert str(inside).startswith(f"--save {history}/final: would save inside the launched {packed}, ")


def test_save_under_the_name_of_a_checkpoint_is_refused(place: Path) -> None:
    training = ["--data", "synthetic", "--checkpoint", f"{place}/ck", "--save", f"{place}/ck/step-000010"]
    done = CliRunner().invoke(cli, ["launch", str(place / "pp2"), "--dry-run", "--", *training])
    assert str(done.exception) == (
        f"--save {place}/ck/step-000010: has the name of a checkpoint of --checkpoint {place}/ck\n"
        "hint: choose another name"
    )


def test_manifest_in_a_snapshot_of_the_hubs_cache_begins(place: Path) -> None:
    cache = place / "hub" / "models--org--pp2"
    snapshot = cache / "snapshots" / "abc"
    (cache / "blobs").mkdir(parents=True)
    for file in (path for path in (place / "pp2").rglob("*") if path.is_file()):
        blob, link = cache / "blobs" / digest_bytes(file.read_bytes()), snapshot / file.relative_to(place / "pp2")
        shutil.copy(file, blob)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    for manifest in (snapshot, snapshot / "manifest.json"):
        done = CliRunner().invoke(cli, ["launch", str(manifest), "--dry-run", "--", "--data", "synthetic"])
        assert done.exception is None, done.exception
        assert f"runner.train {snapshot}/manifest.json " in done.stdout


@pytest.mark.parametrize(
    "training", [(), ("--resume", "auto", "--checkpoint", "PLACE/new"), ("--tp", "2"), ("--dp-shard", "auto")]
)
def test_request_that_can_begin_is_not(training: Words, place: Path) -> None:
    words = ["launch", str(place / "pp2"), "--nproc-per-node", "4", "--dry-run", "--", "--data", "synthetic", *training]
    done = CliRunner().invoke(cli, [word.replace("PLACE", str(place)) for word in words])
    assert done.exception is None, done.exception


@pytest.mark.parametrize("verb", ["launch", "eval", "generate"])
@pytest.mark.parametrize(
    ("changes", "where", "code"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout", "config.not-modelled"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.rope_type", "config.unsupported-rope"),
        ({"rms_norm_eps": -1}, "rms_norm_eps", "config.unsupported-rope"),
    ],
)
def test_config_that_no_family_models_is_refused_before_ranks_are_started_or_submitted(
    changes: dict[str, Any], where: str, code: str, verb: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "source", llama_config(**changes))
    assert reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "packed").code == 0
    (tmp_path / "a.txt").write_text("a")
    words = {
        "launch": ["--scheduler", "slurm", "--dry-run", "--", "--data", "synthetic"],
        "eval": ["--dry-run", "--data", str(tmp_path / "a.txt")],
        "generate": ["--dry-run", "--tokens", "1"],
    }[verb]
    done = CliRunner().invoke(cli, [verb, str(tmp_path / "packed"), *words])
    assert isinstance(done.exception, InputError), done.output
    assert (done.exception.where, done.exception.code) == (f"config.json: {where}", code)


def test_reading_verbs_refuse_quantized_weights_at_once(place: Path) -> None:
    done = CliRunner().invoke(cli, ["generate", str(place / "quantized"), "--tokens", "1", "--dry-run"])
    assert isinstance(done.exception, ModelError)
    assert done.exception.code == "model.quantized"


def test_torch_is_not_imported(place: Path) -> None:
    words = ["runner", "launch", str(place / "trained"), "--dry-run", "--", "--data", "synthetic", "--resume", "auto"]
    script = f"import sys; sys.argv = {words}; from runner.cli import main; main(); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
